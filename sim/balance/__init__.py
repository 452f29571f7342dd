"""Documents of unlike lengths on ranks: what each planner makes of them."""
