"""Questions over many cells: sweeps, crossovers, winners, and the roofline of a machine."""
