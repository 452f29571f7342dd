"""What joins GPUs and nodes: links, switches, direct networks, and the resources that they are."""
