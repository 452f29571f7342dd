"""Predictions held against runs over links of set rates."""
