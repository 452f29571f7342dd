"""Whether a measured step is as its configuration promises, and what it points to."""
