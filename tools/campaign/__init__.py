"""Random training steps, random correct plans of them, random mistakes in those plans: what the verifier says to each."""
