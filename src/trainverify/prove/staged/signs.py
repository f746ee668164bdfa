"""Signs of whole tensors and of single expressions, read off the ops that make them: "positive", "nonnegative" or None.

Enough for norms and counts. Masks bring −∞ into sums, and its exponential is 0: so it is followed too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from trainverify.evaluate.small import Small, Step
from trainverify.primitives.node import Node, topological
from trainverify.primitives.scalars import conditions
from trainverify.prove.staged.terms import Term
from trainverify.prove.strict import Strict

Sign = str | None
POSITIONS: Final = ("argsort", "argmax", "argmin")
FINITE, BELOW, WILD = range(3)  # an expression is a number, a number or −∞, or perhaps neither, wherever the logical program is defined


def tensor_signs(small: Small) -> dict[str, Sign]:
    """Of every logical tensor."""
    return described(small)[0]


def described(small: Small, strict: Strict | None = None) -> tuple[dict[str, Sign], dict[str, int], set[str]]:
    """Signs of all logical tensors, whether all elements of them are numbers, and which may have no value where the program has one.

    Those divide by what may be 0, or take roots or logarithms, which nobody needs to have values: what somebody needs is `strict`."""
    found: dict[str, Sign] = {}
    infinite: dict[str, int] = {}
    lacking: set[str] = set()
    assumed = set() if strict is None else _conditions(small, strict)
    for n in small.logical.sources:
        domain = small.domains.get(n)
        infinite[n] = FINITE
        if small.logical.tensors[n].kind == "bool" or (domain is not None and domain.kind in ("nonnegative", "indicator")):
            found[n] = "nonnegative"
        else:
            found[n] = "positive" if domain is not None and domain.kind == "positive" else None
    for step in small.logical_steps:
        signs: dict[int, Sign] = {}
        states: dict[int, int] = {}
        inputs = [(None, FINITE) if i is None else (found[i], infinite[i]) for i in step.inputs]
        fails = any(i in lacking for i in step.inputs)
        for node in topological(step.nodes):
            states[id(node)] = _state(node, states, inputs)
            signs[id(node)] = _sign(node, signs, states, inputs)
            if node.prim == "map":
                for k, what in conditions(*node.attrs):
                    sign = signs[id(node.args[k])]
                    known = sign == "positive" or (what == "nonneg" and sign == "nonnegative")
                    fails |= not known and (what, _moved(node.args[k], step)) not in assumed
        for o, node in zip(step.outputs, step.nodes, strict=True):
            found[o], infinite[o] = signs[id(node)], states[id(node)]
        if fails and strict is not None:
            lacking |= {o for o in step.outputs if o not in strict.tensors}
    return found, infinite, lacking


def _conditions(small: Small, strict: Strict) -> set[tuple[str, str | None]]:
    """What the logical program needs of whole tensors to have a value."""
    found: set[tuple[str, str | None]] = set()
    for step, nodes in zip(small.logical_steps, strict.nodes, strict=True):
        for node in topological(step.nodes):
            if id(node) in nodes and node.prim == "map":
                found |= {(what, _moved(node.args[k], step)) for k, what in conditions(*node.attrs)}
    return {(what, tensor) for what, tensor in found if tensor is not None}


def _moved(node: Node, step: Step) -> str | None:
    """The input that a node has all elements of, however they are arranged."""
    while node.prim in ("reshape", "transpose", "broadcast") or (node.prim == "map" and node.attrs[0] == "as_real"):
        (node,) = node.args
    return step.inputs[node.attrs[0]] if node.prim == "input" else None


def _state(node: Node, known: Mapping[int, int], inputs: Sequence[tuple[Sign, int]]) -> int:
    """Of all elements: numbers, numbers or −∞, or anything."""
    args = [known[id(a)] for a in node.args]
    match node.prim:
        case "input":
            return int(inputs[node.attrs[0]][1])
        case "const":
            return expression_state("real", node.attrs[0], ())
        case "map":
            return FINITE if node.kind == "bool" else expression_state("map", node.attrs, args)
        case "contract":
            return FINITE if all(a == FINITE for a in args) else WILD
        case "pad":
            return max(*args, expression_state("real", node.attrs[3], ()))
        case "reduce":
            return expression_state("reduce", node.attrs[0], args)
    return max(args, default=FINITE)


def _weakest(signs: Sequence[Sign]) -> Sign:
    return None if None in signs else "nonnegative" if "nonnegative" in signs else "positive"


def _sign(node: Node, known: Mapping[int, Sign], states: Mapping[int, int], inputs: Sequence[tuple[Sign, int]]) -> Sign:
    args = [known[id(a)] for a in node.args]
    if node.kind == "bool":
        return "nonnegative"
    match node.prim:
        case "input":
            n: int = node.attrs[0]
            return inputs[n][0]
        case "const":
            value = node.attrs[0]
            if value == 0:
                return "nonnegative"
            return "positive" if 0 < value < math.inf else None
        case "reshape" | "transpose" | "slice" | "concat" | "broadcast" | "reduce":
            return _weakest(args)
        case "select":
            return _weakest(args[1:])
        case "gather":  # 0 outside
            table, places = node.args
            return args[0] if _positions(places) <= table.shape[node.attrs[0]] else _weakest([args[0], "nonnegative"])
        case "one_hot":
            return "nonnegative"
        case "contract":
            if all(s is not None for s in args) and 0 not in (d for a in node.args for d in a.shape):
                return _weakest(args)
            same = len(node.args) == 2 and node.args[0] is node.args[1] and node.attrs[0][0] == node.attrs[0][1]
            return "nonnegative" if same else None
        case "map":
            twice = len(node.args) == 2 and node.args[0] is node.args[1]
            param = node.attrs[1] if len(node.attrs) > 1 else None
            return _mapped(node.attrs[0], param, args, twice, all(states[id(a)] == FINITE for a in node.args))
    return None


def _positions(node: Node) -> float:
    """Below what integers are, if they are positions in rows."""
    while node.prim in ("reshape", "transpose", "broadcast", "slice"):
        (node,) = node.args
    return node.args[0].shape[node.attrs[1]] if node.prim == "rowwise" and node.attrs[0] in POSITIONS else math.inf


def _mapped(fn: str, param: Any, args: Sequence[Sign], twice: bool, finite: bool) -> Sign:
    """Of a function of arguments with these signs; `twice` the same one, `finite` numbers."""
    match fn:
        case "pi":
            return "positive"
        case "exp":
            return "positive" if finite else "nonnegative"
        case "abs":
            return "nonnegative" if args[0] != "positive" else "positive"
        case "add":
            return None if None in args else "positive" if "positive" in args else "nonnegative"
        case "mul":
            return "nonnegative" if twice and None in args else _weakest(args)
        case "div":
            return _weakest(args) if args[1] is not None else None
        case "pow":
            if args[0] == "positive":
                return "positive"
            return "nonnegative" if param % 2 != 1 else args[0]  # a root is not negative, nor is an even power
        case "max":
            return "positive" if "positive" in args else "nonnegative" if "nonnegative" in args else None
        case "min" | "detach" | "as_real":
            return _weakest(args)
    return None


def expression_sign(op: str, info: Any, args: Sequence[Sign], states: Sequence[int], numbers: Sequence[int], inside: bool = False) -> Sign:
    """Of an expression (`terms.Term`) of arguments with these signs and states; `numbers` tells equal ones, `inside` that something is
    looked up at a place that is there."""
    match op:
        case "real":
            return None if isinstance(info, str) or not math.isfinite(info) or info < 0 else "positive" if info else "nonnegative"
        case "map":
            return _mapped(info[0], info[1], args, len(numbers) == 2 and numbers[0] == numbers[1], all(s == FINITE for s in states))
        case "dot":
            at = 0
            products: list[Sign] = []
            for n in info:
                mine = numbers[at : at + n]
                products.append("nonnegative" if n == 2 and mine[0] == mine[1] and args[at] is None else _weakest(args[at : at + n]))
                at += n
            return None if None in products or not products else "positive" if "positive" in products else "nonnegative"
        case "hit" | "bool":
            return "nonnegative"
        case "choose":
            return _weakest(args[1:])
        case "pick":
            return _weakest(args[1:] if inside else [*args[1:], "nonnegative"])
        case "reduce":
            return _weakest(args)
    return None


def leaves_of(term: Term, known: Mapping[Term, int]) -> list[Term]:
    """Leaves of a term that are not known, nor in what is."""
    seen = {term}
    stack, found = [term], []
    while stack:
        t = stack.pop()
        if t not in known:
            found += [t] if t.op == "leaf" else []
            stack += [a for a in t.args if a not in seen]
            seen.update(t.args)
    return found


def term_state(term: Term, known: dict[Term, int]) -> int:
    """Of a term, given that of its leaves and maybe of more; what is found on the way is noted."""
    found = known.get(term)
    if found is None:
        found = known[term] = expression_state(term.op, term.info, [term_state(a, known) for a in term.args])
    return found


def expression_state(op: str, info: Any, args: Sequence[int]) -> int:
    """Whether an expression is a number wherever the program is defined: never what is divided after a mask, −∞ stays."""
    if op == "real":
        return WILD if isinstance(info, str) or info != info else FINITE if math.isfinite(info) else BELOW if info < 0 else WILD
    if all(a == FINITE for a in args):
        return FINITE
    if WILD in args:
        return WILD
    if op == "row" and info[0] in POSITIONS:  # positions, whatever is sorted
        return FINITE
    if op == "choose":
        return max(args[1:])
    match (op, info[0] if op == "map" else info):
        case ("map", "exp"):
            return FINITE
        case ("map", "add" | "detach"):
            return BELOW
        case ("map", "sub") if args[1] == FINITE:
            return BELOW
        case ("map" | "reduce", "max"):
            return FINITE if FINITE in args else BELOW
    return WILD
