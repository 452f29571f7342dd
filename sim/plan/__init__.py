"""The search for the fastest configuration that fits: the space, its bounds, and the order in which it is tried."""
