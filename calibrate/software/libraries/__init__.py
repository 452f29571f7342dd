"""One file for each library whose kernels are counted."""
