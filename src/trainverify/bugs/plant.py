"""Changes that make a plan wrong, as data: which ops by the names of their results, and what becomes of each."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction

from trainverify.graph.plan import Plan, Template
from trainverify.graph.program import Op, Ref, Value
from trainverify.graph.types import TensorType


@dataclass(frozen=True)
class Spot:
    """An op of a plan that is to be changed; `slot` is the result that it was found by."""

    plan: Plan
    template: Template
    op: Op
    slot: int

    @property
    def result(self) -> str:
        return self.op.outputs[self.slot]

    def type_of(self, tensor: str) -> TensorType:
        return self.template.program.tensors[tensor]

    def group(self, axes: Sequence[str]) -> tuple[Value, ...]:
        """Each rank's group along mesh axes."""
        names = {members: name for name, members in self.plan.groups.items()}
        return tuple(names.get(m := self.plan.mesh.group(r, tuple(axes)), f"along.{'.'.join(map(str, m))}") for r in self.template.ranks)


@dataclass(frozen=True)
class Changed:
    """What stands in the place of an op, with what else it needs; `also` are tensors that an explanation may name."""

    ops: tuple[Op, ...]
    tensors: Mapping[str, TensorType] = field(default_factory=dict)
    columns: Mapping[str, tuple[Value, ...]] = field(default_factory=dict)
    groups: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    also: tuple[str, ...] = ()


Change = Callable[[Spot], Changed]


@dataclass(frozen=True)
class Plant:
    """A change of every op with a result of this name (a regular expression), or of the first few of them."""

    at: str
    change: Change
    most: int | None = None


Site = tuple[str, ...]  # tensors by which a change may be named


def planted(plan: Plan, plants: Sequence[Plant]) -> tuple[Plan, tuple[Site, ...]]:
    """The wrong plan, and for every op that was changed the tensors that are wrong there first."""
    sites: list[Site] = []
    for plant in plants:
        left = plant.most
        templates = []
        for template in plan.templates:
            ops: list[Op] = []
            tensors, columns = dict(template.program.tensors), dict(template.bindings)
            for op in template.program.ops:
                slot = next((i for i, o in enumerate(op.outputs) if re.fullmatch(plant.at, o)), None)
                if slot is None or left == 0:
                    ops.append(op)
                    continue
                made = plant.change(Spot(plan, template, op, slot))
                ops += made.ops
                tensors |= made.tensors
                columns |= made.columns
                plan = replace(plan, groups={**plan.groups, **made.groups})
                sites.append((op.outputs[slot], *made.tensors, *made.also))
                left = None if left is None else left - 1
            program = replace(template.program, ops=tuple(ops), tensors=tensors)
            templates.append(replace(template, program=program, bindings=columns))
        plan = replace(plan, templates=tuple(templates))
    return plan, tuple(dict.fromkeys(sites))


def _copy(op: Op, given: str, made: str) -> Op:
    return Op("identity", (given,), (made,), (), op.phase, op.forward, op.source)


# -- changes ----------------------------------------------------------------------------------------------------------------


def left_out(spot: Spot) -> Changed:
    """The op does nothing: its result is its first input."""
    given = str(spot.op.inputs[0])
    return Changed((_copy(spot.op, given, spot.result),), also=(given,))


def twice(spot: Spot) -> Changed:
    """The op is applied to its own result."""
    once = f"{spot.result}.once"
    first, second = replace(spot.op, outputs=(once,)), replace(spot.op, inputs=(once, *spot.op.inputs[1:]))
    return Changed((first, second), {once: spot.type_of(spot.result)})


def with_attrs(**attrs: Value) -> Change:
    return lambda spot: Changed((spot.op.with_attrs(**attrs),))


def scaled(factor: Fraction | int) -> Change:
    """The result has a factor."""

    def change(spot: Spot) -> Changed:
        plain = f"{spot.result}.plain"
        op = replace(spot.op, outputs=tuple(plain if o == spot.result else o for o in spot.op.outputs))
        times = Op("mul", (plain,), (spot.result,), (("value", factor),), spot.op.phase, None, spot.op.source)
        return Changed((op, times), {plain: spot.type_of(spot.result)})

    return change


def also_over(*axes: str) -> Change:
    """The result is summed over ranks once more."""

    def change(spot: Spot) -> Changed:
        plain, key = f"{spot.result}.before", f"also.{'+'.join(axes)}"
        op = replace(spot.op, outputs=tuple(plain if o == spot.result else o for o in spot.op.outputs))
        more = Op("all_reduce", (plain,), (spot.result,), (("group", Ref(key)),), spot.op.phase, None, spot.op.source)
        column = spot.group(axes)
        return Changed((op, more), {plain: spot.type_of(spot.result)}, {key: column}, _groups(spot, axes, column))

    return change


def over(*axes: str) -> Change:
    """The collective runs over other ranks."""

    def change(spot: Spot) -> Changed:
        key, column = f"over.{'+'.join(axes)}", spot.group(axes)
        return Changed((spot.op.with_attrs(group=Ref(key)),), {}, {key: column}, _groups(spot, axes, column))

    return change


def _groups(spot: Spot, axes: Sequence[str], column: Sequence[Value]) -> dict[str, tuple[int, ...]]:
    members = (spot.plan.mesh.group(r, tuple(axes)) for r in spot.template.ranks)
    return {str(name): m for name, m in zip(column, members, strict=True)}


def in_reverse(spot: Spot) -> Changed:
    """The group lists its ranks from the last to the first."""
    group = spot.op.get("group")
    column = spot.template.bindings[group.name] if isinstance(group, Ref) else (group,) * len(spot.template.ranks)
    names = tuple(f"{name}.reversed" for name in column)
    groups = {new: tuple(reversed(spot.plan.groups[str(old)])) for new, old in zip(names, column, strict=True)}
    return Changed((spot.op.with_attrs(group=Ref("reversed")),), {}, {"reversed": names}, groups)


def reading(slot: int, name: str, within: str | None = None) -> Change:
    """Another tensor is read: one of this name, or of the old one's with `within` (a regular expression) replaced by it."""

    def change(spot: Spot) -> Changed:
        old = str(spot.op.inputs[slot])
        new = name if within is None else re.sub(within, name, old)
        if new == old or new not in spot.template.program.tensors:
            raise ValueError(f"{spot.op}: no tensor {new!r} to read in place of {old!r}")
        return Changed((replace(spot.op, inputs=(*spot.op.inputs[:slot], new, *spot.op.inputs[slot + 1 :])),))

    return change


def also_reading(name: str) -> Change:
    """One more tensor is read."""
    return lambda spot: Changed((replace(spot.op, inputs=(*spot.op.inputs, name)),))


def not_reading(name: str) -> Change:
    return lambda spot: Changed((replace(spot.op, inputs=tuple(i for i in spot.op.inputs if i != name)),))


def only(slot: int) -> Change:
    """A sum of which one term is left."""
    return lambda spot: Changed((_copy(spot.op, str(spot.op.inputs[slot]), spot.result),))


def once_more(slot: int) -> Change:
    """A sum to which one term is added again."""

    def change(spot: Spot) -> Changed:
        sum_ = f"{spot.result}.sum"
        term = str(spot.op.inputs[slot])
        again = Op("add", (sum_, term), (spot.result,), (), spot.op.phase, None, spot.op.source)
        return Changed((replace(spot.op, outputs=(sum_,)), again), {sum_: spot.type_of(spot.result)})

    return change


def other_ranks(*names: str) -> Change:
    """What ranks differ in, from the last rank to the first."""

    def change(spot: Spot) -> Changed:
        refs = {n: v for n in names if isinstance(v := spot.op.get(n), Ref)}
        columns = {f"{n}.turned": tuple(reversed(spot.template.bindings[v.name])) for n, v in refs.items()}
        return Changed((spot.op.with_attrs(**{n: Ref(f"{n}.turned") for n in refs}),), {}, columns)

    return change


def first_rank(*names: str) -> Change:
    """What ranks differ in, as on the first rank."""
    return lambda spot: Changed((spot.op.with_attrs(**{n: min(spot.template.bindings[spot.op.get(n).name]) for n in names}),))  # type: ignore[type-var]


def stays(spot: Spot) -> Changed:
    """A parameter keeps its old value; state is updated."""
    unused = f"{spot.result}.unused"
    op = replace(spot.op, outputs=(unused, *spot.op.outputs[1:]))
    return Changed((op, _copy(spot.op, str(spot.op.inputs[0]), spot.result)), {unused: spot.type_of(spot.result)})


def too_early(spot: Spot) -> Changed:
    """Of the sum of two micro-batches only the first is reduced; the second is added after it."""
    made = {o: op for op in spot.template.program.ops for o in op.outputs}
    first, second = made[str(spot.op.inputs[0])].inputs
    early = f"{spot.result}.early"
    reduced = replace(spot.op, inputs=(first,), outputs=(early,))
    rest = Op("add", (early, second), (spot.result,), (), spot.op.phase, None, spot.op.source)
    return Changed((reduced, rest), {early: spot.type_of(spot.result)})
