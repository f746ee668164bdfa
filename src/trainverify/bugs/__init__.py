"""Real bugs of distributed training as pairs of plans: a right one and a wrong one that differ where the bug is."""
