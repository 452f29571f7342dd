"""What people run: the command line, comparisons, recipes, benchmarks. Imports all others, imported by none."""
