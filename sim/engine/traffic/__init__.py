"""What collectives put on every link."""
