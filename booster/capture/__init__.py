"""A whole training step as one graph of a device: what would keep it from that, and the graph."""
