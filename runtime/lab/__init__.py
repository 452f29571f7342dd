"""Small networks of this machine's own: ranks in network namespaces, joined by links of set rates."""
