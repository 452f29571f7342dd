"""The machine as data: specs from TOML, built into a cluster of devices, shared resources and routes."""
