"""HTML pages and SVG figures of what ``experiments.evidence`` found."""
