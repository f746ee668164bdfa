"""What XLA runs on every device: its program after SPMD partitioning, read from the text that it dumps."""
