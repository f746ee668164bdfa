"""Single obligations at the sizes of the plan, on all ranks: only what they are made of is computed, and dropped once it is used."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from trainverify.axes.reduction import NotABoundary
from trainverify.axes.system import System
from trainverify.evaluate.compare import needed_for
from trainverify.evaluate.flow import tasks_of
from trainverify.evaluate.run import costs, elements, products
from trainverify.evaluate.small import Small, TooMuch, shrink_system
from trainverify.graph.obligations import Obligation
from trainverify.graph.program import Program

MOST: Final = 200_000_000  # elements that one obligation is made of, in both programs, on all ranks together
PRODUCTS: Final = 100_000_000_000  # that contractions add up
LEFT: Final = 2 * MOST  # elements of all that is evaluated together
TIMES: Final = 12  # that anything is evaluated
WITHIN: Final = 10  # times as many elements of anything that ops make on their way
HELD: Final = 300_000  # layouts times ranks, up to which both programs are laid out at full size
FULL: Final = 1 << 60  # nothing larger than this shrinks


class Slices:
    """What single obligations of a system are made of, at full size."""

    def __init__(self, system: System, most: int = MOST):
        self.system, self.most = system, most
        self._small: Small | None = None
        self._laid_out = False
        self._known: dict[Obligation, Small | None] = {}
        self.left, self.times = LEFT, TIMES
        self.agreed: set[Obligation] = set()  # at one point at least
        self.undecided: set[Obligation] = set()  # at one of them

    def of(self, o: Obligation) -> Small | None:
        """Both programs, but only the steps that an obligation needs; None if these are too large."""
        if o not in self._known:
            self._known[o] = self._of(o)
        return self._known[o]

    def pays(self, part: Small) -> bool:
        """Whether so much is left to be evaluated; then it counts."""
        if elements(part) > self.left or not self.times:
            return False
        self.left, self.times = self.left - elements(part), self.times - 1
        return True

    def _of(self, o: Obligation) -> Small | None:
        if _made_of(self.system.logical, o) > self.most:
            return None
        if not self._laid_out:
            self._laid_out = True
            if len(self.system.plan.lineage) * self.system.plan.size <= HELD:
                try:
                    self._small = shrink_system(self.system, base=FULL)
                except (NotABoundary, TooMuch):
                    return None
        if self._small is None or self._small.reduced:
            return None
        part = alone(self._small, [o])
        return part if elements(part) <= self.most and self._fits(part) else None

    def _fits(self, part: Small) -> bool:
        made = [n * rows for n, _, rows in costs(part)]
        return max(made, default=0) <= self.most and sum(made) <= WITHIN * self.most and products(part) <= PRODUCTS


def alone(small: Small, wanted: Sequence[Obligation]) -> Small:
    """An evaluation of some obligations: steps and tensors that they do not need are left out, inputs too."""
    part = needed_for(small, wanted)
    here = {n for s in part.logical_steps for n in (*s.inputs, *s.outputs) if n is not None} | {o.output.tensor for o in wanted}
    local: list[set[str]] = [set() for _ in part.classes]
    for task in tasks_of(part):
        for c, n in (*task.reads, *task.makes):
            local[c].add(n)
    for c, k in enumerate(part.classes):
        local[c] |= {h.layout.local for o in wanted for h in o.holdings if h.layout.local in k.program.tensors}
    sources = [set(k.program.sources) & names for k, names in zip(part.classes, local, strict=True)]
    given = {lay.logical for lay, r in part.parts if lay.local in sources[part.places[r][0]]}
    held = {h.layout for o in wanted for h in o.holdings}
    logical = only(part.logical, here | given)
    classes = [replace(k, program=only(k.program, names)) for k, names in zip(part.classes, local, strict=True)]
    return replace(
        part,
        logical=logical,
        classes=classes,
        shapes={n: s for n, s in part.shapes.items() if n in here | given},
        local_shapes=[{n: s for n, s in shapes.items() if n in names} for shapes, names in zip(part.local_shapes, local, strict=True)],
        parts={(lay, r): p for (lay, r), p in part.parts.items() if lay in held or lay.local in sources[part.places[r][0]]},
        points={},
    )


def only(program: Program, names: set[str]) -> Program:
    """A program without the other sources and outputs."""
    return replace(
        program,
        inputs=tuple(n for n in program.inputs if n in names),
        parameters=tuple(n for n in program.parameters if n in names),
        state=tuple(n for n in program.state if n in names),
        outputs=tuple(o for o in program.outputs if o.tensor in names),
    )


def _made_of(program: Program, o: Obligation) -> int:
    """Elements of the logical tensors that an output is made of."""
    makers = {n: op for op in program.ops for n in op.outputs}
    found, ahead = {o.output.tensor}, [o.output.tensor]
    while ahead:
        op = makers.get(ahead.pop())
        new = {i for i in (op.inputs if op is not None else ()) if i is not None} - found
        found |= new
        ahead += new
    return sum(math.prod(program.tensors[n].shape) for n in found)
