"""What a plan says of the results of its operations, compared with what it says of their arguments, by the operation's annotation.

`a b k+, n k+ -> a b n` names dimensions: those of one name are cut alike, and cutting one with `+` makes summands.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from fractions import Fraction

from trainverify.nnscaler.dump import Cell, Dump, Slice

Share = tuple[Fraction, Fraction]  # where a piece of a dimension starts and stops
_WHOLE: Share = (Fraction(0), Fraction(1))
_DIM = re.compile(r"\([^)]*\)|[^\s()]+")


def unfounded(dump: Dump) -> Iterator[tuple[int, Cell, str]]:
    """Operations whose results cannot be what the plan says, if their arguments are: (device, cell, why)."""
    for device in dump.devices:
        for segment in {id(s.cell): s.cell for s in dump.sequences[device]}.values():
            for cell in segment.nodes:
                why = problem(cell) if cell.kind == "IRDimops" and "->" in cell.anno else None
                if why is not None:
                    yield device, cell, why


def problem(cell: Cell) -> str | None:
    """What does not follow; None also for an annotation that does not fit the tensors."""
    left, _, right = cell.anno.partition("->")
    shares: dict[str, Share] = {}
    parts, summed = 1, set()
    for text, value in zip(left.split(","), cell.inputs, strict=False):
        if not isinstance(value, Slice):
            continue
        names = dims(text)
        if len(names) != len(value.indmap):
            return None
        parts = max(parts, value.valmap[1])
        for name, share in zip(names, pieces(value), strict=True):
            if name.endswith("+"):
                summed.add(name.rstrip("+"))
            found = shares.setdefault(name.rstrip("+"), share) if not name[0].isdigit() else share
            if found != share:
                return f"dimension {name} of {value} is another piece than of its other arguments"
    for name in summed:
        start, stop = shares.get(name, _WHOLE)
        parts *= round(1 / (stop - start))
    results = cell.results()
    for text, result in zip(right.split(","), results, strict=False):
        names = dims(text)
        if len(names) != len(result.indmap):
            return None
        for name, share, (low, high) in zip(names, pieces(result), result.indmap, strict=True):
            wanted = shares.get(name.rstrip("+"), _WHOLE)
            if not name[0].isdigit() and share != wanted:
                size = (high - low) / (share[1] - share[0])
                return f"the plan says that it makes {low}:{high} of dimension {name}, it makes {wanted[0] * size}:{wanted[1] * size}"
        if result.valmap[1] != parts:
            return f"the plan says that it makes one of {result.valmap[1]} summands, it makes one of {parts}"
    return None


def dims(text: str) -> list[str]:
    """The names of a tensor's dimensions. Of one that is made of several the first one may be cut."""
    found = []
    for item in _DIM.findall(text):
        name = item.strip("()").split()[0]
        found.append(name.rstrip("^"))
    return found


def pieces(t: Slice) -> list[Share]:
    return [(Fraction(a, n), Fraction(b, n)) for (a, b), n in zip(t.indmap, t.full.shape, strict=True)]
