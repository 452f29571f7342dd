"""The words that all rooms speak: models, workloads, meshes, options, and profiles of machines."""
