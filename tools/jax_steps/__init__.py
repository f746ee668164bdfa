"""Random JAX training steps, really run on host devices, against our verdict."""
