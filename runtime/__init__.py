"""The hardware: plays a checked schedule on torch.distributed, or all of its ranks in one process."""
