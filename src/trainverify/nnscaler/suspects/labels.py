"""Operations whose results cannot be what the plan says, if their arguments are: a weight is said to be another piece."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from trainverify.nnscaler.annotations import Share, dims, pieces, problem, unfounded
from trainverify.nnscaler.dump import Cell, Dump, Slice
from trainverify.nnscaler.suspects.kinds import Suspect, grouped


def labels(dump: Dump) -> Iterator[Suspect]:
    """Operations that the plan's index and value maps contradict."""
    found = []
    for device, cell, why in unfounded(dump):
        better = _relabelled(cell)
        found.append((tuple(t.full.tid for t in cell.results()), device, cell, why, None if better is None else (cell, better)))
    yield from grouped(dump, found)


def _relabelled(cell: Cell) -> Cell | None:
    """The operation with the pieces of its weights that its other tensors ask for."""
    left, _, right = cell.anno.partition("->")
    given = list(zip(left.split(","), cell.inputs, strict=False))
    others = [(text, t) for text, t in given if isinstance(t, Slice) and not t.full.weight]
    shares: dict[str, Share] = {}
    for text, t in (*others, *zip(right.split(","), cell.results(), strict=False)):
        shares.update(zip((n.rstrip("+") for n in dims(text)), pieces(t), strict=False))
    inputs = list(cell.inputs)
    for i, (text, t) in enumerate(given):
        if isinstance(t, Slice) and t.full.weight:
            wanted = [shares.get(n.rstrip("+"), own) for n, own in zip(dims(text), pieces(t), strict=False)]
            region = tuple((round(a * size), round(b * size)) for (a, b), size in zip(wanted, t.full.shape, strict=False))
            inputs[i] = replace(t, indmap=region)
    better = replace(cell, inputs=tuple(inputs))
    return better if better != cell and problem(better) is None else None
