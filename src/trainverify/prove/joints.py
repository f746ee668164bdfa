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

from collections.abc import Collection, Mapping, Sequence
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
    held = [(unit, lay.local) for j in joints for lay in j.layouts for unit in system.rows.by_unit(lay.holders(system.plan.mesh))]
    if len(set(held)) < len(held):
        return None
    names, mesh = _Names(system), system.plan.mesh
    moved = {j.logical: names.new(j.logical) for j in joints if j.logical not in system.logical.sources}
    logical, plan = _cut_logical(system.logical, joints, mesh, names, moved), _cut_plan(system, joints, names)
    return Cut(logical, plan, tuple(_moved(o, moved) for o in system.obligations), tuple(_claim(j, mesh) for j in joints))


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
    for unit in system.rows.by_unit(tuple(sorted(ranks))):
        program = system.unit_programs[unit]
        if not set(system.talk.units[unit].ranks) <= ranks or lay.local not in program.tensors or lay.local in program.sources:
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


def _claim(joint: Joint, mesh: Mesh) -> Obligation:
    return Obligation(Output(joint.logical, "declared"), tuple(Holding(lay, lay.holders(mesh)) for lay in joint.layouts))


def _summands(kind: TensorType, lay: Layout, mesh: Mesh) -> TensorType:
    return replace(kind, shape=(*(mesh.length(a) for a in _summed(lay)), *kind.shape))


def _total(joint: Joint, names: _Names) -> Op:
    """What the logical program uses is the sum (or average) of the summands that ranks have."""
    lay = joint.layouts[0]
    name = "mean" if _reductions(lay) == {"avg"} else "sum"
    dims = attributes({"dim": tuple(range(len(_summed(lay))))})
    return Op(name, (names.summands(joint.logical),), (names.new(joint.logical),), dims)


def _cut_logical(program: Program, joints: Sequence[Joint], mesh: Mesh, names: _Names, moved: Mapping[str, str]) -> Program:
    """The logical program with new inputs where ops use the tensors. Those that are no sources become outputs, so that they must have
    a value."""
    tensors, inputs, totals = dict(program.tensors), list(program.inputs), []
    used: dict[int, dict[str, str]] = {}
    for joint in joints:
        kind, new = program.tensors[joint.logical], names.new(joint.logical)
        tensors[new] = kind
        if _summed(joint.layouts[0]):
            given = names.summands(joint.logical)
            tensors[given] = _summands(kind, joint.layouts[0], mesh)
            inputs.append(given)
            totals.append(_total(joint, names))
        else:
            inputs.append(new)
        for at in joint.uses:
            used.setdefault(at, {})[joint.logical] = new
    ops = (*totals, *(_renamed(op, used[at]) if at in used else op for at, op in enumerate(program.ops)))
    outputs = [replace(o, tensor=moved.get(o.tensor, o.tensor)) for o in program.outputs] + [Output(t, "declared") for t in moved]
    return replace(program, tensors=tensors, inputs=tuple(inputs), ops=ops, outputs=tuple(outputs))


def _cut_plan(system: System, joints: Sequence[Joint], names: _Names) -> Plan:
    """The plan with a new input on every rank that holds one of the tensors."""
    mesh, lineage = system.plan.mesh, list(system.plan.lineage)
    held: list[dict[str, int]] = [{} for _ in system.unit_programs]  # of a unit: tensors, and along how many axes they are summands
    for lay in (lay for j in joints for lay in j.layouts):
        assert isinstance(lay.form, Placements)
        axes = _summed(lay)
        if axes:
            shards = tuple((a, Shard(p.dim + len(axes))) for a, p in lay.form.axes if isinstance(p, Shard))
            form = Placements((*((a, Shard(d)) for d, a in enumerate(axes)), *shards))
            lineage.append(Layout(names.summands(lay.logical), names.summands(lay.local), form, lay.where))
        else:
            lineage.append(Layout(names.new(lay.logical), names.new(lay.local), lay.form, lay.where))
        for unit in system.rows.by_unit(lay.holders(mesh)):
            held[unit][lay.local] = len(axes)
    templates = [
        replace(u, program=_with_inputs(p, some, names)) for u, p, some in zip(system.talk.units, system.unit_programs, held, strict=True)
    ]
    return replace(system.plan, templates=tuple(templates), lineage=tuple(lineage), edits=(), functions={})


def _with_inputs(program: Program, held: Mapping[str, int], names: _Names) -> Program:
    """A program of ranks with new inputs in place of tensors that it makes; summands come with dimensions of size 1 before theirs."""
    tensors, inputs, views = dict(program.tensors), list(program.inputs), []
    for tensor, lead in held.items():
        kind, new = program.tensors[tensor], names.new(tensor)
        tensors[new] = kind
        if lead:
            given = names.summands(tensor)
            tensors[given] = replace(kind, shape=(*(1 for _ in range(lead)), *kind.shape))
            views.append(Op("reshape", (given,), (new,), attributes({"shape": kind.shape})))
            inputs.append(given)
        else:
            inputs.append(new)
    names_here = {t: names.new(t) for t in held}
    ops = (*views, *(_renamed(op, names_here) for op in program.ops))
    return replace(program, tensors=tensors, inputs=tuple(inputs), ops=ops)


def _renamed(op: Op, new: Mapping[str, str]) -> Op:
    if not any(i in new for i in op.inputs if i is not None):
        return op
    return replace(op, inputs=tuple(None if i is None else new.get(i, i) for i in op.inputs))
