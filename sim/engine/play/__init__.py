"""The players: costs of ops become times of a step."""
