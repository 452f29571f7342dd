"""The code that each op runs, in PyTorch."""
