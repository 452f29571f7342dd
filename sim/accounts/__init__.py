"""What a schedule comes to: its trace, where the time went, and what its buffers take."""
