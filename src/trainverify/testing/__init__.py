"""Verdicts in test suites: an assertion, and the pytest plugin that keeps its reports."""
