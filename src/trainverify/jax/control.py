"""Programs within programs: calls are entered, loops with known trip counts run step by step, conditions that are known are followed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import numpy as np
from jax.extend.core import ClosedJaxpr

from trainverify.graph.types import TensorType
from trainverify.jax.emit import RankEmitter
from trainverify.jax.interpret import MOST_STEPS, Handler, Interpreter, Item, type_of
from trainverify.jax.mappings import communication
from trainverify.jax.mappings.shaping import sliced
from trainverify.jax.places import Free, Sharded
from trainverify.jax.randomness import draw_of, drawn, key_of, names_of
from trainverify.jax.ranges import within
from trainverify.jax.values import Divergent, Grid, Key, Number, Opaque, Table, Value, listed, lost, table_of
from trainverify.translate.emit import Unmapped

_COLLECTIVES: Final = frozenset(communication.ROWS) - {"axis_index"}


def call(i: Interpreter, eqn: Any, given: list[Item]) -> Sequence[Item]:
    """A function that is called: its body; those of JAX that make random numbers stand for themselves."""
    if given and isinstance(given[0], Key) and (draw := draw_of(eqn)) is not None:
        return [drawn(i.e, draw, given, type_of(eqn.outvars[0].aval))]
    body = next(eqn.params[n] for n in ("jaxpr", "call_jaxpr", "fun_jaxpr") if n in eqn.params)
    return i.closed(body, given) if isinstance(body, ClosedJaxpr) else i.run(body, (), given)


def plain(i: Interpreter, item: Item) -> Value:
    """A value that a loop may cut: one that a rank has whole."""
    return i.everywhere(item) if isinstance(item, Free | Sharded) else item


def step_of(i: Interpreter, x: Value, n: int) -> Value:
    """Element n of the first dimension."""
    if isinstance(x, Key):
        return key_of(names_of(x)[n : n + 1].reshape(x.shape[1:]), x.impl, x.raw)
    if isinstance(x, Opaque):
        return x
    shape = i.e.shape(x) if isinstance(x, str) else x.shape
    if isinstance(x, str):
        return i.e.op("select", (x,), {"dim": 0, "index": n})
    start, stop = (n, *(0,) * (len(shape) - 1)), (n + 1, *shape[1:])
    part = sliced(i.e, x, start, stop, (1,) * len(shape))
    if isinstance(part, Number):
        return Number(part.value, shape[1:], part.dtype)
    if isinstance(part, Grid):
        return Grid(part.start, part.strides[1:], shape[1:], part.dtype)
    assert isinstance(part, Table)
    return listed(part.data[:, 0], part.dtype)


def stacked(i: Interpreter, items: Sequence[Value], kind: TensorType) -> Value:
    """Results of all steps, one after the other."""
    opaque = next((x for x in items if isinstance(x, Opaque)), None)
    if opaque is not None:
        return lost(opaque)
    numbers = [x for x in items if isinstance(x, Number)]
    if len(numbers) == len(items) and len({x.value for x in numbers}) <= 1:
        return Number(numbers[0].value if numbers else 0, kind.shape, kind.dtype)
    known = [x for x in items if isinstance(x, Grid | Table)]
    if len(known) == len(items):
        tables = [t for x in known if (t := table_of(x)) is not None]
        if len(tables) == len(items):
            width = max(map(len, tables))
            return listed(np.stack([np.broadcast_to(t, (width, *t.shape[1:])) for t in tables], 1), kind.dtype)
    return i.e.op("stack", [i.e.tensor(x) for x in items], {"dim": 0})


def scan(i: Interpreter, eqn: Any, given: list[Item]) -> Sequence[Item]:
    p = eqn.params
    n, consts, carried = p["length"], p["num_consts"], p["num_carry"]
    if n > MOST_STEPS:
        raise Unmapped(f"a scan of {n} steps")
    values = [plain(i, v) for v in given]
    fixed, carry, rows = values[:consts], list(values[consts : consts + carried]), values[consts + carried :]
    collected: list[list[Value]] = [[] for _ in eqn.outvars[carried:]]
    order = range(n - 1, -1, -1) if p["reverse"] else range(n)
    for k in order:
        out = [plain(i, v) for v in i.closed(p["jaxpr"], [*fixed, *carry, *(step_of(i, x, k) for x in rows)])]
        carry = out[:carried]
        for kept, value in zip(collected, out[carried:], strict=True):
            kept.append(value)
    kinds = [type_of(v.aval) for v in eqn.outvars[carried:]]
    turned = [c[::-1] if p["reverse"] else c for c in collected]
    return [*carry, *(stacked(i, c, kind) for c, kind in zip(turned, kinds, strict=True))]


def while_(i: Interpreter, eqn: Any, given: list[Item]) -> Sequence[Item]:
    """A loop whose condition follows from known integers."""
    p = eqn.params
    a, b = p["cond_nconsts"], p["body_nconsts"]
    values = [plain(i, v) for v in given]
    tests, fixed, carry = values[:a], values[a : a + b], list(values[a + b :])
    for _ in range(MOST_STEPS):
        (goes,) = i.closed(p["cond_jaxpr"], [*tests, *carry])
        if isinstance(goes, Opaque):
            return [lost(goes) for _ in eqn.outvars]
        if not isinstance(goes, Grid):
            raise Unmapped("a loop whose end depends on data")
        if goes.literal is None:
            raise Divergent(np.broadcast_to(goes.start, (len(i.e.ranks),)))
        if not goes.literal:
            return carry
        carry = [plain(i, v) for v in i.closed(p["body_jaxpr"], [*fixed, *carry])]
    raise Unmapped(f"a loop of more than {MOST_STEPS} steps")


def cond(i: Interpreter, eqn: Any, given: list[Item]) -> Sequence[Item]:
    """The branch that is taken, if that is known; else all of them, and a choice."""
    branches, which, rest = eqn.params["branches"], plain(i, given[0]), given[1:]
    if not isinstance(which, Opaque | Grid):
        if any(communicates(b.jaxpr) for b in branches):
            raise Unmapped("a condition on data with communication in a branch")
        rest = [plain(i, v) for v in rest]  # as the other branches have them

    def run(branch: ClosedJaxpr) -> list[Value]:
        return [plain(i, v) for v in i.closed(branch, rest)]

    return chosen(i.e, which, [partial(run, b) for b in branches], len(eqn.outvars))


def chosen(e: RankEmitter, which: Value, branches: Sequence[Callable[[], list[Value]]], count: int) -> list[Value]:
    """The results of a branch by its number, or of the first two by a condition. Ranks that take different ones run different programs."""
    if isinstance(which, Opaque):
        return [lost(which)] * count
    if isinstance(which, Grid):
        if which.literal is None:
            raise Divergent(np.broadcast_to(which.start, (len(e.ranks),)))
        return branches[min(max(which.literal, 0), len(branches) - 1)]()
    if not within(e, which, 0, len(branches) - 1):
        raise Unmapped("a branch by a number that may be none of the branches'")
    number = e.tensor(which)
    results = [b() for b in branches]
    made = results[-1]
    for n in reversed(range(len(branches) - 1)):
        test = e.op("logical_not", (e.cast(number, "bool"),)) if n == 0 else e.op("lt", (number,), {"value": n + 1})
        made = [_either(e, test, x, y) for x, y in zip(results[n], made, strict=True)]
    return made


def _either(e: RankEmitter, test: str, x: Value, y: Value) -> Value:
    if x == y and isinstance(x, str | Key):
        return x
    opaque = next((v for v in (x, y) if isinstance(v, Opaque)), None)
    return lost(opaque) if opaque is not None else e.op("where", (test, e.tensor(x), e.tensor(y)))


def communicates(jaxpr: Any) -> bool:
    from jax.extend.core import jaxprs_in_params

    return any(e.primitive.name in _COLLECTIVES or any(communicates(j) for j in jaxprs_in_params(e.params)) for e in jaxpr.eqns)


def name(i: Interpreter, eqn: Any, given: list[Item]) -> Sequence[Item]:
    return given


CONTROL: Final[dict[str, Handler]] = {
    **dict.fromkeys(
        ("jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "checkpoint", "remat2", "remat"), call
    ),
    "custom_vjp_call_jaxpr": call,
    "scan": scan,
    "while": while_,
    "cond": cond,
    "name": name,
    "device_put": name,
}

__all__ = ["CONTROL", "chosen"]
