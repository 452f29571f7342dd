"""A cluster as the tools of a machine print it, read, and written as TOML."""
