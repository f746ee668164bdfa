"""Masks of positions: along which dimensions every line has an element that is kept. The maximum of such a line is a number.

A causal mask keeps, for every query, the key at its own position.
"""

from __future__ import annotations

from collections.abc import Sequence

from trainverify.graph.program import Op
from trainverify.jax.emit import RankEmitter
from trainverify.jax.values import Grid
from trainverify.translate.layouts import of
from trainverify.translate.pieces import Refused


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
    mask, steps = str(choice.inputs[0]), []
    while ("lines", mask) not in e.kept and (op := e.made.get(mask)) is not None and op.name in ("reshape", "expand"):
        mask = str(op.inputs[0])
        steps.append(op)
    shape, before = e.shape(choice.outputs[0]), e.shape(mask)
    try:
        own = at = of(before)
        for s in reversed(steps):
            at = at.moved(s.name, dict(s.attrs), e.shape(str(s.inputs[0])), e.shape(s.outputs[0]))
        at = at.expanded(e.shape(str(choice.inputs[0])), shape)
    except Refused:
        return False
    kept = [own.dims[d] for d in e.kept.get(("lines", mask), ()) if own.dims[d]]
    return any(at.dims[d % len(shape)] in kept for d in dims)


__all__ = ["full_lines", "note_lines"]
