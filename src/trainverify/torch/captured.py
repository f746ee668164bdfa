"""What is captured of one process: its programs, one for each step, and what is known about them besides."""

from __future__ import annotations

from dataclasses import dataclass, field

from trainverify.check.findings import Finding
from trainverify.graph.program import Program, Source
from trainverify.torch.agreement import Ledger
from trainverify.torch.placed import Described
from trainverify.torch.reading import Branch
from trainverify.torch.translate import Missing


@dataclass
class Captured:
    """A rank's program, and what is known about it besides."""

    program: Program
    rank: int | None
    groups: dict[str, tuple[int, ...]] = field(default_factory=dict)
    placed: dict[str, Described] = field(default_factory=dict)  # source, or output of a gradient → how it lies
    shapes: dict[str, list[int]] = field(default_factory=dict)  # state → the shape of its parameter
    findings: list[Finding] = field(default_factory=list)
    assumed: list[str] = field(default_factory=list)
    missing: dict[str, Missing] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)
    merged: list[str] = field(default_factory=list)
    unused: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)  # of a DDP group: parameters that this rank did not use
    seconds: float = 0.0
    ledger: Ledger = field(default_factory=Ledger)
    branches: list[Branch] = field(default_factory=list)  # conditions on data, and the ways that were taken
    chosen: list[str] = field(default_factory=list)  # what a run on real tensors read
    used: dict[str, Source | None] = field(default_factory=dict)  # parameter → where its gradient is used
    structure: dict[str, str] = field(default_factory=dict)  # what decides on later steps besides values, and what the step made of it
    by_hand: tuple[str, ...] = ()  # of the program's sources and state, tensors in variables, containers and attributes
    tables: dict[str, bool] = field(default_factory=dict)  # buffers that count as tables of constants; whether a step changes them
    left: list[str] = field(default_factory=list)  # gradients that the step before left, and that this one uses


Steps = tuple[Captured, ...]  # one after the other


def condition_name(i: int) -> str:
    """Of the output that a condition on data is compared as."""
    return f"condition {i + 1}"


def compared_name(i: int) -> str:
    """Of the output that the number is compared as that a condition is a function of."""
    return f"number of condition {i + 1}"


def is_condition(metric: str | None, count: int) -> bool:
    """Whether a metric is one of the first conditions on data, or the number that it is a function of."""
    return metric in {n for i in range(count) for n in (condition_name(i), compared_name(i))}
