"""What follows from a schedule: dependencies, matching ops of ranks, kernels and their workspace, drawings."""
