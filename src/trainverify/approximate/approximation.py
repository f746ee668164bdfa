"""What an approximation is: a name, a change of the logical program, and what it may ask about the plan."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from trainverify.approximate.rewrite import Unfit
from trainverify.graph.lineage import Layout, Pattern, Placements, Shard, pattern_dims
from trainverify.graph.plan import Plan
from trainverify.graph.program import Program
from trainverify.ops import OPS
from trainverify.ops.table import OpTable


@dataclass(frozen=True)
class Setting:
    """The plan that deviates, and the options that the approximation was declared with."""

    plan: Plan
    options: Mapping[str, str] = field(default_factory=dict)
    ops: OpTable = OPS

    def number(self, option: str) -> int:
        """An option that must be given: a number, 1 or more."""
        text = self.options.get(option)
        if text is None:
            raise Unfit(f"the option {option}=N is missing")
        if not (text.isascii() and text.isdigit()) or int(text) < 1:
            raise Unfit(f"{option}={text}: a number is expected, 1 or more")
        return int(text)

    def batch_axes(self, program: Program) -> tuple[str, ...]:
        """The mesh axes that cut the rows of the batch: as the option `axes` says, else as all inputs are laid out."""
        mesh = self.plan.mesh
        if "axes" in self.options:
            axes = tuple(self.options["axes"].split("+"))
            for a in axes:
                if a not in mesh.names:
                    raise Unfit(f"axes={self.options['axes']}: {mesh} has no axis {a!r}")
        else:
            several = {_row_axes(lay, mesh.names) for lay in self.plan.lineage if lay.logical in program.inputs}
            if len(several) != 1:
                raise Unfit("the inputs are cut in different ways: the option axes=AXIS says along which mesh axes the batch is cut")
            axes = several.pop()
        if math.prod(mesh.length(a) for a in axes) < 2:
            raise Unfit(f"the plan does not divide the batch: no axis of {mesh} cuts its rows")
        return axes

    def parts(self, axes: tuple[str, ...]) -> int:
        return math.prod(self.plan.mesh.length(a) for a in axes)


def _row_axes(lay: Layout, names: tuple[str, ...]) -> tuple[str, ...]:
    """The mesh axes that cut dimension 0, the slowest first."""
    if isinstance(lay.form, Placements):
        return tuple(a for a, p in lay.form.axes if p == Shard(0))
    if not isinstance(lay.form, Pattern):
        raise Unfit(f"{lay.local} is laid out rank by rank: the option axes=AXIS says along which mesh axes the batch is cut")
    first = pattern_dims(lay.form.text)[:1]
    axes = [n for n in (first[0] if first else ()) if n in names]
    if first and list(first[0][: len(axes)]) != axes:
        raise Unfit(f"{lay}: the rows of one rank are not adjacent in the batch")
    return tuple(axes)


@dataclass(frozen=True)
class Changed:
    """The changed program, and where tensors of it have a part for every rank along some axes: in front of dimension 0."""

    program: Program
    says: str  # what it computes instead, in one clause
    by_rank: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Approximation:
    """A named change. `change` raises Unfit where the program has no such op, or where its sizes do not allow it."""

    name: str
    summary: str
    change: Callable[[Program, Setting], Changed]
    options: Mapping[str, str] = field(default_factory=dict)  # name → what it says
