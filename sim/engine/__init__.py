"""The simulator: costs, shared resources, and the player that puts them on SimPy's clock."""
