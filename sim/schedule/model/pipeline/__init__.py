"""Stages of a model on ranks of their own, which hand micro-batches on (arXiv:1811.06965)."""
