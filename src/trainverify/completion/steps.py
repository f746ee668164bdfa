"""Several training steps as one: parameters and state pass from each to the next, every step has a batch of its own.

Tensors of the first step keep their names, those of step k are called `step k/NAME`. Losses and metrics of all steps
are reported; gradients, new values and state are those of the last one. The ops `sgd` and `adamw` count on; an optimizer that
is written in other ops is repeated as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Final, overload

from trainverify.build.tape import BuildError
from trainverify.completion.optimizers import SGD, AdamW
from trainverify.graph.gradients import GRADIENT
from trainverify.graph.lineage import Layout
from trainverify.graph.plan import Plan
from trainverify.graph.program import Domain, Op, Output, Program, has_ref
from trainverify.graph.types import TensorType

CARRIED: Final = ("parameter", "state")


@overload
def several_steps(step: Program, steps: int = 2) -> Program: ...


@overload
def several_steps(step: Plan, steps: int = 2) -> Plan: ...


@overload
def several_steps(step: Program | Plan, steps: int = 2) -> Program | Plan: ...


def several_steps(step: Program | Plan, steps: int = 2) -> Program | Plan:
    """A training step, or a plan of one, several times: optimizers count on, and layouts hold in every step."""
    if steps < 1:
        raise BuildError(f"{steps} steps: there must be one or more")
    if steps == 1:
        return step
    return _plan(step, steps) if isinstance(step, Plan) else _program(step, steps)


def _program(step: Program, steps: int) -> Program:
    tensors: dict[str, TensorType] = {}
    domains: dict[str, Domain] = dict(step.domains)
    ops: list[Op] = []
    outputs: list[Output] = []
    inputs: list[str] = []
    now = {n: n for n in (*step.parameters, *step.state)}  # what each parameter and state is by now
    for k in range(steps):
        names = {n: name_in(n, k) for n in step.tensors} | now
        made = {names[n]: t for n, t in step.tensors.items() if names[n] not in now.values()}
        if twice := made.keys() & tensors.keys():
            raise BuildError(f"{step.name}: {min(twice)} is the name of two tensors: it has several steps already")
        tensors |= made | {n: step.tensors[n] for n in now}
        inputs += [names[n] for n in step.inputs]
        domains |= {names[n]: step.domains[n] for n in step.inputs if n in step.domains}
        ops += [_renamed(op, names, k) for op in step.ops]
        last = k == steps - 1
        outputs += [found for o in step.outputs for found in _reported(o, names, k, last)]
        now = now | {str(o.of): names[o.tensor] for o in step.outputs if o.role in CARRIED}
    return replace(step, tensors=tensors, inputs=tuple(inputs), ops=tuple(ops), outputs=tuple(outputs), domains=domains)


def _plan(plan: Plan, steps: int) -> Plan:
    if plan.edits:
        raise BuildError(f"{plan.name}: edits of single ranks count the ops of one step; edit the plan of several steps instead")
    templates = tuple(replace(t, program=_program(t.program, steps)) for t in plan.templates)
    kept = {n for t in plan.templates for n in (*t.program.parameters, *t.program.state)}
    lineage = [lay for k in range(steps) for lay in _layouts(plan.lineage, kept, k, k == steps - 1)]
    return replace(plan, templates=templates, lineage=tuple(lineage))


def name_in(tensor: str, step: int) -> str:
    """What a tensor is called in a step; the first is number 0."""
    return f"step {step + 1}/{tensor}" if step else tensor


def _layouts(lineage: Iterable[Layout], kept: set[str], step: int, last: bool) -> Iterable[Layout]:
    for lay in lineage:
        if lay.logical.startswith(GRADIENT):  # of the last step, as an output of this role prints
            if last:
                yield replace(lay, local=name_in(lay.local, step))
        elif not step:
            yield lay
        elif lay.local not in kept:
            yield replace(lay, logical=name_in(lay.logical, step), local=name_in(lay.local, step))


def _renamed(op: Op, names: Mapping[str, str], step: int) -> Op:
    inputs = tuple(None if i is None else names[i] for i in op.inputs)
    made = replace(op, inputs=inputs, outputs=tuple(names[o] for o in op.outputs), forward=names.get(op.forward or "", op.forward))
    return made.with_attrs(**_counted(op, step)) if step and op.name in (SGD.op, AdamW.op) else made


def _counted(op: Op, step: int) -> dict[str, Any]:
    """Attributes of an optimizer that say which step it is."""
    found: dict[str, Any] = {}
    if op.get("step") is not None:
        if has_ref(op.get("step")):
            raise BuildError(f"{op}: its number of steps differs between ranks")
        found["step"] = op.get("step") + step
    if op.get("first") is True:
        found["first"] = False
    return found


def _reported(o: Output, names: Mapping[str, str], step: int, last: bool) -> Iterable[Output]:
    if last:
        yield replace(o, tensor=names[o.tensor])
    elif o.role in ("loss", "metric"):
        yield Output(names[o.tensor], "metric", f"{'loss' if o.role == 'loss' else o.of} of step {step + 1}")
