"""What software computes a step with, as far as it decides time."""
