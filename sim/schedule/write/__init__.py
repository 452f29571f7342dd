"""What writing a schedule takes: the builder of a program, and the pieces that methods of attention share."""
