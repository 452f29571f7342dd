"""What the page that is served asks for, and its answers."""
