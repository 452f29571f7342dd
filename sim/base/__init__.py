"""What all rooms stand on, and what knows none: errors, files, presets, how figures are written, processes."""
