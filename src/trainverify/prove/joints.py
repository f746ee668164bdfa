"""Both programs cut at logical tensors that local tensors are shown to be. Trusted.

A *joint* is a logical tensor X with local tensors T that hold it as layouts say. The logical program uses a new input X' in place
of X, and the ranks use inputs T' that hold X' as T holds X. That T holds X is a claim, to be shown with everything else. X and X' have
axes of their own, so that FSDP may cut the rows of a weight into shards where it lives, and attention into heads where it is used.

What holds for every X' holds for X' = X. There every T' is T, since T is made of tensors T' that ranks made before it, and the claims
hold for these. So the given programs are the cut ones at one choice of the new inputs. Checked here, for that to be true:

- X is a number wherever the outputs of the logical program are (`strict.py`): X' is any number, and never infinite.
- No rank has a copy of another's summand where the sum (or average) of summands is X: only the sum is shown, and copies might
  differ. The new inputs are any summands, and X' is their sum.
- A rank that gets a T' makes T, and is among those of which the claim says that T holds X.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from trainverify.axes.system import System
from trainverify.graph.lineage import Layout, Partial, Placements, Shard
from trainverify.graph.mesh import Mesh
from trainverify.graph.obligations import Holding, Obligation
from trainverify.graph.plan import Plan
from trainverify.graph.program import Op, Output, Program, attributes
from trainverify.graph.types import TensorType
from trainverify.prove.strict import Step, Strict


@dataclass(frozen=True)
class Joint:
    """A logical tensor, how local tensors hold it, and which ops of the logical program use the new input.

    An output that is the tensor becomes the new input, unless the tensor is a source."""

    logical: str
    layouts: tuple[Layout, ...]
    uses: frozenset[int]


@dataclass(frozen=True)
class Cut:
    """Both programs cut at joints: what was to be shown before, in the same order, and what is to be shown of the joints."""

    logical: Program
    plan: Plan
    wanted: tuple[Obligation, ...]
    claims: tuple[Obligation, ...]


def cut(system: System, joints: Sequence[Joint]) -> Cut | None:
    """The programs of a system cut at joints; None if one of them does not allow it."""
    finite = _finite(system)
    if not joints or len({j.logical for j in joints}) < len(joints) or not all(_allowed(system, j, finite) for j in joints):
        return None
    held = [(unit, lay.local) for j in joints for lay in j.layouts for unit in system.units_of(lay.holders(system.plan.mesh))]
    if len(set(held)) < len(held):
        return None
    logical, plan, names = system.logical, _inlined(system), _Names(system)
    moved: dict[str, str] = {}
    for joint in joints:
        logical, plan = _cut_logical(logical, joint, plan.mesh, names), _cut_plan(system, plan, joint, names)
        if joint.logical not in logical.sources:
            moved[joint.logical] = names.new(joint.logical)
    logical = replace(logical, ops=(*(op for j in joints for op in _totals(j, names)), *logical.ops))
    return Cut(logical, plan, tuple(_moved(o, moved) for o in system.obligations), tuple(_claim(j, plan.mesh) for j in joints))


class _Names:
    """New names, which no tensor has."""

    def __init__(self, system: System):
        self.end = "'"
        while any(t.endswith((self.end, f"{self.end}s")) for p in (system.logical, *system.unit_programs) for t in p.tensors):
            self.end += "'"

    def new(self, name: str) -> str:
        """What is used in place of a tensor."""
        return f"{name}{self.end}"

    def summands(self, name: str) -> str:
        """What that is the sum of, or what a rank has of them."""
        return f"{name}{self.end}s"


def _moved(o: Obligation, moved: Mapping[str, str]) -> Obligation:
    """An output of the logical program, by what stands for it."""
    new = moved.get(o.output.tensor)
    if new is None or o.output.role == "declared":
        return o
    return Obligation(replace(o.output, tensor=new), tuple(replace(h, layout=replace(h.layout, logical=new)) for h in o.holdings))


def _finite(system: System) -> set[str]:
    """Tensors of the logical program that are finite wherever its outputs are."""
    lowered = [system.logical_ops[n][0].lowered for n in range(len(system.logical.ops))]
    steps = [Step(op.inputs, op.outputs, x.outputs) for op, x in zip(system.logical.ops, lowered, strict=True)]
    return Strict([o.tensor for o in system.logical.outputs], steps).tensors | set(system.logical.sources)


def _allowed(system: System, joint: Joint, finite: Collection[str]) -> bool:
    kind = system.logical.tensors.get(joint.logical)
    if kind is None or kind.kind != "real" or joint.logical in system.logical.domains or joint.logical not in finite:
        return False
    summed = [lay for lay in joint.layouts if _summed(lay)]
    if not joint.layouts or (summed and len(joint.layouts) > 1):
        return False
    return all(lay.logical == joint.logical and _held(system, lay, kind.shape) for lay in joint.layouts)


def _held(system: System, lay: Layout, shape: tuple[int, ...]) -> bool:
    """Whether every rank of a program that gets a new input makes the tensor of the claim, in its shape; summands have one rank each."""
    mesh, form, ranks = system.plan.mesh, lay.form, set(lay.holders(system.plan.mesh))
    if not isinstance(form, Placements) or not ranks or {a for a, _ in form.axes} & {a for a, _ in lay.where}:
        return False
    divided = {a for a, p in form.axes if isinstance(p, Shard | Partial)} | {a for a, _ in lay.where}
    if _summed(lay) and (len(_reductions(lay)) > 1 or not all(a in divided or n == 1 for a, n in mesh.axes)):
        return False
    for unit in system.units_of(tuple(sorted(ranks))):
        program = system.unit_programs[unit]
        if not set(system.talk.units[unit].ranks) <= ranks or not any(lay.local in op.outputs for op in program.ops):
            return False
        if program.tensors[lay.local].kind != "real":
            return False
        for rank in system.talk.units[unit].ranks:
            (part,) = lay.parts(mesh, rank, shape)
            if tuple(run.size for run in part.logical) != program.tensors[lay.local].shape:
                return False
    return True


def _summed(lay: Layout) -> tuple[str, ...]:
    """The mesh axes along which local tensors are summands."""
    return tuple(a for a, p in lay.form.axes if isinstance(p, Partial)) if isinstance(lay.form, Placements) else ()


def _reductions(lay: Layout) -> set[str]:
    return {p.op for _, p in lay.form.axes if isinstance(p, Partial)} if isinstance(lay.form, Placements) else set()


def _inlined(system: System) -> Plan:
    units = [replace(u, program=p) for u, p in zip(system.talk.units, system.unit_programs, strict=True)]
    return replace(system.plan, templates=tuple(units), edits=(), functions={})


def _claim(joint: Joint, mesh: Mesh) -> Obligation:
    return Obligation(Output(joint.logical, "declared"), tuple(Holding(lay, lay.holders(mesh)) for lay in joint.layouts))


def _summands(kind: TensorType, lay: Layout, mesh: Mesh) -> TensorType:
    return replace(kind, shape=(*(mesh.length(a) for a in _summed(lay)), *kind.shape))


def _totals(joint: Joint, names: _Names) -> Iterable[Op]:
    """What the logical program uses is the sum (or average) of the summands that ranks have."""
    axes = _summed(joint.layouts[0])
    if axes:
        name = "mean" if _reductions(joint.layouts[0]) == {"avg"} else "sum"
        yield Op(name, (names.summands(joint.logical),), (names.new(joint.logical),), attributes({"dim": tuple(range(len(axes)))}))


def _cut_logical(program: Program, joint: Joint, mesh: Mesh, names: _Names) -> Program:
    """The logical program with a new input where ops use the tensor; the tensor itself becomes an output, so that it must have a value."""
    kind, new = program.tensors[joint.logical], names.new(joint.logical)
    tensors = {**program.tensors, new: kind}
    given = new
    if _summed(joint.layouts[0]):
        given = names.summands(joint.logical)
        tensors[given] = _summands(kind, joint.layouts[0], mesh)
    ops = tuple(_renamed(op, joint.logical, new) if at in joint.uses else op for at, op in enumerate(program.ops))
    outputs = program.outputs
    if joint.logical not in program.sources:
        outputs = (*(replace(o, tensor=new) if o.tensor == joint.logical else o for o in outputs), Output(joint.logical, "declared"))
    return replace(program, tensors=tensors, inputs=(*program.inputs, given), ops=ops, outputs=outputs)


def _cut_plan(system: System, plan: Plan, joint: Joint, names: _Names) -> Plan:
    """The plan with a new input on every rank that holds the tensor."""
    lineage, templates = list(plan.lineage), list(plan.templates)
    for lay in joint.layouts:
        assert isinstance(lay.form, Placements)
        axes = _summed(lay)
        new = names.new(lay.local)
        if axes:
            shards = tuple((a, Shard(p.dim + len(axes))) for a, p in lay.form.axes if isinstance(p, Shard))
            form = Placements((*((a, Shard(d)) for d, a in enumerate(axes)), *shards))
            lineage.append(Layout(names.summands(joint.logical), names.summands(lay.local), form, lay.where))
        else:
            lineage.append(Layout(names.new(joint.logical), new, lay.form, lay.where))
        for unit in system.units_of(lay.holders(plan.mesh)):
            program = templates[unit].program
            kind = program.tensors[lay.local]
            ops = tuple(_renamed(op, lay.local, new) for op in program.ops)
            tensors, given = {**program.tensors, new: kind}, new
            if axes:
                given = names.summands(lay.local)
                tensors[given] = replace(kind, shape=(*(1 for _ in axes), *kind.shape))
                ops = (Op("reshape", (given,), (new,), attributes({"shape": kind.shape})), *ops)
            changed = replace(program, tensors=tensors, inputs=(*program.inputs, given), ops=ops)
            templates[unit] = replace(templates[unit], program=changed)
    return replace(plan, templates=tuple(templates), lineage=tuple(lineage))


def _renamed(op: Op, old: str, new: str) -> Op:
    return replace(op, inputs=tuple(new if i == old else i for i in op.inputs)) if old in op.inputs else op
