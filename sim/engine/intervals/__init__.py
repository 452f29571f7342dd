"""How far a predicted time may be off."""
