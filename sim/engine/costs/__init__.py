"""What an op takes: from measured points, or from rates of datasheets."""
