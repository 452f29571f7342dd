"""Executing a schedule: kernels, tensors, streams, process groups and the reference."""
