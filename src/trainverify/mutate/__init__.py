"""Random single mistakes in a plan, the verdict on each, and whether a PROVED one is harmless."""
