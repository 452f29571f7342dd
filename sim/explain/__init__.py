"""A run explained by its configuration and a line of its log."""
