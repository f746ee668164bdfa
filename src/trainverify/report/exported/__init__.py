"""Counterexamples as stand-alone tests: NumPy code of both programs, and inputs on which they differ."""
