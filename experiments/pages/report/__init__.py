"""The report of results that were kept, by chapters."""
