"""What a schedule is: views of buffers, ops, programs, masks and layouts; data only."""
