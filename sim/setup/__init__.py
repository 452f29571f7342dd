"""From names to a prediction: what ``import longstep`` offers to simulate with."""
