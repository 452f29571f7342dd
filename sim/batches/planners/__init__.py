"""Planners: each puts documents on ranks by a rule of its own."""
