"""Lineage: how logical tensors live on the mesh.

A `Layout` says how one local tensor of the rank programs covers (part of) one logical tensor. It has three
spellings with one meaning, the list of `Part`s on a rank:
- placements, as DTensor: `{"tp": Shard(0), "dp": Replicate()}`; uneven sizes are cut as `torch.chunk` does;
- a pattern, as einops: `"(tp o) k"`, mesh axes by name, every axis not mentioned replicates;
- explicit parts: index maps with strided blocks or flat ranges, partial values, declared padding.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np

from trainverify.graph.mesh import Mesh

Reduction = Literal["sum", "avg"]


class LineageError(Exception):
    """A layout that does not fit the tensors it speaks of."""


@dataclass(frozen=True, slots=True)
class Shard:
    dim: int

    def __str__(self) -> str:
        return f"Shard({self.dim})"


@dataclass(frozen=True, slots=True)
class Replicate:
    def __str__(self) -> str:
        return "Replicate()"


@dataclass(frozen=True, slots=True)
class Partial:
    op: Reduction = "sum"

    def __str__(self) -> str:
        return f'Partial("{self.op}")'


Placement = Shard | Replicate | Partial


@dataclass(frozen=True, slots=True)
class Run:
    """Positions start + i·stride + j for i < count, j < block: a range, or strided blocks."""

    start: int
    block: int
    count: int = 1
    stride: int = 0

    @property
    def size(self) -> int:
        return self.block * self.count

    @property
    def stop(self) -> int:
        """One past the last position."""
        return self.start + self.stride * (self.count - 1) + self.block

    def positions(self) -> np.ndarray[Any, Any]:
        return (self.start + self.stride * np.arange(self.count)[:, None] + np.arange(self.block)[None, :]).reshape(-1)

    def __str__(self) -> str:
        plain = f"{self.start}:{self.start + self.block}"
        return plain if self.count == 1 else f"{plain} (×{self.count}, every {self.stride})"


@dataclass(frozen=True, slots=True)
class Part:
    """A region of a local tensor and the region of the logical tensor that it holds.

    `local[d]` is where the region starts in the local tensor; `logical[d]` are the positions it holds, in order.
    With `flat`, both tensors count as flattened and have one entry. `padding` regions hold nothing of the logical tensor.
    `partial = (op, i, n)`: the i-th of n values whose sum (average) is the logical one.
    """

    local: tuple[int, ...]
    logical: tuple[Run, ...]
    partial: tuple[Reduction, int, int] | None = None
    flat: bool = False
    padding: bool = False

    def __str__(self) -> str:
        what = "padding" if self.padding else f"[{', '.join(map(str, self.logical))}]"
        share = f" part {self.partial[1]} of {self.partial[2]} ({self.partial[0]})" if self.partial else ""
        return f"{'flat ' if self.flat else ''}{what} at {list(self.local)}{share}"


@dataclass(frozen=True)
class Placements:
    """DTensor placements; an axis not mentioned replicates. Axes shard in the order given, the first outermost."""

    axes: tuple[tuple[str, Placement], ...]

    def __str__(self) -> str:
        return "{" + ", ".join(f"{a}: {p}" for a, p in self.axes) + "}"


@dataclass(frozen=True)
class Pattern:
    """einops-style text. `fixed` gives a name the value (index, size): micro-batch 0 of 2 is `("mb", 0, 2)`."""

    text: str
    fixed: tuple[tuple[str, int, int], ...] = ()
    partial: tuple[tuple[str, Reduction], ...] = ()

    def __str__(self) -> str:
        fixed = "".join(f", {n}={i} of {s}" for n, i, s in self.fixed)
        partial = "".join(f', {a}: Partial("{op}")' for a, op in self.partial)
        return f'"{self.text}"{fixed}{partial}'


@dataclass(frozen=True)
class Parts:
    """Explicit parts, rank by rank."""

    by_rank: tuple[tuple[int, tuple[Part, ...]], ...]

    def __str__(self) -> str:
        return "; ".join(f"rank {r}: {', '.join(map(str, ps))}" for r, ps in self.by_rank)


Form = Placements | Pattern | Parts


@dataclass(frozen=True)
class Layout:
    """Local tensor `local`, on the ranks with the mesh coordinates `where`, holds logical tensor `logical` this way."""

    logical: str
    local: str
    form: Form
    where: tuple[tuple[str, int], ...] = ()

    def __str__(self) -> str:
        where = f" on {', '.join(f'{a}={i}' for a, i in self.where)}" if self.where else ""
        return f"{self.local} ~ {self.logical} {self.form}{where}"

    def holders(self, mesh: Mesh) -> tuple[int, ...]:
        if isinstance(self.form, Parts):
            return tuple(r for r, _ in self.form.by_rank)
        return mesh.ranks(**dict(self.where))

    def parts(self, mesh: Mesh, rank: int, shape: tuple[int, ...]) -> tuple[Part, ...]:
        """What `rank` holds of a logical tensor of this shape."""
        match self.form:
            case Parts(by_rank):
                return next((ps for r, ps in by_rank if r == rank), ())
            case Placements():
                return (_placed(self.form, mesh, rank, shape),)
            case Pattern():
                return (_patterned(self.form, mesh, rank, shape),)


def layout(
    logical: str,
    form: str | Mapping[str, Placement] | Form,
    local: str | None = None,
    where: Mapping[str, int] | None = None,
    fixed: Mapping[str, tuple[int, int]] | None = None,
    partial: Mapping[str, Reduction] | None = None,
) -> Layout:
    """A layout from any spelling."""
    if isinstance(form, str):
        named = tuple((n, i, s) for n, (i, s) in (fixed or {}).items())
        form = Pattern(form, named, tuple((partial or {}).items()))
    elif isinstance(form, Mapping):
        form = Placements(tuple(form.items()))
    return Layout(logical, logical if local is None else local, form, tuple((where or {}).items()))


def _share(mesh: Mesh, rank: int, partial: Iterable[tuple[str, Reduction]]) -> tuple[Reduction, int, int] | None:
    """Position among the ranks whose values add up."""
    axes = dict(partial)
    if not axes:
        return None
    ops = set(axes.values())
    if len(ops) > 1:
        raise LineageError("partial sum and partial average of one tensor cannot be mixed")
    members = mesh.group(rank, tuple(axes))
    return ops.pop(), members.index(rank), len(members)


def _placed(form: Placements, mesh: Mesh, rank: int, shape: tuple[int, ...]) -> Part:
    bounds = [(0, s) for s in shape]
    here = mesh.coordinates(rank)
    partial: list[tuple[str, Reduction]] = []
    seen = set()
    for axis, placement in form.axes:
        if axis not in here or axis in seen:
            raise LineageError(f"{mesh} has no axis {axis!r}, or it is placed twice")
        seen.add(axis)
        if isinstance(placement, Partial):
            partial.append((axis, placement.op))
        elif isinstance(placement, Shard):
            if not 0 <= placement.dim < len(shape):
                raise LineageError(f"{placement} of a tensor with {len(shape)} dimensions")
            low, high = bounds[placement.dim]
            chunk = -(-(high - low) // mesh.length(axis))  # torch.chunk: equal chunks, the last ones short or empty
            start = min(low + chunk * here[axis], high)
            bounds[placement.dim] = (start, min(start + chunk, high))
    return Part((0,) * len(shape), tuple(Run(a, b - a) for a, b in bounds), _share(mesh, rank, partial))


@lru_cache(maxsize=4096)
def pattern_dims(text: str) -> tuple[tuple[str, ...], ...]:
    """`"(tp o) k"` as (("tp", "o"), ("k",))."""
    if not re.fullmatch(r"\s*((\w+|\(\s*\w+(\s+\w+)*\s*\)|\(\s*\))(\s+|$))*", text):
        raise LineageError(f"pattern {text!r}: names and (groups of names) separated by spaces")
    return tuple(tuple(g.strip("()").split()) for g in re.findall(r"\([^)]*\)|\w+", text))


@lru_cache(maxsize=65536)
def _patterned(form: Pattern, mesh: Mesh, rank: int, shape: tuple[int, ...]) -> Part:
    dims = pattern_dims(form.text)
    if len(dims) != len(shape):
        raise LineageError(f"pattern {form.text!r} has {len(dims)} dimensions, the tensor has {len(shape)}")
    here = mesh.coordinates(rank)
    known = {n: (i, s) for n, i, s in form.fixed}
    known |= {a: (here[a], mesh.length(a)) for names in dims for a in names if a in here}
    names_used = [n for names in dims for n in names if not n.isdigit()]
    if len(set(names_used)) != len(names_used):
        raise LineageError(f"pattern {form.text!r} repeats a name")
    return Part(
        (0,) * len(shape), tuple(_run(n, s, known, form) for n, s in zip(dims, shape, strict=True)), _share(mesh, rank, form.partial)
    )


def local_digits(names: tuple[str, ...], known: Collection[str]) -> list[tuple[str, int | None]]:
    """Digits of one dimension of a pattern, slow first: (name, size if it is a number); adjacent local names count as one."""
    digits: list[tuple[str, int | None]] = []
    for n in names:
        if n in known or n.isdigit():
            if n != "1":
                digits.append((n, int(n) if n.isdigit() else None))
        elif not digits or digits[-1][0] in known or digits[-1][0].isdigit():
            digits.append((n, None))
    return digits


def _run(names: tuple[str, ...], size: int, known: Mapping[str, tuple[int, int]], form: Pattern) -> Run:
    """One dimension of a pattern: digits given by the mesh or fixed, numbers and names local (`(3 tp o)`)."""
    digits = local_digits(names, known)
    given = math.prod(known[n][1] if n in known else k or 1 for n, k in digits)
    open_ended = [n for n, k in digits if n not in known and k is None]
    if size % given or len(open_ended) > 1:
        why = f"size {size} does not divide by {given}" if size % given else f"{' and '.join(open_ended)}: one size must be a number"
        raise LineageError(f"pattern {form.text!r}: {why}")
    if not size:
        return Run(0, 0)
    rest = size // given
    if not open_ended and rest != 1:
        raise LineageError(f"pattern {form.text!r}: size {size} is more than its named axes")
    start, weight = 0, 1
    runs: list[tuple[int, int]] = []  # (weight, size) of local digits, fast first, adjacent ones joined
    for n, k in reversed(digits):
        width = known[n][1] if n in known else rest if k is None else k
        if n in known:
            start += known[n][0] * weight
        elif runs and runs[-1][0] * runs[-1][1] == weight:
            runs[-1] = (runs[-1][0], runs[-1][1] * width)
        elif width > 1:
            runs.append((weight, width))
        weight *= width
    if len(runs) > 2 or (len(runs) == 2 and runs[0][0] != 1):
        raise LineageError(f"pattern {form.text!r}: more than strided blocks; use explicit parts")
    if not runs:
        return Run(start, 1)
    if len(runs) == 1:
        step, count = runs[0]
        return Run(start, count) if step == 1 else Run(start, 1, count, step)
    return Run(start, runs[0][1], runs[1][1], runs[1][0])


def positions(part: Part, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Flat positions in the logical tensor that a part holds, in the shape of its region."""
    if part.flat:
        return part.logical[0].positions()
    index = np.zeros((1,) * len(shape), dtype=np.int64)
    for d, run in enumerate(part.logical):
        step = math.prod(shape[d + 1 :])
        index = index + run.positions().reshape([-1 if e == d else 1 for e in range(len(shape))]) * step
    return index


def region(part: Part, local: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The region of a local array that a part speaks of, as a view."""
    if part.flat:
        return local.reshape(-1)[part.local[0] : part.local[0] + part.logical[0].size]
    where: tuple[Any, ...] = (*(slice(s, s + r.size) for s, r in zip(part.local, part.logical, strict=True)), ...)
    view: np.ndarray[Any, Any] = local[where]
    return view


Lineage = tuple[Layout, ...]


def of(lineage: Lineage, logical: str) -> Iterator[Layout]:
    return (x for x in lineage if x.logical == logical)


def merge(
    layouts: Iterable[Layout], mesh: Mesh, shape: tuple[int, ...], values: Mapping[tuple[int, str], np.ndarray[Any, Any]], zero: Any = 0.0
) -> np.ndarray[Any, Any]:
    """The logical tensor from its pieces (rank, local tensor) → array.

    Replicas are not compared here: the first holder of a position gives its value. Partial values are added up
    (averaged) over their n shares, one of each. Raises LineageError where a position is not covered.
    """
    size = math.prod(shape)
    first = next(iter(values.values())) if values else np.zeros(0)
    result = np.full(size, zero, dtype=first.dtype)
    shares: dict[int, set[int]] = {}  # position → shares already added, for partial ones
    covered = np.zeros(size, dtype=bool)
    for lay in layouts:
        for rank in lay.holders(mesh):
            for part in lay.parts(mesh, rank, shape):
                if part.padding:
                    continue
                where = positions(part, shape).reshape(-1)
                data = region(part, values[rank, lay.local]).reshape(-1)
                if part.partial is None:
                    fresh = ~covered[where]
                    result[where[fresh]] = data[fresh]
                    covered[where] = True
                    continue
                op, i, n = part.partial
                for p, v in zip(where.tolist(), data, strict=True):
                    done = shares.setdefault(p, set())
                    if i not in done:
                        done.add(i)
                        result[p] = result[p] + (v / n if op == "avg" else v)
                        covered[p] |= len(done) == n
    if not covered.all():
        raise LineageError(f"{int((~covered).sum())} of {size} elements are held by no rank")
    return result.reshape(shape)
