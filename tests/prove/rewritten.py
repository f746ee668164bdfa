"""A program in other words: renamed, with sums commuted, views there and back, ops made twice. It means the same, value or none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from trainverify.graph.program import Op, Program, attributes

COMMUTE: Final = frozenset({"add", "mul", "maximum", "minimum"})


def renamed(program: Program) -> Program:
    """Every tensor that is made has another name."""
    made = [t for op in program.ops for t in op.outputs]
    names = {t: f"other.{n}" for n, t in enumerate(made)}
    return _with(program, [_moved(op, names, names) for op in program.ops], names)


def commuted(program: Program) -> Program:
    """Both arguments of a sum, product or maximum in the other order."""
    swap = [op.name in COMMUTE and len(op.inputs) == 2 and op.inputs[1] is not None for op in program.ops]
    return replace(program, ops=tuple(replace(op, inputs=op.inputs[::-1]) if s else op for op, s in zip(program.ops, swap, strict=True)))


def viewed(program: Program) -> Program:
    """The first output of every op is flattened, and has its shape again."""
    ops: list[Op] = []
    tensors = dict(program.tensors)
    names: dict[str, str] = {}
    for op in program.ops:
        ops.append(_moved(op, names, {}))
        t = op.outputs[0]
        shape = program.tensors[t].shape
        if shape and 0 not in shape:
            count = 1
            for n in shape:
                count *= n
            tensors[f"{t}.flat"], tensors[f"{t}.back"] = replace(tensors[t], shape=(count,)), tensors[t]
            ops.append(Op("reshape", (t,), (f"{t}.flat",), attributes({"shape": (count,)}), op.phase))
            ops.append(Op("reshape", (f"{t}.flat",), (f"{t}.back",), attributes({"shape": shape}), op.phase))
            names[t] = f"{t}.back"
    return _with(replace(program, tensors=tensors), ops, names)


def recomputed(program: Program) -> Program:
    """Every op runs twice; who comes later uses the second."""
    ops: list[Op] = []
    tensors = dict(program.tensors)
    names: dict[str, str] = {}
    for op in program.ops:
        op = _moved(op, names, {})
        own = {t: f"{t}.again" for t in op.outputs}
        tensors.update({a: tensors[t] for t, a in own.items()})
        ops += [op, _moved(op, {}, own)]
        names |= own
    return _with(replace(program, tensors=tensors), ops, names)


def _moved(op: Op, inputs: dict[str, str], outputs: dict[str, str]) -> Op:
    return replace(
        op,
        inputs=tuple(None if i is None else inputs.get(i, i) for i in op.inputs),
        outputs=tuple(outputs.get(o, o) for o in op.outputs),
        forward=None if op.forward is None else inputs.get(op.forward, op.forward),
    )


def _with(program: Program, ops: list[Op], names: dict[str, str]) -> Program:
    """The program with these ops, its outputs under their names."""
    tensors = {names.get(t, t): kind for t, kind in program.tensors.items()} | dict(program.tensors)
    made = {t for op in ops for t in op.outputs} | set(program.sources)
    outputs = tuple(replace(o, tensor=names.get(o.tensor, o.tensor)) for o in program.outputs)
    return replace(program, ops=tuple(ops), tensors={t: k for t, k in tensors.items() if t in made}, outputs=outputs)


WORDS: Final[dict[str, Callable[[Program], Program]]] = {
    "as it is": lambda p: p,
    "renamed": renamed,
    "commuted": commuted,
    "viewed": viewed,
    "recomputed": recomputed,
}
