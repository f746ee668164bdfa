"""Calls among functions: no cycles, and no file whose calls unfold without bound."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from trainverify.files.errors import Bad, show
from trainverify.files.limits import Limits
from trainverify.graph.program import CALL, MAX_CALL_DEPTH, Function, Op


class Size(NamedTuple):
    ops: int  # after inlining
    depth: int  # of calls inside of calls


Sizes = Mapping[str, Size]


def function_sizes(functions: Mapping[str, Function], outer: Sizes, limits: Limits) -> Sizes:
    """What every function unfolds to; `outer` has those of the plan. A function that reaches itself is an error."""
    sizes: dict[str, Size] = dict(outer)
    callees = {name: list(dict.fromkeys(_called(f.ops))) for name, f in functions.items()}
    for root in functions:
        trail: dict[str, int] = {} if root in sizes else {root: 0}  # function → how many of its callees are done
        while trail:
            name = next(reversed(trail))
            if trail[name] == len(callees[name]):
                trail.popitem()
                try:
                    sizes[name] = check_calls(functions[name].ops, sizes, limits)
                except Bad as e:
                    raise e.inside(name, "ops") from None
                continue
            callee = callees[name][trail[name]]
            trail[name] += 1
            if callee in trail:
                names = list(trail)
                loop = [*names[names.index(callee) :], callee]
                shown = [show(n) for n in (loop if len(loop) <= 5 else [*loop[:2], "…", *loop[-2:]])]
                raise Bad(f"calls itself: {' → '.join(shown)}", callee)
            if callee not in sizes:
                trail[callee] = 0
    return sizes


def _called(ops: Iterable[Op]) -> Iterable[str]:
    return (str(op.get("function")) for op in ops if op.name == CALL)


def check_calls(ops: Iterable[Op], sizes: Sizes, limits: Limits) -> Size:
    """What a list of ops unfolds to."""
    total, depth = 0, 0
    for i, op in enumerate(ops):
        if op.name != CALL:
            total += 1
            continue
        size = sizes[str(op.get("function"))]
        total += size.ops
        depth = max(depth, size.depth + 1)
        if depth > MAX_CALL_DEPTH:
            raise Bad(f"calls nested more than {MAX_CALL_DEPTH} deep", i)
        if total > limits.inlined_ops:
            raise Bad(f"calls that unfold to more than {limits.inlined_ops} ops", i)
    return Size(total, depth)
