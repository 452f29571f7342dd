"""What is computed around attention: the equations of a transformer layer, and the programs that carry them out."""
