"""What parameters and state start with: on ranks it is to be made as in the reference, from constants or from random numbers.

Random numbers have no values here. Which ones a tensor is made of, and how, is known all the same: a copy of another tensor, one half of
what is drawn, and what is drawn anew are told apart. Of a tensor that is loaded, communicated, or never written nothing is known.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from trainverify.check.findings import Finding
from trainverify.domains.arrays import Array
from trainverify.graph.lineage import Layout, positions, region
from trainverify.graph.mesh import Mesh
from trainverify.torch.constants import MOVING, numbers_of
from trainverify.torch.values import Unknown
from trainverify.translate.emit import Emitter

ASSUMED: Final = "parameters and state that are drawn, loaded or received start with the same values on ranks as in the reference"
NEAR: Final = {"f64": 1e-12}  # relative error of constants that are one number
SHORT: Final = 2.0**-23  # of others: what rounding to float32 may change
FORMULA: Final = 2000  # tensors on the way from random numbers, at most
SAME: Final = frozenset(("identity", "contiguous", "detach", "multiref", "to", "float", "reshape"))  # ops that keep all elements in order


@dataclass(frozen=True)
class Start:
    """How a tensor is made before the first step."""

    shape: tuple[int, ...]
    dtype: str
    formula: str  # equal of two tensors only if they are the same function of what is drawn
    numbers: tuple[float, ...] | None = None  # of a constant: one, if it is so everywhere; None of many
    draws: tuple[str, ...] = ()  # the random numbers that it is made of; a constant has none
    seeds: tuple[int, ...] = ()
    cut: bool = False  # some of them are cut out, or put together

    def __str__(self) -> str:
        if self.draws:
            return "drawn"
        if self.numbers is None:
            return "a table of constants"
        return f"{self.numbers[0]:g} everywhere" if len(self.numbers) == 1 else str(list(self.numbers[:4]))


def starts_of(
    e: Emitter, values: Mapping[str, str], unknown: Mapping[str, Unknown], received: Collection[str], adapted: bool
) -> dict[str, Start]:
    """By name, how tensors are made that have these values. Those that another rank gives are its; what an adapter ran is no start."""
    found: dict[str, Start] = {}
    for name, value in values.items():
        kind = e.tensors[value]
        if value in received:
            continue
        if e.is_constant(value):
            found[name] = Start(kind.shape, kind.dtype, e.fingerprint(value), numbers_of(e, value))
        elif not adapted and (made := _formula(e, value, unknown)) is not None:
            formula, draws, cut = made
            seeds = tuple(seed for d in draws for _, seed in [unknown[d].drawn or ("", 0)])
            found[name] = Start(kind.shape, kind.dtype, formula, None, draws, seeds, cut)
    return found


def _formula(e: Emitter, value: str, unknown: Mapping[str, Unknown]) -> tuple[str, tuple[str, ...], bool] | None:
    """A tensor as a function of random numbers, these in the order in which it has them, and whether it cuts or joins any."""
    order: dict[str, int] = {}
    text: list[object] = []
    draws: list[str] = []
    cut, waiting = False, [_same(e, value)]
    while waiting and len(order) < FORMULA:
        at = waiting[-1]
        op = e.made.get(at)
        if at in order:
            waiting.pop()
        elif op is None:
            drawn = unknown[at].drawn if at in unknown else None
            if drawn is None:
                return None
            text.append((drawn[0], e.shape(at)))
            draws.append(at)
            order[at] = len(order)
        else:
            inputs = [_same(e, i) for i in op.inputs if i is not None]
            if more := [i for i in inputs if i not in order]:
                waiting += reversed(more)
                continue
            if e.talks(op):
                return None
            cut = cut or op.name in MOVING
            text.append((op.name, op.attrs, op.outputs.index(at), [order[i] for i in inputs], e.shape(at)))
            order[at] = len(order)
    return None if waiting else (hashlib.sha256(repr(text).encode()).hexdigest()[:16], tuple(draws), cut)


def _same(e: Emitter, name: str) -> str:
    """A tensor before what changes neither its elements nor its shape."""
    shape, found = e.shape(name), name
    while (op := e.made.get(name)) is not None and op.name in SAME and e.kind(str(op.inputs[0])) == e.kind(name):
        name = str(op.inputs[0])
        found = name if e.shape(name) == shape else found
    return found


def unlike_starts(reference: Mapping[str, Start], ranks: Mapping[int, Mapping[str, Start]]) -> Iterator[Finding]:
    """Starts that are made otherwise on a rank than in the reference, or with another seed than on another rank."""
    for rank, starts in ranks.items():
        pairs = Pairs()
        for name, mine in starts.items():
            alone = reference.get(name)
            if alone is not None and (text := _unlike(name, alone, mine, pairs)) is not None:
                yield Finding("TV508", text, rank, name, None, None, "unsupported")
    first: dict[str, tuple[int, Start]] = {}
    for rank, starts in ranks.items():
        for name, mine in starts.items():
            if name not in reference or reference[name].shape != mine.shape:
                continue  # ranks hold parts of it, each its own
            other, start = first.setdefault(name, (rank, mine))
            if start.formula == mine.formula and start.seeds != mine.seeds:
                seeds = f"seed {_shown(mine.seeds)} here and {_shown(start.seeds)} on rank {other}"
                text = f"{name} is drawn with {seeds} when it is built, and nothing makes them equal"
                yield Finding("TV508", text, rank, name, None, None, "unsupported")


class Pairs:
    """Which random numbers of a rank are those of the reference, by the tensors that are made of them."""

    def __init__(self) -> None:
        self.there: dict[str, tuple[str, str]] = {}
        self.back: dict[str, tuple[str, str]] = {}

    def joined(self, name: str, alone: str, mine: str) -> str | None:
        """These are the same; how that contradicts what was said before, if it does."""
        one, other = self.there.setdefault(alone, (mine, name)), self.back.setdefault(mine, (alone, name))
        if one[0] != mine:
            return f"{one[1]} and {name} are made of the same random numbers on one device when they are built, and not on this rank"
        if other[0] != alone:
            return f"{other[1]} and {name} are made of the same random numbers on this rank when they are built, and not on one device"
        return None


def _unlike(name: str, alone: Start, mine: Start, pairs: Pairs) -> str | None:
    if bool(alone.draws) != bool(mine.draws):
        return f"{name} is {mine} when it is built, and {alone} on one device"
    if alone.formula != mine.formula:
        if alone.draws and alone.shape == mine.shape and not (alone.cut or mine.cut):
            return f"{name} is made of random numbers in another way than on one device when it is built"
        if not len(alone.draws) == len(mine.draws) == 1:
            return None
    texts = [pairs.joined(name, a, b) for a, b in zip(alone.draws, mine.draws, strict=True)]
    return next((t for t in texts if t is not None), None)


def unlike_parts(
    reference: Mapping[str, Start], ranks: Mapping[int, Mapping[str, Start]], lineage: Sequence[Layout], mesh: Mesh
) -> Iterator[Finding]:
    """Constants that differ from the part of the reference's that a rank holds, or that are not known to be that part."""
    for rank, starts in ranks.items():
        for name, mine in starts.items():
            alone = reference.get(name)
            if alone is None or alone.draws or mine.draws or (alone.formula == mine.formula and alone.shape == mine.shape):
                continue
            layouts = [x for x in lineage if x.local == name == x.logical and rank in x.holders(mesh)]
            if not _is_part(alone, mine, layouts, mesh, rank):
                text = f"{name} is {mine} when it is built, and {alone} on one device"
                yield Finding("TV508", text, rank, name, None, None, "unsupported")


def _is_part(alone: Start, mine: Start, layouts: Sequence[Layout], mesh: Mesh, rank: int) -> bool:
    """Whether the constants of a rank are shown to be those that it is to hold."""
    if alone.numbers is None or mine.numbers is None:
        return False
    if len(alone.numbers) == len(mine.numbers) == 1:
        return _close(np.asarray(mine.numbers), np.asarray(alone.numbers), mine.dtype)
    if not layouts:
        return False
    local = np.broadcast_to(np.reshape(mine.numbers, mine.shape if len(mine.numbers) > 1 else ()), mine.shape)
    for layout in layouts:
        for part in layout.parts(mesh, rank, alone.shape):
            if part.padding:
                continue
            wanted = np.asarray(alone.numbers)
            if len(wanted) > 1:
                wanted = wanted[positions(part, alone.shape)]
            held = region(part, local)
            if not _close(held, np.broadcast_to(wanted, held.shape) if len(alone.numbers) == 1 else wanted.reshape(held.shape), mine.dtype):
                return False
    return True


def _close(one: Array, other: Array, dtype: str) -> bool:
    """Whether constants are the same numbers, but for how they are rounded."""
    scale = NEAR.get(dtype, SHORT) * np.maximum(np.abs(one), np.abs(other))
    with np.errstate(invalid="ignore"):
        return bool(((np.abs(one - other) <= scale) | (one == other) | (np.isnan(one) & np.isnan(other))).all())


def _shown(seeds: Sequence[int]) -> str:
    return ", ".join(map(str, dict.fromkeys(seeds)))


__all__ = ["ASSUMED", "Start", "starts_of", "unlike_parts", "unlike_starts"]
