"""Signs of whole tensors, read off the ops that make them: "positive", "nonnegative" or None. Enough for norms and counts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from trainverify.evaluate.small import Small
from trainverify.primitives.node import Node, topological

Sign = str | None


def tensor_signs(small: Small) -> dict[str, Sign]:
    """Of every logical tensor."""
    found: dict[str, Sign] = {}
    for n in small.logical.sources:
        domain = small.domains.get(n)
        if small.logical.tensors[n].kind == "bool" or (domain is not None and domain.kind in ("nonnegative", "indicator")):
            found[n] = "nonnegative"
        else:
            found[n] = "positive" if domain is not None and domain.kind == "positive" else None
    for step in small.logical_steps:
        inputs = [None if i is None else found[i] for i in step.inputs]
        found.update(zip(step.outputs, _signs(step.nodes, inputs), strict=True))
    return found


def _signs(outputs: Sequence[Node], inputs: Sequence[Sign]) -> list[Sign]:
    known: dict[int, Sign] = {}
    for node in topological(outputs):
        known[id(node)] = _sign(node, known, inputs)
    return [known[id(o)] for o in outputs]


def _weakest(signs: Sequence[Sign]) -> Sign:
    return None if None in signs else "nonnegative" if "nonnegative" in signs else "positive"


def _sign(node: Node, known: Mapping[int, Sign], inputs: Sequence[Sign]) -> Sign:
    args = [known[id(a)] for a in node.args]
    if node.kind == "bool":
        return "nonnegative"
    match node.prim:
        case "input":
            n: int = node.attrs[0]
            return inputs[n]
        case "const":
            value = node.attrs[0]
            if value == 0:
                return "nonnegative"
            return "positive" if 0 < value < math.inf else None
        case "reshape" | "transpose" | "slice" | "concat" | "broadcast" | "reduce":
            return _weakest(args)
        case "select":
            return _weakest(args[1:])
        case "one_hot":
            return "nonnegative"
        case "contract":
            if all(s is not None for s in args) and 0 not in (d for a in node.args for d in a.shape):
                return _weakest(args)
            same = len(node.args) == 2 and node.args[0] is node.args[1] and node.attrs[0][0] == node.attrs[0][1]
            return "nonnegative" if same else None
        case "map":
            return _mapped(node, args)
    return None


def _mapped(node: Node, args: Sequence[Sign]) -> Sign:
    match node.attrs[0]:
        case "exp" | "pi":
            return "positive"
        case "abs":
            return "nonnegative" if args[0] != "positive" else "positive"
        case "add":
            return None if None in args else "positive" if "positive" in args else "nonnegative"
        case "mul":
            return "nonnegative" if node.args[0] is node.args[1] and None in args else _weakest(args)
        case "div":
            return _weakest(args) if args[1] is not None else None
        case "pow":
            whole = isinstance(node.attrs[1], int)
            if args[0] == "positive":
                return "positive"
            return "nonnegative" if not whole or node.attrs[1] % 2 == 0 else args[0]
        case "max":
            return "positive" if "positive" in args else "nonnegative" if "nonnegative" in args else None
        case "min" | "detach" | "as_real":
            return _weakest(args)
    return None
