"""How kernels of software are counted: of layers, losses, optimisers and whole steps."""
