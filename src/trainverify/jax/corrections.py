"""Bias corrections with a step count that is not known: 1 − βᵗ, which is not 0 for t ≥ 1.

An optimizer divides by it where the quotient may well be infinite (under a root in a divisor), so the step being defined does not
imply that it is not 0. Its reciprocal is therefore compared too, as a metric of both programs: the condition is then one of the
logical program, and listed. It follows from the power βᵗ, however a program goes on with it: −m/(βᵗ − 1), α·√(1 − βᵗ).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from trainverify.graph.plan import Plan
from trainverify.graph.program import Op, Output, Program
from trainverify.jax.emit import RankEmitter
from trainverify.jax.ranges import bounds
from trainverify.translate.emit import Emitter

_SAME: Final = ("identity", "to", "expand", "reshape", "unsqueeze")
_START: Final = "1/(1 - "


def _behind(e: Emitter, name: str | None) -> tuple[str | None, Op | None]:
    """A tensor without casts and copies, and the op that makes it."""
    op = e.made.get(name)
    while op is not None and op.name in _SAME:
        name = op.inputs[0]
        op = e.made.get(name)
    return name, op


def _power(e: RankEmitter, name: str) -> str | None:
    """βᵗ in words, of a scalar that is that, for 0 < β < 1 and an integer t ≥ 1."""
    _, exp = _behind(e, name)
    if exp is None or exp.name != "exp" or e.shape(name) != ():
        return None
    _, product = _behind(e, exp.inputs[0])
    if product is None or product.name != "mul" or len(product.inputs) != 2:
        return None
    count, adds = _behind(e, product.inputs[0])
    _, log = _behind(e, product.inputs[1])
    base = None if log is None or log.name != "log" else _behind(e, log.inputs[0])[1]
    if base is None or base.name != "full" or not 0 < base.get("value") < 1 or count is None:
        return None
    low = bounds(e, count)
    if low is None or low[0] < 1:
        return None
    shown = count if adds is None or adds.name != "add" or len(adds.inputs) != 1 else f"({adds.inputs[0]} + {adds.get('value')})"
    return f"{base.get('value')}^{shown}"


def reported(e: RankEmitter) -> Iterator[Output]:
    """1/(1 − βᵗ) of all such powers, as metrics."""
    results = [op.outputs[0] for op in e.ops if op.name == "exp"]
    powers = {shown: name for name in results if (shown := _power(e, name)) is not None}
    for shown, name in powers.items():
        one = e.full((), 1, e.tensors[name].dtype)
        yield Output(e.op("reciprocal", (e.op("sub", (one, name)),)), "metric", f"{_START}{shown})")


def in_all(logical: Program, plan: Plan) -> tuple[Program, Plan]:
    """Both programs, with those of these metrics only that the reference and all ranks have."""
    programs = (logical, *(t.program for t in plan.templates))
    common = set.intersection(*({o.of for o in p.outputs if o.role == "metric"} for p in programs))

    def less(p: Program) -> Program:
        return replace(p, outputs=tuple(o for o in p.outputs if o.of in common or not str(o.of).startswith(_START) or o.role != "metric"))

    return less(logical), replace(plan, templates=tuple(replace(t, program=less(t.program)) for t in plan.templates))


__all__ = ["in_all", "reported"]
