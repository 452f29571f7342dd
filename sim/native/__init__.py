"""The native player, in C: compiled at first use. SimPy plays the same where it cannot be compiled."""
