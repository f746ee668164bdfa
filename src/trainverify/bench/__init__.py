"""What proofs cost: time and memory by phase, and how they grow."""
