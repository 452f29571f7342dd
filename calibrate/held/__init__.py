"""Profiles held against their own points, and against each other."""
