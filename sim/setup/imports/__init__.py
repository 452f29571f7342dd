"""What a run was configured with, read from the file of its framework: see README.md."""
