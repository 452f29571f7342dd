"""Starting, watching and ending the processes of ranks, here or by torchrun."""
