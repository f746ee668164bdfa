"""Where a plan goes wrong: the first logical tensor that no rank ever computes, and what stands in its place.

Random inputs make every value a fingerprint: an element of a plan tensor that equals (up to a small rational factor)
an element of a logical tensor is taken to be that element. Legitimate partial sums match nothing and do not count
against a plan; a logical tensor among the ancestors of a wrong output with elements found nowhere does.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from trainverify.domains.arrays import Array
from trainverify.evaluate.compare import Suspect, held, places
from trainverify.evaluate.run import PlanValues
from trainverify.evaluate.small import Small, Step
from trainverify.graph.mesh import Mesh
from trainverify.graph.program import Op

TOLERANCE = 1e-7


@dataclass(frozen=True)
class Place:
    """The first wrong tensor: the logical tensor that is missing, and the plan's op that stands where it should be."""

    logical: str
    logical_op: Op | None
    rank: int
    tensor: str
    op: Op | None
    cause: str  # one line: what the values show


class _Values:
    """Sorted values of one tensor, for look-up with a relative tolerance."""

    def __init__(self, array: Array):
        flat = np.asarray(array, dtype=np.float64).reshape(-1)
        self.count = flat.size
        flat = flat[np.isfinite(flat) & (np.abs(flat) > 1e-200)]
        self.sorted = np.sort(flat)

    def holds(self, values: Array) -> Array:
        """Which of these values occur here (zeros and non-finite ones do not count: True)."""
        v = np.asarray(values, dtype=np.float64).reshape(-1)
        plain = ~(np.isfinite(v) & (np.abs(v) > 1e-200))
        if not self.sorted.size:
            return plain
        i = np.searchsorted(self.sorted, v)
        near = np.zeros(v.shape, dtype=bool)
        for j in (np.clip(i - 1, 0, self.sorted.size - 1), np.clip(i, 0, self.sorted.size - 1)):
            near |= np.abs(self.sorted[j] - v) <= TOLERANCE * np.abs(v)
        return near | plain


def locate(small: Small, mesh: Mesh, wrong: Sequence[Suspect], logical: Mapping[str, Array], plan: PlanValues) -> Place:
    """The first wrong tensor behind the outputs that differ."""
    return _Locator(small, mesh, wrong, logical, plan).place()


def candidates(mesh: Mesh, microbatches: int = 1) -> list[Fraction]:
    """Factors by which a correct plan may scale what it keeps between ops."""
    numbers = {1, 2, microbatches}
    for _, size in mesh.axes:
        numbers |= {n * size for n in numbers}
    small = sorted(n for n in numbers if n <= 64)
    return sorted({Fraction(a, b) for a in small for b in small}, key=lambda f: (max(f.numerator, f.denominator), f))


class _Locator:
    def __init__(self, small: Small, mesh: Mesh, wrong: Sequence[Suspect], logical: Mapping[str, Array], plan: PlanValues):
        self.small = small
        self.wrong = wrong
        self.logical = logical
        self.plan = plan
        self.factors = candidates(mesh)
        self.made_by: dict[str, Op] = {o: s.op for s in small.logical_steps for o in s.outputs}
        self.known = {n: _Values(v) for n, v in logical.items() if np.asarray(v).dtype.kind == "f"}
        everything = [np.asarray(a, dtype=np.float64).reshape(-1) for rows in plan.values for a in rows.values() if a.dtype.kind == "f"]
        self.pool = _Values(np.concatenate(everything) if everything else np.zeros(0))
        self._match: dict[tuple[int, int, str], frozenset[str]] = {}

    def place(self) -> Place:
        failed = self.wrong[0]
        for name in self._ancestors():
            if not self._computed(name):
                stand_in = self._stand_in(name)
                if stand_in is not None:
                    return stand_in
        return self._output(failed)

    def _ancestors(self) -> list[str]:
        """Logical tensors that the wrong outputs depend on, in execution order."""
        need = {s.obligation.output.tensor for s in self.wrong}
        for step in reversed(self.small.logical_steps):
            if any(o in need for o in step.outputs):
                need.update(i for i in step.inputs if i is not None)
        return [o for s in self.small.logical_steps for o in s.outputs if o in need and o in self.known]

    def _computed(self, name: str) -> bool:
        values = np.asarray(self.logical[name], dtype=np.float64)
        return any(bool(self.pool.holds(values * float(f)).all()) for f in self.factors)

    def matches(self, c: int, row: int, tensor: str) -> frozenset[str]:
        """Logical tensors all of whose pieces this local tensor could be, up to a factor."""
        key = (c, row, tensor)
        if key not in self._match:
            value = self.plan.get(c, row, tensor)
            if value is None or np.asarray(value).dtype.kind != "f":
                self._match[key] = frozenset()
            else:
                array = np.asarray(value, dtype=np.float64).reshape(-1)
                probe = array[np.isfinite(array) & (np.abs(array) > 1e-200)][:1]
                found = set()
                if probe.size:
                    for f in self.factors:
                        for n, known in self.known.items():
                            if n not in found and known.holds(probe * float(f))[0] and known.holds(array * float(f)).all():
                                found.add(n)
                self._match[key] = frozenset(found)
        return self._match[key]

    # -- what stands in the place of a missing tensor ----------------------------------------------------------------

    def _stand_in(self, name: str) -> Place | None:
        for c, row, tensor, made in itertools.chain(self._by_consumer(name), self._by_producer(name)):
            return self._found(name, c, row, tensor, made)
        return None

    def _found(self, name: str, c: int, row: int, tensor: str, op: Op | None) -> Place:
        rank = self.small.classes[c].ranks[row]
        return Place(name, self.made_by.get(name), rank, tensor, op, self._cause(name, c, row, tensor))

    def _steps(self) -> Iterator[tuple[int, Step]]:
        for c, k in enumerate(self.small.classes):
            for step in k.order:
                yield c, step

    def _maker(self, c: int, tensor: str) -> Op | None:
        return next((op for op in self.small.classes[c].program.ops if tensor in op.outputs), None)

    def _by_consumer(self, name: str) -> Iterator[tuple[int, int, str, Op | None]]:
        """Plan ops like a logical consumer of the missing tensor, all other inputs in place, this one unknown."""
        users = [(s.op, [k for k, i in enumerate(s.inputs) if i == name]) for s in self.small.logical_steps if name in s.inputs]
        for c, step in self._steps():
            for op, slots in users:
                if op.name != step.op.name or len(op.inputs) != len(step.inputs) or len(step.inputs) == len(slots):
                    continue
                for row in step.rows:
                    others = [(i, j) for k, (i, j) in enumerate(zip(op.inputs, step.inputs, strict=True)) if k not in slots]
                    if not all(i is None or j is None or self._is(c, row, j, i) for i, j in others):
                        continue
                    for k in slots:
                        t = step.inputs[k]
                        if t is not None and not self.matches(c, row, t) and self.plan.get(c, row, t) is not None:
                            yield c, row, t, self._maker(c, t)

    def _is(self, c: int, row: int, tensor: str, name: str) -> bool:
        if name not in self.known:
            return True  # integers and masks are not fingerprints
        return name in self.matches(c, row, tensor)

    def _by_producer(self, name: str) -> Iterator[tuple[int, int, str, Op | None]]:
        """Plan ops like the one that makes the missing tensor, from the same logical tensors."""
        op = self.made_by.get(name)
        if op is None:
            return
        slot = op.outputs.index(name)
        for c, step in self._steps():
            if step.op.name != op.name or len(step.inputs) != len(op.inputs) or len(step.outputs) <= slot:
                continue
            for row in step.rows:
                if all(i is None or j is None or self._is(c, row, j, i) for i, j in zip(op.inputs, step.inputs, strict=True)):
                    t = step.outputs[slot]
                    if name not in self.matches(c, row, t):
                        yield c, row, t, step.op

    # -- what the values show ----------------------------------------------------------------------------------------

    def _cause(self, name: str, c: int, row: int, tensor: str) -> str:
        value = self.plan.get(c, row, tensor)
        if value is None:
            return "never computed"
        known = self.known[name]
        summed = self._sum_that_fits(c, row, tensor, known)
        if summed is not None:
            return summed
        other = self.matches(c, row, tensor)
        if other:
            return f"holds values of {', '.join(sorted(other))} instead"
        return "matches no logical tensor"

    def _sum_that_fits(self, c: int, row: int, tensor: str, known: _Values) -> str | None:
        """A missing sum: adding up the copies of some group of ranks gives the logical value."""
        rank = self.small.classes[c].ranks[row]
        alone = np.asarray(self.plan.get(c, row, tensor), dtype=np.float64)
        for group in {tuple(sorted((d, r) for d, r, _ in g)) for m in self.small.meetings for g in m.senders}:
            if (c, row) not in group or len(group) < 2:
                continue
            found = [self.plan.get(d, r, tensor) for d, r in group]
            values = [np.asarray(v, dtype=np.float64) for v in found if v is not None]
            if len(values) < len(group) or any(v.shape != alone.shape for v in values):
                continue
            total = np.sum(values, axis=0)
            if known.holds(total).all() and not np.allclose(total, alone * len(values)):
                ranks = sorted(self.small.classes[d].ranks[r] for d, r in group)
                return f"a partial sum: added up over ranks {ranks} it is the logical value, but rank {rank} has its own share only"
        return None

    def _output(self, failed: Suspect) -> Place:
        """Everything is computed somewhere: the output itself is in the wrong place, scaled, or stale."""
        name = failed.obligation.output.tensor
        c, row = places(self.small)[failed.rank]
        tensor = failed.layout.local
        value = self.plan.get(c, row, tensor)
        cause = "never computed"
        if value is not None:
            ratios = []
            whole = np.asarray(self.logical[name], dtype=np.float64)
            for got, want, _ in held(self.small, failed.layout, failed.rank, whole, np.asarray(value)):
                ok = np.abs(want) > 1e-200
                ratios.append((got[ok] / want[ok]).reshape(-1))
            ratio = np.concatenate(ratios) if ratios else np.zeros(0)
            cause = "holds other elements of the logical tensor than its lineage says"
            if ratio.size and np.allclose(ratio, ratio[0], rtol=1e-7) and not math.isclose(ratio[0], 1.0, rel_tol=1e-7):
                exact = Fraction(float(ratio[0])).limit_denominator(4096)
                shown = str(exact) if math.isclose(float(exact), ratio[0], rel_tol=1e-7) else f"{ratio[0]:.12g}"
                cause = f"scaled: ×{shown} everywhere"
            elif name in self.known and not self.known[name].holds(value).all():
                cause = "matches no logical tensor"
        return Place(name, self.made_by.get(name), failed.rank, tensor, self._maker(c, tensor), cause)
