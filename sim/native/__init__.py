"""C that plays what Python describes: compiled at first use, and never needed."""
