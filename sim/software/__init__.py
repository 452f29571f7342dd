"""What training software runs, as data: kernels, losses and optimisers as frameworks have them."""
