"""What a played step comes to: figures, what it is bound by, its critical path, and whether it fits."""
