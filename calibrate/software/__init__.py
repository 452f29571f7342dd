"""What training software runs, counted on the meta device: kernels, what backward keeps, and peaks of allocation."""
