"""Changing a training step exactly: a forward op becomes other ops, and its backward op becomes the derivative of these.

`NAME.grad` is the derivative of NAME by definition, so both are replaced together and the rest of the step stays. A step whose
backward pass is written in another way is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from trainverify.build.tape import BuildError, Tape, Tensor
from trainverify.graph.program import EMPTY, Op, Program
from trainverify.graph.types import TensorType
from trainverify.ops import OPS
from trainverify.ops.table import GRAD, OpError, OpTable
from trainverify.refusal import Refused

# Emits what stands for an op, given its inputs; returns its outputs, under the names that they have in the op.
Fragment = Callable[[Tape, Op, Sequence[Tensor | None]], Sequence[Tensor]]
_PASSES_ON: Final = ("detach", "identity")  # ops that have whatever type they are given


class Unfit(Refused):
    """An approximation that cannot be made of this program."""


def substituted(program: Program, changes: Mapping[int, Fragment], ops: OpTable = OPS, types: Mapping[str, TensorType] = EMPTY) -> Program:
    """The program with other ops in the place of forward ops (by position), backward ops included.

    `types` are the new types of sources; results may have other types too, where only changed ops read them.
    """
    backward = _backward_of(program, changes)
    tensors = {**program.tensors, **types}
    retyped = set(types)
    tapes: dict[int, tuple[Tape, Sequence[Tensor]]] = {}
    made: list[Op] = []
    for index, op in enumerate(program.ops):
        if index in changes:
            tape, outputs = _forward(tensors, op, changes[index], ops)
            tapes[index] = tape, outputs
            retyped |= {o for o in op.outputs if tape.tensors[o] != program.tensors[o]}
            made += tape.ops
            tensors |= {o: tape.tensors[o] for t in tape.ops for o in t.outputs}
        elif index in backward:
            made += _backward(*tapes[backward[index]], program.ops[backward[index]], op, tensors)
        elif retyped.isdisjoint(op.inputs):
            made.append(op)
        elif op.name in _PASSES_ON:
            made.append(op)
            retyped.update(op.outputs)
            tensors |= {op.outputs[0]: tensors[str(op.inputs[0])]}
        else:
            name = next(i for i in op.inputs if i in retyped)
            raise Unfit(f"{name} changes from {program.tensors[str(name)]} to {tensors[str(name)]}, and {op} reads it")
    return replace(program, ops=tuple(made), tensors=tensors)


def _forward(tensors: Mapping[str, TensorType], op: Op, fragment: Fragment, ops: OpTable) -> tuple[Tape, Sequence[Tensor]]:
    """The fragment on a tape that knows all other tensors, so that names are fresh."""
    tape = Tape(op.outputs[0], ops)
    tape.tensors = {n: t for n, t in tensors.items() if n not in op.outputs}
    inputs = [None if i is None else Tensor(i, tensors[i]) for i in op.inputs]
    try:
        outputs = tuple(fragment(tape, op, inputs))
    except (BuildError, OpError) as error:
        raise Unfit(f"{op}: {error}") from error
    assert tuple(t.name for t in outputs) == op.outputs
    tape.ops = [replace(o, source=op.source) for o in tape.ops]
    return tape, outputs


def _backward(tape: Tape, outputs: Sequence[Tensor], op: Op, grad: Op, tensors: dict[str, TensorType]) -> list[Op]:
    """What stands for `grad`, the backward op of `op`: the derivative of what stands for `op`."""
    wanted = [Tensor(str(op.inputs[i]), tensors[str(op.inputs[i])]) for i in grad.get("wrt")]
    seeds = [Tensor(str(g), tensors[str(g)]) for g in grad.inputs[len(op.inputs) :]]
    tape.tensors = {n: t for n, t in tensors.items() if n not in grad.outputs}
    start = len(tape.ops)
    try:
        found = tape.backward(*(outputs[i] for i in grad.get("given", (0,))), seeds=seeds, wrt=wanted)
    except (BuildError, OpError) as error:
        raise Unfit(f"{grad}: {error}") from error
    steps, tape.ops = tape.ops[start:], tape.ops[:start]
    fresh = {o for step in steps for o in step.outputs}
    names: dict[str, str] = {}
    for g, name in zip(found, grad.outputs, strict=True):
        if g.type != tensors[name]:
            raise Unfit(f"{name}: its type would be {g.type} instead of {tensors[name]}")
        if g.name in fresh and g.name not in names:
            names[g.name] = name
        else:
            steps.append(Op("identity", (g.name,), (name,)))
    tensors |= {n: tape.tensors[n] for n in fresh - names.keys()}
    return [replace(_renamed(step, names), phase=grad.phase, source=grad.source) for step in steps]


def _renamed(op: Op, names: Mapping[str, str]) -> Op:
    inputs = tuple(None if i is None else names.get(i, i) for i in op.inputs)
    return replace(op, inputs=inputs, outputs=tuple(names.get(o, o) for o in op.outputs))


def _backward_of(program: Program, changes: Mapping[int, Fragment]) -> dict[int, int]:
    """Backward op → changed forward op, by position; refuses a backward pass that is not the derivative of its forward op."""
    for i in changes:
        if program.ops[i].phase != "forward":
            raise Unfit(f"{program.ops[i]}: computed again outside of the forward pass")
    makers = {program.ops[i].outputs[0]: i for i in changes}
    found: dict[int, int] = {}
    for index, op in enumerate(program.ops):
        of = makers.get(op.forward or "")
        if of is not None and op.phase != "forward":
            if not _derivative(op, program.ops[of]):
                raise Unfit(f"{op} is not the derivative of {program.ops[of]}: this backward pass cannot be changed with it")
            found[index] = of
    if any(op.phase == "backward" for op in program.ops):
        for index in changes.keys() - found.values():
            if _trained(program, index):
                raise Unfit(f"{program.ops[index]}: no op of the backward pass belongs to it, so its gradient cannot be changed with it")
    return found


def _derivative(grad: Op, op: Op) -> bool:
    own = tuple((k, v) for k, v in grad.attrs if k not in ("wrt", "given"))
    return grad.name == op.name + GRAD and grad.inputs[: len(op.inputs)] == op.inputs and own == op.attrs


def _trained(program: Program, index: int) -> bool:
    """Whether an op is computed from a parameter."""
    after = set(program.parameters)
    for op in program.ops[: index + 1]:
        if not after.isdisjoint(op.inputs):
            after.update(op.outputs)
    return program.ops[index].outputs[0] in after
