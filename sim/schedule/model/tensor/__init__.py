"""Layers whose weights are divided over a group of ranks: tensor parallelism."""
