"""Batches of documents of many lengths, and planners that balance attention over them, as pure functions."""
