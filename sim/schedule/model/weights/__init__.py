"""Where weights lie on ranks: what a rank owns, gathers, sums and updates."""
