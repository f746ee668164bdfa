"""Where a plan goes wrong: the first logical tensor that no rank ever computes, and what stands in its place.

Random inputs make every value a fingerprint: an element of a plan tensor that equals (up to a small rational factor)
an element of a logical tensor is taken to be that element. Legitimate partial sums match nothing and do not count
against a plan; a logical tensor among the ancestors of a wrong output with elements found nowhere does.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction

import numpy as np

from trainverify.domains.arrays import Array
from trainverify.evaluate.compare import Suspect, held, places
from trainverify.evaluate.run import PlanValues
from trainverify.evaluate.small import Small, Step
from trainverify.explain.cause import Cause
from trainverify.explain.felt import after, felt
from trainverify.explain.fingerprints import TINY, Index, contained, telling
from trainverify.explain.place import Known, Place
from trainverify.explain.watch import NO_LIMIT, Watch
from trainverify.graph.mesh import Mesh
from trainverify.graph.program import Op

NO_MATCH = "matches no logical tensor"
NO_FACTOR = "differs by no factor that sizes explain: a term is missing, doubled or wrong"
MOST_LOOKS = 20  # tensors that are changed to see which outputs feel it
MOVES = frozenset({"slice", "split", "chunk", "recv", "all_gather", "reduce_scatter", "all_to_all", "scatter", "gather", "broadcast"})


class _Values:
    """Sorted values of one tensor, for look-up with a relative tolerance."""

    def __init__(self, array: Array):
        flat = np.asarray(array, dtype=np.float64).reshape(-1)
        self.count = flat.size
        self.sorted = np.sort(flat[np.isfinite(flat) & (np.abs(flat) > TINY)])

    def holds(self, values: Array) -> Array:
        """Which of these values occur here (zeros and non-finite ones do not count: True)."""
        v = np.asarray(values, dtype=np.float64).reshape(-1)
        plain = ~(np.isfinite(v) & (np.abs(v) > TINY))
        if not self.sorted.size:
            return plain
        return np.asarray(contained(self.sorted, v) | plain)


def locate(
    small: Small,
    mesh: Mesh,
    wrong: Sequence[Suspect],
    logical: Mapping[str, Array],
    plan: PlanValues,
    proof: Known | None = None,
    watch: Watch = NO_LIMIT,
) -> Place:
    """The first wrong tensor behind the outputs that differ."""
    return Locator(small, mesh, wrong, logical, plan, proof or Known(), watch).place()


def candidates(mesh: Mesh, microbatches: int = 1) -> list[Fraction]:
    """Factors by which a correct plan may scale what it keeps between ops."""
    numbers = {1, 2, microbatches}
    for _, size in mesh.axes:
        numbers |= {n * size for n in numbers}
    small = sorted(n for n in numbers if n <= 64)
    return sorted({Fraction(a, b) for a in small for b in small}, key=lambda f: (max(f.numerator, f.denominator), f))


class Locator:
    def __init__(
        self,
        small: Small,
        mesh: Mesh,
        wrong: Sequence[Suspect],
        logical: Mapping[str, Array],
        plan: PlanValues,
        proof: Known,
        watch: Watch,
    ):
        self.proof = proof
        self.watch = watch
        self.small = small
        self.wrong = wrong
        self.logical = logical
        self.plan = plan
        self.mesh = mesh
        self.factors = candidates(mesh)
        self.made_by: dict[str, Op] = {o: s.op for s in small.logical_steps for o in s.outputs}
        self.known = {n: _Values(v) for n, v in logical.items() if np.asarray(v).dtype.kind == "f" and telling(v)}
        self._share: dict[tuple[str, float], list[Array]] = {}  # (logical tensor, factor) → pieces of it
        self._place: dict[tuple[str, str, int, int], Array | None] = {}
        self._dull: set[str] = set()  # outputs that agree and do not feel what is missing
        self._looks = 0
        self._right_on: dict[tuple[int, int], set[str]] = {}  # by class and number of dull outputs
        self._match = self._matches()

    def place(self) -> Place:
        order = {o: i for i, s in enumerate(self.small.logical_steps) for o in s.outputs}
        failed = min(self.wrong, key=lambda s: order.get(s.obligation.output.tensor, -1))
        for name in self._ancestors(failed.obligation.output.tensor):
            if not self._computed(name) and name != failed.obligation.output.tensor and not self._right(name):
                stand_in = self._misaligned(name) or self._stand_in(name)
                if stand_in is not None:
                    return stand_in
        return self._misaligned(failed.obligation.output.tensor) or self._output(failed)

    def _right(self, name: str) -> bool:
        """Whether an output agrees everywhere that feels a logical tensor: where the plan has it not, it gets there in another way."""
        wrong = {s.obligation.output.tensor for s in self.wrong}
        reached = after(self.small, name) & {o.tensor for o in self.small.logical.outputs} - wrong - self._dull
        if not reached or self._looks == MOST_LOOKS:
            return bool(reached)
        self.watch.look()
        self._looks += 1
        changed = felt(self.small, self.logical, name, reached)
        self._dull |= reached - changed
        return bool(changed)

    def _healthy(self, c: int) -> set[str]:
        """Local tensors that right outputs are made of by local ops: they are right. Communication is not looked behind."""
        if (c, len(self._dull)) not in self._right_on:
            at = places(self.small)
            wrong = {s.layout.local for s in self.wrong if s.rank in at and at[s.rank][0] == c}
            wrong |= {layout.local for layout, _ in self.small.parts if layout.logical in self._dull}
            program = self.small.classes[c].program
            mine = {o.tensor for o in program.outputs if o.tensor not in wrong}
            for op in reversed(program.ops):
                if not mine.isdisjoint(op.outputs):
                    mine.update(i for i in op.inputs if i is not None)
            self._right_on[c, len(self._dull)] = mine
        return self._right_on[c, len(self._dull)]

    def _ancestors(self, output: str) -> list[str]:
        """Logical tensors that an output depends on, in execution order; what is computed is not looked behind."""
        need = {output}
        for step in reversed(self.small.logical_steps):
            if any(o in need and (o == output or o not in self.known or not self._computed(o)) for o in step.outputs):
                need.update(i for i in step.inputs if i is not None)
        return [o for s in self.small.logical_steps for o in s.outputs if o in need and o in self.known]

    def _rows(self) -> Iterator[tuple[tuple[int, int, str], Array]]:
        for c, tensors in enumerate(self.plan.values):
            for name, rows in tensors.items():
                if rows.dtype.kind == "f":
                    for row in sorted(self.plan.done[c][name]):
                        yield (c, row, name), rows[row, ...].reshape(-1)

    def _matches(self) -> dict[tuple[int, int, str], frozenset[str]]:
        """For every local tensor the logical tensors that all of its elements could come from, up to one factor."""
        keys, arrays, probes = [], [], []
        for key, array in self._rows():
            plain = array[np.isfinite(array) & (np.abs(array) > TINY)]
            if plain.size:
                keys.append(key)
                arrays.append(array)
                probes.append(plain[0])
        found: list[set[str]] = [set() for _ in keys]
        index = Index({n: self.logical[n] for n in self.known})
        probe = np.asarray(probes)
        for f in map(float, self.factors):
            self.watch.look()
            hits = np.flatnonzero(index.look(probe * f) >= 0).tolist()
            for i, names in zip(hits, index.common([arrays[i] * f for i in hits]), strict=True):
                for name in names - found[i]:
                    found[i].add(name)
                    self._share.setdefault((name, f), []).append(arrays[i] * f)
        return {key: frozenset(names) for key, names in zip(keys, found, strict=True)}

    def _computed(self, name: str) -> bool:
        """Whether tensors that hold nothing but elements of this one hold all of them, under one factor."""
        if name in self.proof.whole:
            return True
        values = np.asarray(self.logical[name], dtype=np.float64)
        shares = [arrays for (n, _), arrays in self._share.items() if n == name]
        return any(bool(_Values(np.concatenate(arrays)).holds(values).all()) for arrays in shares)

    def matches(self, c: int, row: int, tensor: str) -> frozenset[str]:
        found = self._match.get((c, row, tensor), frozenset())
        known = self.proof.held.get((self.small.classes[c].ranks[row], tensor))
        return found if known is None else found | {known}

    # -- what stands in the place of a missing tensor ----------------------------------------------------------------

    def _stand_in(self, name: str) -> Place | None:
        for c, row, tensor, made in itertools.chain(self._by_consumer(name), self._by_producer(name)):
            return self._found(name, c, row, tensor, made)
        return None

    def _found(self, name: str, c: int, row: int, tensor: str, op: Op | None) -> Place:
        rank = self.small.classes[c].ranks[row]
        return Place(name, self.made_by.get(name), rank, tensor, op, *self._cause(name, c, row, tensor, op))

    def _steps(self) -> Iterator[tuple[int, Step]]:
        for c, k in enumerate(self.small.classes):
            for step in k.order:
                self.watch.look()
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
                        if t is None or t in self._healthy(c) or self.matches(c, row, t):
                            continue
                        if self.plan.get(c, row, t) is not None:
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
                    if name not in self.matches(c, row, t) and t not in self._healthy(c):
                        yield c, row, t, step.op

    # -- the right elements in the wrong place -----------------------------------------------------------------------

    def positions(self, c: int, row: int, tensor: str, name: str) -> Array | None:
        """Where in a logical tensor the elements of a local one come from (-1: zeros, which come from anywhere)."""
        key = (name, tensor, c, row)
        if key not in self._place:
            value = np.asarray(self.plan.get(c, row, tensor), dtype=np.float64)
            whole = np.asarray(self.logical[name], dtype=np.float64).reshape(-1)
            order = np.argsort(whole)
            ordered = whole[order]
            found = None
            for f in map(float, self.factors):
                flat = value.reshape(-1) * f
                if not self.known[name].holds(flat).all():
                    continue
                i = np.clip(np.searchsorted(ordered, flat), 0, whole.size - 1)
                j = np.clip(i - 1, 0, whole.size - 1)
                with np.errstate(invalid="ignore"):  # an infinite element is found as it is
                    best = np.where(np.abs(ordered[j] - flat) < np.abs(ordered[i] - flat), j, i)
                found = np.where(np.abs(flat) > TINY, order[best], -1).reshape(value.shape)
                break
            self._place[key] = found
        return self._place[key]

    def _indices(self, c: int, row: int, tensor: str, name: str) -> list[Array] | None:
        """Per dimension of the logical tensor, the positions held, in the local order; None if not a plain block."""
        where = self.positions(c, row, tensor, name)
        shape = self.small.shapes[name]
        if where is None or where.ndim != len(shape):
            return None
        result = []
        for d in range(len(shape)):
            lines = np.moveaxis(where, d, 0).reshape(where.shape[d], -1)
            digits = [np.unique(np.unravel_index(line[line >= 0], shape)[d]) for line in lines]
            if any(u.size > 1 for u in digits):
                return None
            result.append(np.asarray([u[0] if u.size else -1 for u in digits]))  # -1: zeros only, not known
        return result

    def _misaligned(self, name: str) -> Place | None:
        """A plan op like the one that makes a missing tensor, whose inputs hold different positions of one shared axis."""
        op = self.made_by.get(name)
        if op is None:
            return None
        for c, step in self._steps():
            if step.op.name != op.name or len(step.inputs) != len(op.inputs):
                continue
            for row in step.rows:
                place = self._misaligned_at(name, op, c, step, row)
                if place is not None:
                    return place
        return None

    def _misaligned_at(self, name: str, op: Op, c: int, step: Step, row: int) -> Place | None:
        held_on: dict[int, list[tuple[str, str, Array]]] = {}  # axis → (local, logical, positions)
        for i, j in zip(op.inputs, step.inputs, strict=True):
            if i is None or j is None or i not in self.known or i not in self.matches(c, row, j):
                continue
            indices = self._indices(c, row, j, i)
            for axis, index in zip(self.small.logical_axes[i], indices or (), strict=indices is not None):
                held_on.setdefault(axis, []).append((j, i, index))
        sources = self.small.classes[c].program.sources
        for found in held_on.values():
            for local, logical, index in found[1:]:
                first, of, other = found[0]
                if index.shape != other.shape or not ((index != other) & (index >= 0) & (other >= 0)).any():
                    continue
                rank = self.small.classes[c].ranks[row]
                mine, whole, got, want = (first, of, other, index) if first not in sources else (local, logical, index, other)
                moved = self._first_permuted(c, row, mine, whole)
                if moved is not None:
                    d, r, tensor = moved
                    cause = f"holds the elements of {whole} in another order"
                    return Place(
                        whole,
                        self.made_by.get(whole),
                        self.small.classes[d].ranks[r],
                        tensor,
                        self._maker(d, tensor),
                        cause,
                        Cause.WRONG_ORDER,
                    )
                maker = self._maker(c, mine)
                cause = f"{mine} holds positions {_span(got)} of {whole} where {_span(want)} are needed"
                if maker is not None and maker.name in MOVES:
                    return Place(whole, self.made_by.get(whole), rank, mine, maker, cause, Cause.WRONG_BLOCK)
                return Place(name, op, rank, step.outputs[op.outputs.index(name)], step.op, cause, Cause.WRONG_BLOCK)
        return None

    def _first_permuted(self, c: int, row: int, tensor: str, name: str) -> tuple[int, int, str] | None:
        """Follow a misplaced tensor back through copies and communication to the first that is out of order."""
        best = None
        seen = set()
        todo = [(c, row, tensor)]
        while todo:
            d, r, t = todo.pop()
            if (d, r, t) in seen:
                continue
            seen.add((d, r, t))
            indices = self._indices(d, r, t, name)
            if indices is not None and any((np.diff(i[i >= 0]) < 0).any() for i in indices):
                best = (d, r, t)
            for step in self.small.classes[d].order:
                if t in step.outputs and r in step.rows:
                    todo += [(d, r, i) for i in step.inputs if i is not None and name in self.matches(d, r, i)]
            for meeting in self.small.meetings:
                for giving, taking in zip(meeting.senders, meeting.receivers, strict=True):
                    if (d, r, t) in taking:
                        todo += [m for m in giving if name in self.matches(*m)]
        return best

    # -- what the values show ----------------------------------------------------------------------------------------

    def _cause(self, name: str, c: int, row: int, tensor: str, op: Op | None) -> tuple[str, Cause | None]:
        value = self.plan.get(c, row, tensor)
        if value is None:
            return "never computed", None
        known = self.known[name]
        summed = self._sum_that_fits(c, row, tensor, known)
        if summed is not None:
            return summed, Cause.MISSING_REDUCTION
        other = self.matches(c, row, tensor)
        if other:
            moved = op is not None and op.name in MOVES
            return f"holds values of {', '.join(sorted(other))} instead", Cause.WRONG_BLOCK if moved else Cause.WRONG_INPUT
        return NO_MATCH, None

    def _sum_that_fits(self, c: int, row: int, tensor: str, known: _Values) -> str | None:
        """A missing sum: adding up the copies along some mesh axes gives the logical value, up to a factor."""
        rank = self.small.classes[c].ranks[row]
        alone = np.asarray(self.plan.get(c, row, tensor), dtype=np.float64)
        at = places(self.small)
        for axes in (combo for n in (1, 2) for combo in itertools.combinations(self.mesh.names, n)):
            group = [r for r in self.mesh.group(rank, axes) if r in at]
            found = [self.plan.get(*at[r], tensor) for r in group]
            values = [np.asarray(v, dtype=np.float64) for v in found if v is not None]
            if len(group) < 2 or len(values) < len(group) or any(v.shape != alone.shape for v in values):
                continue
            total = np.sum(values, axis=0)
            if np.allclose(total, alone * len(values)):
                continue  # the same everywhere: a factor, not a sum
            if any(known.holds(total * float(f)).all() for f in self.factors):
                over = "+".join(axes)
                return f"a partial sum: the logical value is its sum over {over} (ranks {group}), rank {rank} has its own share only"
        return None

    def _sizes(self) -> set[int]:
        """Sizes of tensors and of mesh axes."""
        shapes = [*self.small.shapes.values(), *(s for local in self.small.local_shapes for s in local.values())]
        return {n for shape in shapes for n in shape} | {n for _, n in self.mesh.axes} | {2}

    def _output(self, failed: Suspect) -> Place:
        """Everything is computed somewhere: the output itself is in the wrong place, scaled, or stale."""
        name = failed.obligation.output.tensor
        c, row = places(self.small)[failed.rank]
        tensor = failed.layout.local
        value = self.plan.get(c, row, tensor)
        cause, category = "never computed", None
        if value is not None:
            ratios = []
            padded = False
            whole = np.asarray(self.logical[name], dtype=np.float64)
            for got, want, where in held(self.small, failed.obligation, failed.layout, failed.rank, whole, self.plan):
                ok = np.abs(want) > TINY
                ratios.append((got[ok] / want[ok]).reshape(-1))
                padded = padded or bool((where < 0).any() and np.any(got))
            ratio = np.concatenate(ratios) if ratios else np.zeros(0)
            cause, category = "holds other elements of the logical tensor than its lineage says", Cause.WRONG_BLOCK
            one_ratio = ratio.size and math.isfinite(ratio[0]) and np.allclose(ratio, ratio[0], rtol=1e-7)
            if one_ratio and not ratio.any():
                cause, category = "zero everywhere, the logical value is not", Cause.LOST_CONTRIBUTION
            elif one_ratio and not math.isclose(ratio[0], 1.0, rel_tol=1e-7):
                exact = Fraction(float(ratio[0])).limit_denominator(4096)
                sized = math.isclose(float(exact), ratio[0], rel_tol=1e-7) and product_of_sizes(exact, self._sizes())
                cause, category = (f"scaled: ×{exact} everywhere", Cause.WRONG_FACTOR) if sized else (NO_FACTOR, None)
            elif padded and np.allclose(ratio, 1.0, rtol=1e-7):
                cause, category = "its padding is not zero after the step, and the next one starts with it", None
            elif name in self.known and not self.known[name].holds(value).all():
                cause, category = NO_MATCH, None
        return Place(name, self.made_by.get(name), failed.rank, tensor, self._maker(c, tensor), cause, category)


def product_of_sizes(factor: Fraction, sizes: set[int]) -> bool:
    """Whether a factor is made of nothing but primes of sizes: any other is no factor that a plan forgets."""
    if not factor:
        return False
    for rest in (abs(factor.numerator), factor.denominator):
        for size in sizes:
            while size > 1 and (common := math.gcd(rest, size)) > 1:
                rest //= common
        if rest != 1:
            return False
    return True


def _span(index: Array) -> str:
    """Positions as ranges where they are."""
    values = [int(i) for i in index if i >= 0]
    if values == list(range(values[0], values[0] + len(values))):
        return f"{values[0]}…{values[-1]}"
    return str(values)
