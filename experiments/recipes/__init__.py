"""Complete runs with a name, in Python: ``python -m experiments.recipes NAME``."""
