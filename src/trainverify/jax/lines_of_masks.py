"""Along which dimensions every line has an element that is finite. The maximum of such a line is a number.

A causal mask keeps, for every query, the key at its own position, whether it chooses −∞ or adds it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from trainverify.graph.program import Op
from trainverify.jax.emit import RankEmitter
from trainverify.jax.values import Grid

_NOT: Final = {"lt": "ge", "le": "gt", "gt": "le", "ge": "lt"}
Test = Callable[[str], bool]


def note_lines(e: RankEmitter, mask: str, name: str, x: Grid, y: Grid) -> None:
    """Remember along which dimensions every line of the mask x ⋛ y has an element that is true, and one that is false."""
    if name in _NOT:
        e.kept["lines", mask] = _true_lines(name, x, y), _true_lines(_NOT[name], x, y)


def _true_lines(name: str, x: Grid, y: Grid) -> list[int]:
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
    return found


def finite_lines(e: RankEmitter, name: str, finite: Test, shape: Sequence[int] | None = None) -> set[int]:
    """Of a tensor that is repeated to a shape. `finite` says which tensors are never infinite."""
    shape = e.shape(name) if shape is None else shape
    where = places(e, name, shape)
    if where is None:
        return set()
    base, entries = where
    op = e.made.get(base)
    if finite(base):
        return _spread(e, base, entries, shape, range(len(e.shape(base))))
    found: set[int] = set()
    if op is not None and op.name == "where":
        kept = [finite(str(i)) for i in op.inputs[1:]]
        if any(kept):
            found = _mask_lines(e, str(op.inputs[0]), e.shape(base), kept[0])
    elif op is not None and op.name in ("add", "sub"):
        unsure = [str(i) for i in op.inputs if not finite(str(i))]
        if len(unsure) == 1:
            found = finite_lines(e, unsure[0], finite, e.shape(base))
    elif op is not None and op.name in ("to", "identity"):
        found = finite_lines(e, str(op.inputs[0]), finite)
    return _spread(e, base, entries, shape, found)


def _spread(e: RankEmitter, base: str, entries: Sequence[int | None], shape: Sequence[int], kept: Sequence[int] | set[int]) -> set[int]:
    """Dimensions of a tensor as those of the shape that it is repeated to. Along one that repeats it a line is one element."""
    wide = [d for d, n in enumerate(shape) if n != 1]
    own = [d for d, n in enumerate(e.shape(base)) if n != 1]
    return {wide[i] for i, k in enumerate(entries) if k is not None and own[k] in kept}


def _mask_lines(e: RankEmitter, mask: str, shape: Sequence[int], answer: bool) -> set[int]:
    """Along which dimensions every line of a mask has this answer: of one that the code closes over by its content."""
    where = places(e, mask, shape)
    if where is None:
        return set()
    base, entries = where
    op: Op | None = e.made.get(base)
    if op is not None and op.name == "logical_not":
        return _spread(e, base, entries, shape, _mask_lines(e, str(op.inputs[0]), e.shape(base), not answer))
    constant = e.constants.get(base)
    if constant is None:
        return _spread(e, base, entries, shape, e.kept.get(("lines", base), ((), ()))[not answer])
    data = constant.data.astype(bool) == answer
    return _spread(e, base, entries, shape, [d for d in range(data.ndim) if data.any(d).all()])


def places(e: RankEmitter, mask: str | None, shape: Sequence[int]) -> tuple[str, list[int | None]] | None:
    """The mask before it was repeated; for every dimension of `shape` that is not 1 the one of the mask's that it is (None: repeated)."""
    chain: list[Op] = []
    op = e.made.get(mask)
    name = mask
    while op is not None and (_is_slim(e, op) or op.name == "expand"):
        chain.append(op)
        name = op.inputs[0]
        op = e.made.get(name)
    if name is None:
        return None
    sizes = list(e.shape(name))
    entries: list[int | None] = []
    for d in range(len(sizes)):
        entries.append(sum(n != 1 for n in sizes[:d]) if sizes[d] != 1 else None)
    for step in reversed(chain):
        after = list(e.shape(step.outputs[0]))
        if step.name == "expand":
            entries = [*[None] * (len(after) - len(sizes)), *entries]
        else:
            wide = iter([x for x, n in zip(entries, sizes, strict=True) if n != 1])
            entries = [next(wide) if n != 1 else None for n in after]
        sizes = after
    lead = len(shape) - len(sizes)
    entries = [*[None] * lead, *entries]
    return name, [x for x, n in zip(entries, shape, strict=True) if n != 1]


def _is_slim(e: RankEmitter, op: Op) -> bool:
    if op.name != "reshape":
        return False
    before, after = e.shape(str(op.inputs[0])), e.shape(op.outputs[0])
    return [n for n in before if n != 1] == [n for n in after if n != 1]


__all__ = ["finite_lines", "note_lines"]
