"""Calibration: times the kernels and links that the runtime uses, and writes them down as a profile."""
