"""Approximations that a user allows: named changes of the logical program, which is then what a plan must equal."""

from trainverify.approximate.apply import Applied, Change, applied, as_declared
from trainverify.approximate.approximation import Approximation, Changed, Setting
from trainverify.approximate.declared import Allow, Declared, declared
from trainverify.approximate.rewrite import Unfit, substituted
from trainverify.approximate.table import APPROXIMATIONS

__all__ = [
    "APPROXIMATIONS",
    "Allow",
    "Applied",
    "Approximation",
    "Change",
    "Changed",
    "Declared",
    "Setting",
    "Unfit",
    "applied",
    "as_declared",
    "declared",
    "substituted",
]
