"""The base of all rooms, which imports none of them: errors, files, presets, how figures are written, processes."""
