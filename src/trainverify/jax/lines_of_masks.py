"""Masks of positions: along which dimensions every line has an element that is kept. The maximum of such a line is a number.

A causal mask keeps, for every query, the key at its own position.
"""

from __future__ import annotations

from collections.abc import Sequence

from trainverify.graph.program import Op
from trainverify.jax.emit import RankEmitter
from trainverify.jax.values import Grid
from trainverify.jax.vocabulary import places


def note_lines(e: RankEmitter, mask: str, name: str, x: Grid, y: Grid) -> None:
    """Remember the dimensions along which every line of the mask x ⋛ y has an element that is true."""
    if name not in ("lt", "le", "gt", "ge"):
        return
    if name in ("lt", "le"):
        x, y = y, x
    strict = int(name in ("lt", "gt"))
    shape = x.shape or y.shape
    rises = [g.strides if g.shape else (0,) * len(shape) for g in (x, y)]
    spans = [(p - q) * (n - 1) for p, q, n in zip(*rises, shape, strict=True)]
    least = int((x.start - y.start).min())
    found = []
    for d, span in enumerate(spans):
        worst = least + sum(min(s, 0) for k, s in enumerate(spans) if k != d) + max(span, 0)
        if worst >= strict:
            found.append(d)
    e.kept["lines", mask] = tuple(found)


def full_lines(e: RankEmitter, choice: Op, dims: Sequence[int]) -> bool:
    """Whether where(mask, x, y) has an element of x in every line along (one of) the dimensions."""
    shape = e.shape(choice.outputs[0])
    where = places(e, choice.inputs[0], shape)
    if where is None:
        return False
    mask, entries = where
    wide = [d for d, n in enumerate(shape) if n != 1]
    kept = e.kept.get(("lines", mask), ())
    own = [d for d, n in enumerate(e.shape(mask)) if n != 1]
    return any(k is not None and wide[i] in dims and own[k] in kept for i, k in enumerate(entries))


__all__ = ["full_lines", "note_lines"]
