"""The program of one device of a plan, as it is written: tensors, ops, groups, and where in the plan each was made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from trainverify.check.findings import Finding
from trainverify.graph.program import Domain, Op, Output, Phase, Program, Source, attributes
from trainverify.graph.types import TensorType
from trainverify.nnscaler.dump import Cell, Dump, Slice, positions
from trainverify.ops.table import OpError, OpTable

Group = tuple[int, ...]


@dataclass(frozen=True)
class Origin:
    """Where in a plan something is made: the cell, its device, the micro-batch; in words too."""

    text: str
    cell: Cell | None
    device: int
    micro: int

    def __str__(self) -> str:
        return self.text


class Broken(Exception):
    """A plan that cannot run, or that we do not understand: the finding says why."""

    def __init__(self, finding: Finding, origin: Origin):
        super().__init__(finding.message)
        self.finding = finding
        self.origin = origin


@dataclass(frozen=True)
class Shard:
    """An equal piece along a dimension: every rank has that of its position in its group. `groups` are those of a device's ranks."""

    dim: int
    groups: tuple[Group, ...]
    own: tuple[int, ...]  # the device's rank in every replica

    @property
    def count(self) -> int:
        return len(self.groups[0])

    def starts(self, size: int) -> tuple[int, ...]:
        """Where the piece of every replica starts, for pieces of this size."""
        return tuple(g.index(rank) * size for g, rank in zip(self.groups, self.own, strict=True))


@dataclass(frozen=True)
class Held:
    """A source of the device's program: what it holds of which tensor of the model, or a shard of that."""

    local: str
    logical: str
    slice: Slice
    sample: int | None = None  # of a batch tensor: which micro-batch
    shard: Shard | None = None


class Writer:
    """Writes the program of one device: `cell`, `micro`, `phase` and `prefix` say what is being written."""

    def __init__(self, dump: Dump, device: int, table: OpTable):
        self.dump = dump
        self.device = device
        self.table = table
        self.ops: list[Op] = []
        self.types: dict[str, TensorType] = {}
        self.held: list[Held] = []
        self.parameters: list[str] = []
        self.buffers: list[str] = []
        self.inputs: list[str] = []
        self.outputs: list[Output] = []
        self.state_domains: dict[str, Domain] = {}
        self.groups: dict[str, tuple[Group, ...]] = {}  # name used in ops → the ranks in every replica
        self.origin: dict[str, Origin] = {}  # tensor → where in the plan it is made
        self.each: dict[tuple[int, str], tuple[int, ...]] = {}  # (number of an op, attribute) → its value in every replica
        self.warnings: list[Finding] = []
        self.phase: Phase = "forward"
        self.prefix = ""
        self.cell: Cell | None = None
        self.micro = 0
        self._names: dict[str, int] = {}

    # -- saying what is wrong -------------------------------------------------------------------------------------------------

    def where(self, cell: Cell | None = None) -> str:
        """A cell in nnScaler's terms."""
        cell = cell or self.cell
        if cell is None:
            return f"device {self.device}"
        micro = f", micro-batch {self.micro}" if self.dump.microbatches > 1 else ""
        module = f", {cell.module}" if cell.module else ""
        return f"{title(cell)} on device {self.device}{micro}{module}"

    def broken(self, code: str, message: str, cell: Cell | None = None, unsupported: bool = False) -> Broken:
        cell = cell or self.cell
        source = None if cell is None else source_of(cell)
        severity = "unsupported" if unsupported else "error"
        finding = Finding(code, f"{self.where(cell)}: {message}", self.device, None, source, None, severity)  # type: ignore[arg-type]
        return Broken(finding, Origin(self.where(cell), cell, self.device, self.micro))

    def warn(self, code: str, message: str, cell: Cell | None = None) -> None:
        cell = cell or self.cell
        source = None if cell is None else source_of(cell)
        self.warnings.append(Finding(code, f"{self.where(cell)}: {message}", self.device, None, source, None, "warning"))

    # -- emitting -------------------------------------------------------------------------------------------------------------

    def fresh(self, base: str) -> str:
        name = self.prefix + base
        n = self._names.get(name)
        if n is None and name not in self.types:
            self._names[name] = 0
            return name
        n = n or 0
        while True:
            n += 1
            if f"{name}.{n}" not in self.types:
                self._names[name] = n
                return f"{name}.{n}"

    def declare(self, base: str, kind: TensorType) -> str:
        name = self.fresh(base)
        self.types[name] = kind
        if self.cell is not None:
            self.origin[name] = Origin(self.where(), self.cell, self.device, self.micro)
        elif self.phase in ("metric", "optimizer"):
            self.origin[name] = Origin(f"the trainer, after the last cell on device {self.device}", None, self.device, 0)
        return name

    def emit(
        self, op: str, inputs: Sequence[str | None], names: Sequence[str], attrs: Mapping[str, Any], forward: str | None = None
    ) -> tuple[str, ...]:
        """Append an op; the types of its results follow from its definition."""
        definition = self.table[op]
        members = 0
        if definition.collective:
            members = len(self.groups[attrs["group"]][0])
        try:
            kinds = tuple(None if i is None else self.types[i] for i in inputs)
            types = self.table.lower(op, dict(attributes(attrs)), kinds, members).types
        except (OpError, TypeError) as error:
            raise self.broken("TV105", str(error)) from error
        if len(types) != len(names):
            raise self.broken("TV105", f"{op} has {len(types)} results, the plan names {len(names)}")
        made = tuple(self.declare(n, t) for n, t in zip(names, types, strict=True))
        self.add(op, inputs, made, attrs, forward)
        return made

    def add(
        self, op: str, inputs: Sequence[str | None], outputs: tuple[str, ...], attrs: Mapping[str, Any], forward: str | None = None
    ) -> None:
        source = None if self.cell is None else source_of(self.cell)
        self.ops.append(Op(op, tuple(inputs), outputs, attributes(attrs), self.phase, forward, source))

    def group(self, ranks: Sequence[int]) -> str:
        """A group within a replica: every replica has its own, at its own ranks."""
        members = positions(ranks)
        if self.device not in members:
            raise self.broken("TV202", f"device {self.device} is not in its own group {list(members)}")
        n = len(self.dump.devices)
        return self.groups_of(tuple(tuple(r + k * n for r in members) for k in range(self.dump.replicas)))

    def groups_of(self, groups: tuple[Group, ...]) -> str:
        name = group_name(groups[0])
        while self.groups.setdefault(name, groups) != groups:  # alike in replica 0, different in another one
            name += "'"
        return name

    def sharded(self, x: str, shard: Shard, name: str) -> str:
        """The rank's own piece of a tensor that its whole group has."""
        size = self.types[x].shape[shard.dim] // shard.count
        starts = shard.starts(size)
        (made,) = self.emit("slice", (x,), [name], {"dim": shard.dim, "start": starts[0], "stop": starts[0] + size})
        at = len(self.ops) - 1
        self.each[at, "start"] = starts
        self.each[at, "stop"] = tuple(s + size for s in starts)
        return made

    def state_of(self, weight: str, slot: str, domain: str | None, shard: Shard | None) -> str:
        """A tensor of the optimizer's for a weight: it lies as the weight does, or is a shard of that."""
        held = next(h for h in self.held if h.local == weight)
        kind = self.types[weight]
        if shard is not None:
            shape = kind.shape
            kind = replace(kind, shape=(*shape[: shard.dim], shape[shard.dim] // shard.count, *shape[shard.dim + 1 :]))
        name = self.declare(f"{weight}.{slot}", kind)
        self.buffers.append(name)
        self.held.append(replace(held, local=name, logical=f"{held.logical}.{slot}", shard=shard))
        if domain is not None:
            self.state_domains[name] = Domain(domain)  # type: ignore[arg-type]
        return name

    def program(self, name: str, domains: Mapping[str, Domain]) -> Program:
        used = {i for op in self.ops for i in op.inputs}
        unused = {n for n in self.inputs if n not in used}
        logical = {h.local: h.logical for h in self.held}
        return Program(
            name,
            {n: t for n, t in self.types.items() if n not in unused},
            tuple(n for n in self.inputs if n in used),
            tuple(self.parameters),
            tuple(self.buffers),
            tuple(self.ops),
            tuple(self.outputs),
            {},
            {n: domains[logical[n]] for n in self.inputs if n in used and logical[n] in domains} | self.state_domains,
        )


def title(cell: Cell) -> str:
    """A cell in nnScaler's terms."""
    if cell.kind == "IRBpOperation":
        return f"backward of cell {cell.mirror}"
    if cell.kind == "IRAdapter":
        kinds = ", ".join(p.kind for p in cell.prims) or "no prims"
        return f"{'forward' if cell.isfw else 'backward'} adapter {cell.cid} ({kinds})"
    return f"cell {cell.cid} ({cell.signature or cell.name})"


def source_of(cell: Cell) -> Source | None:
    file, _, line = cell.comment.rpartition(":")
    return Source(file, int(line)) if file and line.isdigit() else None


def group_name(group: Group) -> str:
    return "ranks " + ",".join(map(str, group))
