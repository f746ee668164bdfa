"""Random PyTorch training steps, really run by gloo, against our verdict."""
