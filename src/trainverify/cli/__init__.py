"""The command line, one module for each command. A module is imported when its command runs: it may import engines and solvers."""

from trainverify.cli.application import main, run

__all__ = ["main", "run"]
