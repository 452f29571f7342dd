"""How figures are written for people: what tables and pages use of ``sim.units``."""

from sim.units import length, percent, rate, seconds, size

__all__ = ["length", "percent", "rate", "seconds", "size"]
