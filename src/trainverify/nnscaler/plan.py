"""From a dump to our program or plan: devices that run alike share a template, replicas always do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from trainverify.build.tape import BuildError
from trainverify.check.findings import Finding
from trainverify.completion.step import Accumulate, complete
from trainverify.files.errors import FileError
from trainverify.graph.lineage import Layout, Part, Parts, Pattern, Run
from trainverify.graph.mesh import Mesh
from trainverify.graph.plan import Plan, Template
from trainverify.graph.program import Domain, Op, Output, Program, Ref, Value
from trainverify.nnscaler.adapters import RankDevice
from trainverify.nnscaler.claims import claims
from trainverify.nnscaler.device import Device, scaled
from trainverify.nnscaler.dump import COMPLEX, Dump
from trainverify.nnscaler.finish import finish
from trainverify.nnscaler.trainer import PLAIN, Trainer
from trainverify.nnscaler.writer import Held, Origin, group_name
from trainverify.ops.table import OpTable


@dataclass(frozen=True)
class Translated:
    """A plan, with what is to be said about it: warnings, and where in nnScaler's plan a tensor of a rank comes from."""

    plan: Plan
    warnings: tuple[Finding, ...]
    origins: Mapping[int, Mapping[str, Origin]]  # device → tensor → cell
    devices: int
    passed: Mapping[tuple[int, int, int], str]  # (device, adapter, micro-batch) → the tensor that is its result
    rows: Mapping[str, int]  # batch tensor → rows that all ranks and micro-batches read together

    def origin(self, rank: int, tensor: str) -> str | None:
        found = self.origins.get(rank % self.devices, {}).get(tensor)
        return None if found is None else f"{found} (rank {rank} is device {rank % self.devices} of replica {rank // self.devices})"


def program(dump: Dump, table: OpTable, trainer: Trainer = PLAIN, batches: int = 1) -> Program:
    """The logical program: the forward pass of a plan on a single device, differentiated.

    With several batches the step is so many of them, their losses added up (averaged, if that is the trainer's correction).
    """
    if dump.ranks != 1 or dump.microbatches != 1:
        what = f"{dump.ranks} ranks and {dump.microbatches} micro-batches"
        raise FileError(dump.path, "runtime_ndevs", f"{what}: the logical program is a plan for one device and one batch")
    d = RankDevice(dump, 0, table)
    d.run(forward_only=True)
    losses = d.losses()
    if len(losses) != 1:
        raise FileError(dump.path, "execplan_outputs", f"the plan returns {len(losses)} losses, expected one")
    d.outputs.append(Output(losses[0], "loss"))
    forward = d.program(dump.name, _domains([d]))
    try:
        how: Accumulate = "mean" if trainer.correction == "mean" else "sum"
        step = complete(forward, trainer.optimizer, microbatches=batches, accumulate=how, clip=trainer.clip, ops=table)
    except BuildError as error:
        raise FileError(dump.path, "execplan", str(error)) from error
    lines = {op.source for op in forward.ops}  # other lines are those of whoever called this
    return replace(step, ops=tuple(op if op.source in lines else replace(op, source=None) for op in step.ops))


def plan(dump: Dump, table: OpTable, trainer: Trainer = PLAIN) -> Translated:
    """The plan of all ranks."""
    devices = []
    for number in dump.devices:
        d = RankDevice(dump, number, table)
        d.run()
        devices.append(d)
    tensor = _width(devices)
    mesh = Mesh(dp=dump.replicas, pp=len(devices) // tensor, tp=tensor)
    finish(devices, trainer, tensor)
    domains = _domains(devices)
    programs = [d.program(f"device {d.device}", domains) for d in devices]
    groups = {group_name(g): g for d in devices for gs in d.groups.values() for g in gs}
    kinds: dict[Any, list[int]] = {}
    for d, p in zip(devices, programs, strict=True):
        kinds.setdefault(_skeleton(p, d), []).append(d.device)
    templates = [_template([programs[i] for i in found], [devices[i] for i in found], dump) for found in kinds.values()]
    lineage = tuple(_lineage(dump, devices, programs, mesh))
    warnings = (*(w for d in devices for w in d.warnings), *_unlike(devices, programs, tensor), *claims(dump))
    result = Plan(dump.name, mesh, tuple(templates), groups, lineage)
    each = {h.logical: h.slice.shape[0] for d in devices for h in d.held if h.sample is not None and h.slice.shape}
    rows = {name: n * dump.replicas * dump.microbatches for name, n in each.items()}
    passed = {place: tensor for d in devices for place, tensor in d.passed.items()}
    return Translated(result, warnings, {d.device: d.origin for d in devices}, len(devices), passed, rows)


def _unlike(devices: Sequence[Device], programs: Sequence[Program], width: int) -> Iterator[Finding]:
    """Neighbours that should run alike and do not: the first op in which they differ."""
    for i in range(0, len(devices), width):
        for j in range(i + 1, i + width):
            a, b = programs[i], programs[j]
            pairs = zip(a.ops, b.ops, strict=False)
            for x, y in pairs:
                alike = (x.name, x.inputs, x.outputs) == (y.name, y.inputs, y.outputs)
                if not alike or [(k, _shape_of(v)) for k, v in x.attrs if k != "group"] != [
                    (k, _shape_of(v)) for k, v in y.attrs if k != "group"
                ]:
                    at = devices[i].origin.get(x.outputs[0]) if x.outputs else None
                    message = f"devices {i} and {j} differ: {x} on device {i}, {y} on device {j}" + (f" ({at})" if at else "")
                    yield Finding("TV406", message, i, x.outputs[0] if x.outputs else None, x.source, None, "warning")
                    break


# -- templates ----------------------------------------------------------------------------------------------------------


def _loose(value: Value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _shape_of(value: Value) -> Any:
    if isinstance(value, tuple):
        return ("t", *(_shape_of(v) for v in value))
    return "*" if _loose(value) else (type(value).__name__, repr(value))


def _attr_shape(key: str, value: Value, d: Device) -> Any:
    return tuple(len(g) for g in d.groups[str(value)]) if key == "group" else _shape_of(value)


def _skeleton(p: Program, d: Device) -> Any:
    """What devices must have in common to share a template: all but integers, ranks and source lines."""
    ops = tuple((o.name, o.inputs, o.outputs, o.phase, o.forward, tuple((k, _attr_shape(k, v, d)) for k, v in o.attrs)) for o in p.ops)
    return p.inputs, p.parameters, p.state, p.outputs, tuple(sorted((n, str(t)) for n, t in p.tensors.items())), ops


def _width(devices: Sequence[Device]) -> int:
    """How many neighbouring devices run the same program: the largest number for which half of all neighbourhoods do."""
    shapes = [_skeleton(d.program("", {}), d) for d in devices]
    numbers: dict[Any, int] = {}
    kinds = [numbers.setdefault(s, len(numbers)) for s in shapes]
    for width in range(len(devices), 1, -1):
        if len(devices) % width == 0:
            blocks = [kinds[i : i + width] for i in range(0, len(devices), width)]
            if 2 * sum(len(set(b)) == 1 for b in blocks) >= len(blocks):
                return width
    return 1


def _template(programs: Sequence[Program], devices: Sequence[Device], dump: Dump) -> Template:
    """One program for the same devices of all replicas; what differs becomes a column over ranks."""
    n = len(dump.devices)
    places = [(k, i) for k in range(dump.replicas) for i in range(len(devices))]
    ranks = tuple(devices[i].device + k * n for k, i in places)
    columns: dict[tuple[Value, ...], str] = {}

    def column(values: tuple[Value, ...]) -> Value:
        if all(v == values[0] for v in values):
            return values[0]
        return Ref(columns.setdefault(values, f"rank.{len(columns)}"))

    def join(values: Sequence[Value]) -> Value:
        if isinstance(values[0], tuple):
            items = [v for v in values if isinstance(v, tuple)]
            return tuple(join([v[j] for v in items]) for j in range(len(values[0])))
        return column(tuple(values[i] for _, i in places))

    def attr(key: str, values: Sequence[Value], at: int) -> Value:
        if (at, key) in devices[0].each:
            return column(tuple(devices[i].each[at, key][k] for k, i in places))
        if key == "group":
            return column(tuple(group_name(devices[i].groups[str(values[i])][k]) for k, i in places))
        if key in ("peer", "root"):
            return column(tuple(int(values[i]) + k * n for k, i in places))  # type: ignore[arg-type]
        return join(values)

    ops: list[Op] = []
    for at, same in enumerate(zip(*(p.ops for p in programs), strict=True)):
        attrs = tuple((key, attr(key, [o.attrs[j][1] for o in same], at)) for j, (key, _) in enumerate(same[0].attrs))
        ops.append(replace(same[0], attrs=attrs))
    program = replace(programs[0], ops=tuple(ops))
    if len(devices) > 1:
        program = replace(program, name=f"devices {', '.join(str(d.device) for d in devices)}")
    return Template(program, ranks, {name: values for values, name in columns.items()})


# -- lineage ------------------------------------------------------------------------------------------------------------


def _domains(devices: Sequence[Device]) -> dict[str, Domain]:
    """What integer inputs are assumed to hold: what every use of them can take."""
    found: dict[str, list[Domain]] = {}
    for d in devices:
        for name, uses in d.domains.items():
            found.setdefault(name, []).extend(uses)
    result = {}
    for name, uses in found.items():
        ignored = {u.ignore for u in uses}
        result[name] = Domain("ids", min(u.size or 0 for u in uses), ignored.pop() if len(ignored) == 1 else None)
    return result


def _lineage(dump: Dump, devices: Sequence[Device], programs: Sequence[Program], mesh: Mesh) -> Iterator[Layout]:
    """How batch, weights and state lie on the mesh, stage by stage. Where ranks of a stage differ by a formula it is used."""
    width = mesh.length("tp")
    for stage in range(mesh.length("pp")):
        block = devices[stage * width : (stage + 1) * width]
        sources = [set(programs[d.device].sources) for d in block]
        names = list(dict.fromkeys(h.local for d, s in zip(block, sources, strict=True) for h in d.held if h.local in s))
        held = [{h.local: h for h in d.held} for d in block]
        for name in names:
            holders = [(t, here[name]) for t, here in enumerate(held) if name in here and name in sources[t]]
            first = holders[0][1]
            if len(holders) == width and all((h.logical, h.sample) == (first.logical, first.sample) for _, h in holders):
                form = _pattern([h for _, h in holders], dump, [d.device for d in block])
                if form is not None:
                    yield Layout(first.logical, name, form, (("pp", stage),))
                    continue
            for t, h in holders:
                alone = _pattern([h], dump, [block[t].device])
                if alone is not None:
                    yield Layout(h.logical, name, alone, (("pp", stage), ("tp", t)))
                else:
                    ranks = mesh.ranks(pp=stage, tp=t)
                    yield Layout(h.logical, name, Parts(tuple((r, (_part(h, k),)) for k, r in enumerate(ranks))))


def _part(held: Held, replica: int) -> Part:
    """What a device holds in a replica, as a region."""
    region = list(held.slice.indmap)
    if held.shard is not None:
        dim = held.shard.dim
        size = (region[dim][1] - region[dim][0]) // held.shard.count
        start = region[dim][0] + held.shard.starts(size)[replica]
        region[dim] = (start, start + size)
    return Part((0,) * len(region), tuple(Run(a, b - a) for a, b in region))


def _axes(held: Sequence[Held], dump: Dump, devices: Sequence[int]) -> str | None:
    """The mesh axes that shards are cut along; None if groups do not run along whole axes."""
    for text, members in (("dp", [[d] for d in devices]), ("dp tp", [devices] * len(devices))):
        if all(h.shard is not None and set(h.shard.groups) == {scaled(found, dump)} for h, found in zip(held, members, strict=True)):
            return text
    return None


def _pattern(held: Sequence[Held], dump: Dump, devices: Sequence[int]) -> Pattern | None:
    """One formula for what the ranks of a stage (or of some of its devices) hold, in order of `tp`; None if there is none."""
    dims: list[str] = []
    fixed: list[tuple[str, int, int]] = []
    first = held[0]
    along = None
    if any(h.shard is not None for h in held):
        along = _axes(held, dump, devices)
        if along is None or any(h.shard is None or first.shard is None or h.shard.dim != first.shard.dim for h in held):
            return None
    if first.sample is not None:
        fixed.append(("mb", first.sample, dump.microbatches))
    for d, size in enumerate(first.slice.full.shape):
        pieces = [h.slice.indmap[d] for h in held]
        length = pieces[0][1] - pieces[0][0]
        name = f"d{d}"
        if first.sample is not None and d == 0:
            name = f"dp mb {name}"
        if first.shard is not None and first.shard.dim == d:
            name = f"{along} {name}"
        if any(b - a != length for a, b in pieces):
            return None
        if len(set(pieces)) > 1:
            if [a for a, _ in pieces] != [i * length for i in range(len(held))] or length * len(held) != size:
                return None
            name = f"tp {name}"
        elif length != size:
            if size % length or pieces[0][0] % length:
                return None
            fixed.append((f"cut{d}", pieces[0][0] // length, size // length))
            name = f"cut{d} {name}"
        dims.append(f"({name})" if " " in name else name)
    if first.slice.full.dtype in COMPLEX:
        dims.append("complex")
    return Pattern(" ".join(dims), tuple(fixed))
