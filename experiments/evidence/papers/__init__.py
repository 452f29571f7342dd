"""Predictions held against measurements of papers and repositories."""
