"""Tensors that are functions of one integer tensor, element by element: which one, where its elements are, and the function as pieces.

Every op that computes an element from one element of each argument is followed by its meaning: comparisons, logic, choices, arithmetic,
casts, and moves. An integer that is computed otherwise (counted, sorted, received) is a source of its own. Positions 0, 1, 2, … are one
source, of which ranges are slices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Final

from trainverify.graph.program import Op
from trainverify.translate.emit import Emitter
from trainverify.translate.integers import tensor_bounds
from trainverify.translate.layouts import MOVES, Layout, of
from trainverify.translate.pieces import (
    IDENTITY,
    INTEGERS,
    Pieces,
    Range,
    Refused,
    chosen,
    compared,
    constant,
    floored,
    image,
    inverted,
    linear,
    moved,
    product,
    united,
    whole,
)

POSITIONS: Final = ""  # the source of ranges: 0, 1, 2, …
_SIGNS: Final = {"lt": (-1,), "le": (-1, 0), "gt": (1,), "ge": (0, 1), "eq": (0,), "ne": (-1, 1)}
_NOTHING: Final = Layout(0, ())


@dataclass(frozen=True)
class Function:
    """What a tensor is of its source: one function for all ranks, or one for each. Without a source it is a constant."""

    source: str | None
    layout: Layout
    columns: tuple[Pieces, ...]


def each(f: Callable[..., Any], *columns: Sequence[Any]) -> tuple[Any, ...]:
    """A function rank by rank, computed once for equal arguments."""
    count = max(map(len, columns))
    wide = [c if len(c) == count else tuple(c) * count for c in columns]
    known: dict[tuple[Any, ...], Any] = {}
    found = []
    for given in zip(*wide, strict=True):
        if given not in known:
            known[given] = f(*given)
        found.append(known[given])
    return tuple(found[:1] if len(known) == 1 or all(x == found[0] for x in found) else found)


def function(e: Emitter, name: str | None) -> Function | None:
    """What a tensor is a function of; None if it is none."""
    waiting = [name]
    while waiting:  # inputs first, without a recursion as deep as the program
        here = waiting[-1]
        op = e.made.get(here)
        if here is None or here in e.ids.functions:
            waiting.pop()
            continue
        follow = op is not None and (op.name in MOVES or op.name in _OPS)
        more = [i for i in op.inputs if i is not None and i not in e.ids.functions] if op is not None and follow else []
        if more:
            waiting += more
        else:
            waiting.pop()
            e.ids.functions[here] = made = _found(e, here, op if follow else None)
            if made is not None and made.source is not None and made.columns == (IDENTITY,):
                e.ids.witnesses.setdefault((made.source, made.layout.offset, made.layout.line), here)
    known: Function | None = e.ids.functions.get(name)
    return known


def _found(e: Emitter, name: str, op: Op | None) -> Function | None:
    try:
        if op is not None:
            return _followed(e, name, op)
    except Refused:
        pass
    try:
        made = e.made.get(name)
        if made is not None and made.name == "full":
            return Function(None, _NOTHING, each(_literal, e.column(made.get("value"))))
        if made is not None and made.name == "arange" and e.kind(name) == "int":
            start, step = made.get("start", 0), made.get("step", 1)
            if type(start) is int and type(step) is int:
                return Function(POSITIONS, of(e.shape(name), start, step), (IDENTITY,))
        return Function(name, of(e.shape(name)), (IDENTITY,)) if e.kind(name) == "int" else None
    except Refused:
        return None


def _literal(value: Any) -> Pieces:
    if isinstance(value, bool):
        return constant(int(value))
    if not isinstance(value, int | Fraction | float) or not math.isfinite(value):
        raise Refused
    return constant(value if isinstance(value, int) else Fraction(value))


def _followed(e: Emitter, name: str, op: Op) -> Function | None:
    given: list[tuple[Function, Sequence[int]]] = []
    for i in op.inputs:
        if i is None or (known := e.ids.functions[i]) is None:
            raise Refused
        given.append((known, e.shape(i)))
    shape = e.shape(name)
    if op.name in MOVES:
        ((f, before),) = given
        return f if f.source is None else replace(f, layout=f.layout.moved(op.name, dict(op.attrs), before, shape))
    f, columns = beside(given, shape)
    within = spread_of(e, f)
    if op.name == "to":
        return replace(f, columns=each(lambda x: _cast(x, e.kind(str(op.inputs[0])), e.kind(name), within), columns[0]))
    if op.get("alpha", 1) != 1:
        raise Refused
    literals = [e.column(op.get(a)) for a in ("value", "min", "max")]
    n, rule = len(columns), _OPS[op.name]
    return replace(f, columns=each(lambda *args: rule(op.name, args[:n], args[n:], within), *columns, *literals))


def beside(given: Sequence[tuple[Function, Sequence[int]]], shape: Sequence[int]) -> tuple[Function, list[tuple[Pieces, ...]]]:
    """Several tensors that are broadcast to one shape: what they are functions of, and each as a function of that."""
    moving = [(f, f.layout.expanded(before, shape)) for f, before in given if f.source is not None]
    if not moving:
        return given[0][0], [f.columns for f, _ in given]
    first, layout = max(moving, key=lambda x: x[1].offset)
    at = Layout(layout.offset, layout.own)
    columns = []
    for f, before in given:
        if f.source is None:
            columns.append(f.columns)
            continue
        mine = f.layout.expanded(before, shape)
        by = mine.offset - at.offset
        if f.source != first.source or mine.own != at.dims or (by and f.source != POSITIONS):
            raise Refused
        columns.append(each(lambda x, by=by: moved(x, by), f.columns) if by else f.columns)
    return Function(first.source, layout, ()), columns


def _cast(x: Pieces, before: str, after: str, within: Range) -> Pieces:
    if after == "bool" and before != "bool":
        return compared(x, constant(0), _SIGNS["ne"])
    if after == "int" and not whole(x, within):
        return _truncated(x, 1, within)
    return x


def _truncated(x: Pieces, n: int, within: Range) -> Pieces:
    """x / n without the digits behind the point."""
    below = linear(-1, floored(linear(-1, x, 0, x), n, within), 0, x)
    return chosen(compared(x, constant(0), _SIGNS["lt"]), below, floored(x, n, within))


Rule = Callable[[str, Sequence[Pieces], Sequence[Any], Range], Pieces]


def _second(given: Sequence[Pieces], values: Sequence[Any]) -> Pieces:
    return given[1] if len(given) > 1 else _literal(values[0])


def _arithmetic(name: str, given: Sequence[Pieces], values: Sequence[Any], within: Range) -> Pieces:
    x = given[0]
    match name:
        case "neg":
            return linear(-1, x, 0, x)
        case "abs":
            return chosen(compared(x, constant(0), _SIGNS["lt"]), linear(-1, x, 0, x), x)
        case "sign":
            zero = constant(0)
            return linear(1, compared(x, zero, _SIGNS["gt"]), -1, compared(x, zero, _SIGNS["lt"]))
        case "square":
            return product(x, x)
    y = _second(given, values)
    match name:
        case "add" | "sub":
            return linear(1, x, 1 if name == "add" else -1, y)
        case "mul":
            return product(x, y)
        case "maximum" | "minimum":
            return chosen(compared(x, y, _SIGNS["ge" if name == "maximum" else "le"]), x, y)
    return compared(x, y, _SIGNS[name])


def _divided(name: str, given: Sequence[Pieces], values: Sequence[Any], within: Range) -> Pieces:
    (x,), n = given, values[0]
    if type(n) is not int or n < 1:
        raise Refused
    found = floored(x, n, within)
    return found if name == "floordiv" else linear(1, x, -n, found)


def _logic(name: str, given: Sequence[Pieces], values: Sequence[Any], within: Range) -> Pieces:
    x, *rest = (compared(p, constant(0), _SIGNS["ne"]) for p in given)
    if name == "logical_not":
        return inverted(x)
    (y,) = rest
    return product(x, y) if name == "logical_and" else inverted(product(inverted(x), inverted(y)))


def _choice(name: str, given: Sequence[Pieces], values: Sequence[Any], within: Range) -> Pieces:
    if name == "where":
        return chosen(*given)
    x, mask = given
    return chosen(mask, _literal(values[0]), x) if name == "masked_fill" else chosen(mask, x, _literal(values[0]))


def _clamped(name: str, given: Sequence[Pieces], values: Sequence[Any], within: Range) -> Pieces:
    (x,), (_, low, high) = given, values
    if low is not None:
        x = chosen(compared(x, _literal(low), _SIGNS["lt"]), _literal(low), x)
    return x if high is None else chosen(compared(x, _literal(high), _SIGNS["gt"]), _literal(high), x)


_ARITHMETIC: Final = ("neg", "abs", "sign", "square", "add", "sub", "mul", "maximum", "minimum", *_SIGNS)
_OPS: Final[dict[str, Rule]] = {
    **dict.fromkeys(_ARITHMETIC, _arithmetic),
    **dict.fromkeys(("floordiv", "mod"), _divided),
    **dict.fromkeys(("logical_not", "logical_and", "logical_or"), _logic),
    **dict.fromkeys(("where", "masked_fill", "apply_mask"), _choice),
    "clamp": _clamped,
    "to": _arithmetic,  # by the kinds of both tensors
}


# -- where integers lie -----------------------------------------------------------------------------------------------


def spread_of(e: Emitter, f: Function) -> Range:
    """Where the integers of a function's source lie."""
    if f.source is None:
        return INTEGERS
    return (f.layout.reach,) if f.source == POSITIONS else _spread(e, f.source)


def spread(e: Emitter, name: str) -> Range:
    """Where the integers of a tensor lie."""
    f = function(e, name)
    if f is None or f.source == name:
        return INTEGERS if f is None else _spread(e, name)
    return _image(e, f)


def _image(e: Emitter, f: Function) -> Range:
    within = spread_of(e, f)
    return united([s for x in set(f.columns) for s in image(x, within) or INTEGERS])


def image_of(e: Emitter, f: Function) -> tuple[int, int] | None:
    """The smallest and the largest integer of a function, where both are known."""
    found = _image(e, f)
    low, high = found[0][0], found[-1][1]
    return (int(low), int(high)) if math.isfinite(low) and math.isfinite(high) else None


def known_image(e: Emitter, name: str) -> tuple[int, int] | None:
    """The same of a tensor that is a function of another one."""
    f = function(e, name)
    return None if f is None or f.source == name else image_of(e, f)


_JOINS: Final = frozenset(("concat", "stack", "pad", "where"))


def _spread(e: Emitter, source: str) -> Range:
    """Of a source: as it is declared, or as it is made."""
    if source in e.ids.spreads:
        return e.ids.spreads[source]
    op = e.made.get(source)
    if op is not None and op.name in _JOINS:
        given = [spread(e, i) for i in op.inputs if i is not None and e.kind(i) == "int"]
        numbers = tuple((v, v) for v in e.column(op.get("value", 0))) if op.name == "pad" else ()
        return united([s for r in (*given, numbers) for s in r])
    known = tensor_bounds(e, source)
    return (known,) if known is not None else ((0, math.inf),) if source in e.nonnegative else INTEGERS


__all__ = ["POSITIONS", "Function", "beside", "each", "function", "image_of", "known_image", "spread", "spread_of"]
