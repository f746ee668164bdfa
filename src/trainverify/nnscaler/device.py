"""What one device of a plan runs, as a program: its sequence walked in order, every cell done as the run time does it.

Tensors of a micro-batch pass between cells as the sequence says; inside a cell its own tensors are meant. A backward segment
uses what its forward segment had the same number of runs ago. Gradients of a tensor that is used twice in a segment add up;
those of weights add up over the whole step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any

from trainverify.check.findings import Finding, names
from trainverify.graph.program import Domain
from trainverify.nnscaler.dump import OPERATIONS, Cell, Dump, Slice, Step, positions
from trainverify.nnscaler.functions import Call, Unsupported, call_of
from trainverify.nnscaler.writer import Group, Held, Writer
from trainverify.ops.table import GRAD, OpTable


@dataclass
class Ran:
    """A forward operation as it was run."""

    call: Call
    inputs: tuple[str | None, ...]
    outputs: tuple[str, ...]


@dataclass
class Scope:
    """The tensors of one run of a cell, by id."""

    values: dict[int, str] = field(default_factory=dict)
    ran: dict[int, Ran] = field(default_factory=dict)


class Device(Writer, ABC):
    """Builds the program of one plan device, as its replica 0 runs it."""

    def __init__(self, dump: Dump, device: int, table: OpTable):
        super().__init__(dump, device, table)
        self.domains: dict[str, list[Domain]] = {}  # batch tensor of the model → what its uses need
        self.shared: dict[str, tuple[Group, ...]] = {}  # weight → the ranks that a reducer sums its gradient over, in every replica
        self.passed: dict[tuple[int, int, int], str] = {}  # (device, adapter, micro-batch) → its result
        self._weights: dict[int, str] = {}
        self._gradients: dict[str, str] = {}  # weight → gradient accumulated so far
        self._outer: dict[int, str] = {}
        self._micro: dict[int, int] = {}  # tensor between cells → the micro-batch that it is of
        self._reduced: set[str] = set()  # weights whose gradients are summed over all replicas
        self._runs: dict[int, int] = {}  # cell → how often it ran
        self._saved: dict[int, list[Scope]] = {}
        self._samples = 0
        self._same: dict[str, str] = {}  # integer tensor → the one whose elements it has
        forward = (s.cell for s in dump.sequences[device] if s.cell.kind == "IRSegment" and s.cell.isfw)
        self._nodes: dict[int | None, Cell] = {n.cid: n for c in forward for n in c.nodes if n.kind in OPERATIONS}

    def emit(
        self, op: str, inputs: Sequence[str | None], names: Sequence[str], attrs: Mapping[str, Any], forward: str | None = None
    ) -> tuple[str, ...]:
        made = super().emit(op, inputs, names, attrs, forward)
        if len(inputs) == 1 and inputs[0] is not None and self.types[inputs[0]].kind == "int":
            self._same.update({o: inputs[0] for o in made if self.types[o].kind == "int"})
        return made

    # -- tensors ----------------------------------------------------------------------------------------------------------

    def get(self, scope: Scope, t: Slice) -> str:
        """The tensor that a reference means here."""
        found = self.find(scope, t)
        if found is None:
            raise self.broken("TV101", f"nothing on this device has made {t} (tensor {t.tid})")
        return found

    def find(self, scope: Scope, t: Slice) -> str | None:
        if t.tid in scope.values:
            return scope.values[t.tid]
        if t.full.weight:
            scope.values[t.tid] = self.weight(t)
            return scope.values[t.tid]
        if t.full.grad and t.full.loss:  # every rank that has the loss starts from 1
            (seed,) = self.emit("full", (), [t.full.name], {"shape": t.type.shape, "value": 1.0, "dtype": t.type.dtype})
            scope.values[t.tid] = seed
            return seed
        return None

    def weight(self, t: Slice) -> str:
        if t.tid not in self._weights:
            if t.valmap != (0, 1):
                raise self.broken("TV306", f"weight {t} is a summand")
            before, cell, self.prefix, self.cell = self.prefix, self.cell, "", None
            name = self.declare(t.full.name, t.type)
            self.prefix, self.cell = before, cell
            (self.parameters if t.full.param else self.buffers).append(name)
            self.held.append(Held(name, t.full.name, t))
            self._weights[t.tid] = name
        return self._weights[t.tid]

    def accumulate(self, weight: str, gradient: str) -> None:
        """Add to the gradient of a weight."""
        old = self._gradients.get(weight)
        if old is not None:
            (gradient,) = self.emit("add", (old, gradient), [weight + ".grad"], {})
        self._gradients[weight] = gradient

    def put(self, scope: Scope, t: Slice, value: str, cell: Cell) -> None:
        """A gradient that a cell of a backward segment makes: it adds to what is there, unless it comes from it."""
        old = scope.values.get(t.tid)
        if old is not None and all(x.tid != t.tid for x in cell.tensors()):
            (value,) = self.emit("add", (old, value), [t.full.name], {})
        scope.values[t.tid] = value

    # -- the sequence -----------------------------------------------------------------------------------------------------

    def run(self, forward_only: bool = False) -> None:
        for step in self.dump.sequences[self.device]:
            cell = step.cell
            if forward_only and not cell.isfw:
                continue
            count = self._runs.get(cell.cid, 0)
            self._runs[cell.cid] = count + 1
            self.cell, self.micro = cell, count
            self.prefix = f"mb{count}/" if self.dump.microbatches > 1 and cell.kind != "IRWeightReducer" else ""
            self.phase = "forward" if cell.isfw else "backward"
            if cell.kind == "IRDataOperation":
                self.data(step)
            elif cell.kind == "IRWeightReducer":
                self.reducer(cell)
            elif cell.kind == "IRSegment":
                self.segment(step, count)
            elif cell.kind == "IRAdapter":
                scope = self.scope(step)
                self.adapter(cell, scope)
                self.leave(step, scope)
            else:
                raise self.broken("TV104", f"a cell of kind {cell.kind} in a sequence", unsupported=True)
        self.cell, self.prefix, self.phase = None, "", "optimizer"
        if not forward_only:
            self.uneven()

    def uneven(self) -> None:
        """What runs more or less often than it should, and gradients that stay within a replica."""
        for step in {id(s.cell): s for s in self.dump.sequences[self.device]}.values():
            cell = step.cell
            if cell.kind == "IRSegment" and cell.isfw and cell.mirror is not None:
                there, back = self._runs[cell.cid], self._runs.get(cell.mirror, 0)
                if there != back:
                    self.micro = back
                    self.warn("TV403", f"backward segment {cell.mirror} runs {back} times, forward segment {cell.cid} {there} times", cell)
        if self.dump.replicas > 1:
            alone = [w for w in self.parameters if w in self._gradients and w not in self._reduced]
            if alone:
                message = f"device {self.device}: no reducer sums over the {self.dump.replicas} replicas the gradients of {names(alone)}"
                self.warnings.append(Finding("TV404", message, self.device, self._gradients[alone[0]], None, None, "warning"))

    def scope(self, step: Step) -> Scope:
        """What a cell starts with: the tensors that stand for its inputs."""
        scope = Scope()
        for own, given in zip(step.cell.inputs, step.inputs, strict=True):
            if isinstance(own, Slice) and isinstance(given, Slice) and given.tid in self._outer:
                scope.values[own.tid] = self._outer[given.tid]
                if self._micro[given.tid] != self.micro:
                    self.warn("TV401", f"it takes {own.full.name} of micro-batch {self._micro[given.tid]}")
        return scope

    def leave(self, step: Step, scope: Scope) -> None:
        """What a cell leaves behind: tensors that stand for its outputs."""
        for own, given in zip(step.cell.outputs, step.outputs, strict=True):
            if not isinstance(own, Slice) or not isinstance(given, Slice):
                continue
            if own.tid in scope.values:
                self._outer[given.tid] = scope.values[own.tid]
                self._micro[given.tid] = self.micro
            elif not own.full.grad:
                raise self.broken("TV101", f"it makes no {own} (tensor {own.tid})", step.cell)

    def data(self, step: Step) -> None:
        """The next sample of the data loader: the n-th call gets the n-th micro-batch."""
        sample, self._samples = self._samples, self._samples + 1
        if sample >= self.dump.microbatches:
            raise self.broken("TV305", f"it reads sample {sample + 1} of a step with {self.dump.microbatches}")
        for own, given in zip(step.cell.outputs, step.outputs, strict=True):
            if not isinstance(own, Slice) or not isinstance(given, Slice):
                continue
            name = self.declare(own.full.name, own.type)
            self.inputs.append(name)
            self.held.append(Held(name, own.full.name, own, sample))
            self._outer[given.tid] = name
            self._micro[given.tid] = sample

    def segment(self, step: Step, count: int) -> None:
        cell = step.cell
        scope = self.scope(step)
        if cell.isfw:
            for node in cell.nodes:
                self.cell = node
                if node.kind in OPERATIONS:
                    self.forward(node, scope)
                elif node.kind == "IRAdapter":
                    self.adapter(node, scope)
                else:
                    raise self.broken("TV104", f"a cell of kind {node.kind} in a forward segment", unsupported=True)
            self._saved.setdefault(cell.cid, []).append(scope)
        else:
            runs = [] if cell.mirror is None else self._saved.get(cell.mirror, [])
            if count >= len(runs):
                raise self.broken(
                    "TV403", f"backward segment runs for the {count + 1}. time, its forward segment {cell.mirror} ran {len(runs)} times"
                )
            for node in cell.nodes:
                self.cell = node
                if node.kind == "IRBpOperation":
                    self.backward(node, scope, runs[count])
                elif node.kind == "IRAdapter":
                    self.adapter(node, scope)
                else:
                    raise self.broken("TV104", f"a cell of kind {node.kind} in a backward segment", unsupported=True)
        self.cell = cell
        self.leave(step, scope)

    # -- operations -------------------------------------------------------------------------------------------------------

    def forward(self, cell: Cell, scope: Scope) -> None:
        try:
            call = call_of(cell, self.table)
        except Unsupported as error:
            arguments = ", ".join(f"{k}={v!r}" for k, v in cell.kwargs.items() if not isinstance(v, Slice))
            shown = f"{cell.signature}({arguments}) with the annotation {cell.anno or 'none'!r}"
            raise self.broken("TV104", f"{shown}: {error}", unsupported=True) from error
        inputs = tuple(None if t is None else self.get(scope, t) for t in call.tensors)
        results = cell.results()
        outputs = self.emit(call.op, inputs, [t.full.name for t in results], call.attrs)
        for t, name in zip(results, outputs, strict=True):
            self.checked(t, name)
            scope.values[t.tid] = name
        scope.ran[cell.cid] = Ran(call, inputs, outputs)
        self.integers(call, inputs)

    def checked(self, t: Slice, name: str) -> None:
        """The shape that the plan claims is the one that comes out."""
        if self.types[name].shape != t.type.shape and not (self.types[name].shape == () and t.shape == (1,)):
            raise self.broken("TV105", f"{t} has the shape {list(self.types[name].shape)}, the plan says {list(t.shape)}")

    def integers(self, call: Call, inputs: tuple[str | None, ...]) -> None:
        """What integer tensors are used for, back to the batch tensor that they come from."""
        if call.ids is not None:
            at, size = call.ids
            name = inputs[at]
            while name in self._same:
                name = self._same[name]
            held = next((h for h in self.held if h.local == name and h.sample is not None), None)
            if held is not None:
                self.domains.setdefault(held.logical, []).append(Domain("ids", size, call.ignore))

    def backward(self, cell: Cell, scope: Scope, run: Scope) -> None:
        """The derivative of the forward operation; gradients go by tensor id, as nnScaler names them."""
        mirror = self._nodes.get(cell.mirror)
        ran = None if cell.mirror is None else run.ran.get(cell.mirror)
        if ran is None or mirror is None:
            raise self.broken("TV111", f"forward cell {cell.mirror} did not run")
        results = mirror.results()
        incoming: dict[int, list[str]] = {}
        wanted = {t.grad.tid: i for i, t in enumerate(results) if t.grad is not None}
        listed = [t.tid for t in cell.tensors()]
        for t in cell.tensors():
            if t.tid not in wanted:
                raise self.broken("TV111", f"{t} is no gradient of a result of its forward operation")
            value = self.find(scope, t)
            if value is not None:
                incoming.setdefault(wanted[t.tid], []).append(value)
            elif ran.call.op != "multiref":  # a copy that nobody differentiates has no gradient
                raise self.broken("TV101", f"nothing on this device has made {t} (tensor {t.tid})")
        self.order(cell, "takes", listed, [t for t in wanted if t in listed])
        given = {
            i: reduce(lambda a, b: self.emit("add", (a, b), [results[i].full.name + ".grad"], {})[0], vs) for i, vs in incoming.items()
        }
        if not given:
            return
        arguments = {id(t): i for i, t in enumerate(ran.call.tensors) if t is not None}
        places = [(arguments[id(t)], t) for t in mirror.tensors() if id(t) in arguments and t.grad is not None]
        outgoing = {t.tid: t for t in cell.results()}
        targets = [(i, t) for i, t in places if t.grad is not None and t.grad.tid in outgoing]
        missing = set(outgoing) - {t.grad.tid for _, t in targets if t.grad is not None}
        if missing:
            raise self.broken("TV111", f"{outgoing[min(missing)]} is no gradient of an argument of its forward operation")
        self.order(cell, "makes", list(outgoing), [t.grad.tid for _, t in places if t.grad is not None and t.grad.tid in outgoing])
        attrs = {**ran.call.attrs, "wrt": tuple(i for i, _ in targets)}
        known = tuple(sorted(given))
        if known != (0,):
            attrs["given"] = known
        inputs = [*ran.inputs, *(given[i] for i in known)]
        names = [t.grad.full.name for _, t in targets if t.grad is not None]
        made = self.emit(ran.call.op + GRAD, inputs, names, attrs, ran.outputs[0])
        for (_, t), value in zip(targets, made, strict=True):
            assert t.grad is not None
            if t.tid in self._weights:
                self.accumulate(self._weights[t.tid], value)
            else:
                self.put(scope, t.grad, value, cell)

    def order(self, cell: Cell, what: str, listed: list[int], natural: list[int]) -> None:
        if listed != natural and sorted(listed) == sorted(natural):
            self.warn("TV405", f"it {what} gradients in another order than its forward operation; they were told apart by tensor id", cell)
        if len(set(listed)) < len(listed):
            twice = next(t for t in cell.inputs if isinstance(t, Slice) and listed.count(t.tid) > 1)
            self.warn("TV405", f"it {what} {twice} (tensor {twice.tid}) {listed.count(twice.tid)} times", cell)

    # -- communication ----------------------------------------------------------------------------------------------------

    @abstractmethod
    def adapter(self, cell: Cell, scope: Scope) -> None:
        """What a cell that communicates does, prim by prim."""

    def reducer(self, cell: Cell) -> None:
        """Gradients of weights summed over the reducer's ranks."""
        how: dict[str, Any] | None = {
            "sum": {},
            "avg": {"op": "avg"},
            "mean": {"op": "avg"},
            "max": {"op": "max"},
            "min": {"op": "min"},
        }.get(self.dump.reducer)
        if how is None:
            raise self.broken("TV104", f"reducer_op {self.dump.reducer!r}", unsupported=True)
        own = [self.device + k * len(self.dump.devices) for k in range(self.dump.replicas)]
        groups = tuple(positions(cell.scaled.get(rank, scaled(cell.device, self.dump))) for rank in own)
        for rank, members in zip(own, groups, strict=True):
            if rank not in members:
                raise self.broken("TV202", f"rank {rank} is not in its own group {list(members)}")
        for t in sorted(cell.tensors(), key=lambda t: (t.full.name, t.indmap)):
            weight = self._weights.get(t.tid)
            gradient = None if weight is None else self._gradients.get(weight)
            if weight is None or gradient is None:
                raise self.broken("TV307", f"weight {t} has no gradient on this device")
            if any(len(members) > 1 for members in groups):
                (gradient,) = self.emit("all_reduce", (gradient,), [f"{weight}.reduced"], {"group": self.groups_of(groups), **how})
                self._gradients[weight] = gradient
                self.shared[weight] = groups
                self.origin[gradient] = replace(self.origin[gradient], text=f"{self.origin[gradient]} of {t.full.name}")
            if all(rank in members for members in groups for rank in own):
                self._reduced.add(weight)

    # -- the end of the step ----------------------------------------------------------------------------------------------

    def gradients(self) -> dict[str, str]:
        """Weight → gradient, for every trained weight that got one."""
        return {w: self._gradients[w] for w in self.parameters if w in self._gradients}

    def losses(self) -> list[str]:
        """The losses that the step returns on this device, all or none."""
        found = [self._outer.get(t.tid) for t in self.dump.outputs]
        have = [f for f in found if f is not None]
        if have and len(have) < len(found):
            raise self.broken("TV307", f"it has {len(have)} of {len(found)} losses")
        return have


def scaled(devices: Sequence[int], dump: Dump) -> Group:
    """The ranks of a reducer: those devices in all replicas."""
    return tuple(d + k * len(dump.devices) for k in range(dump.replicas) for d in devices)
