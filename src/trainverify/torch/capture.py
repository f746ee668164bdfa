"""One process, one rank: run the user's code on fake tensors and write down the step as a program."""

from __future__ import annotations

import contextlib
import time
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
import torch

from trainverify.check.findings import Finding
from trainverify.evaluate.run import sample
from trainverify.graph.mesh import Mesh
from trainverify.graph.program import Domain, Output, Program
from trainverify.graph.types import TensorType
from trainverify.ops.table import OpTable
from trainverify.torch import kinds, remains
from trainverify.torch.beside import Beside
from trainverify.torch.boundary import Watched
from trainverify.torch.buffers import in_order
from trainverify.torch.captured import Captured, Steps, compared_name, condition_name
from trainverify.torch.chance import generators
from trainverify.torch.collectives import REDUCED, Talk
from trainverify.torch.constants import is_table, numbers_of
from trainverify.torch.cuda import CPU, Fake
from trainverify.torch.discover import Found, Named, NotSupported, counted, flat_copies, kept, owner_of, search, structure
from trainverify.torch.environment import launched, patch, start_group
from trainverify.torch.functional import Functional
from trainverify.torch.inputs import Batch, Ids, Input, lies, local_shape
from trainverify.torch.lines import Lines
from trainverify.torch.mappings import Row
from trainverify.torch.mappings.table import plain
from trainverify.torch.placed import Described, described, local
from trainverify.torch.private import DataDependentOutputException, DynamicOutputShapeException, _disable_current_modes
from trainverify.torch.reading import COMPUTED, Reader
from trainverify.torch.record import Recorder
from trainverify.torch.reported import losses, plain_numbers
from trainverify.torch.starts import ASSUMED, starts_of
from trainverify.torch.states import After, Outputs, Started
from trainverify.torch.translate import Translator, type_of
from trainverify.torch.values import DTYPES, ReadsData, Unknown, Value
from trainverify.translate.signs import Signs

STEPS: Final = 3  # that are captured, one after the other, in one process
IDLE: Final = "in step {} a rate of an optimizer is 0: what acts through it alone is not compared there"
SUMMED: Final = "{} starts with what ranks were reduced to before the step, which is not compared with what the reference starts with"
LATER: Final = "later steps do what the third one does"
Ways = tuple[Sequence[bool], ...]  # for every step, the ways to take at its conditions on data


class Session:
    """The capture of one rank (or of the reference, whose rank is None)."""

    def __init__(
        self,
        batch: Batch,
        mesh: Mesh,
        rank: int | None,
        table: OpTable,
        meanings: Mapping[str, Row] | None = None,
        accept: bool = False,
        device: str = CPU,
        changing: Collection[str] = (),
    ):
        self.batch, self.mesh, self.rank, self.device = batch, mesh, rank, device
        self.changing = changing  # buffers that a step changes, though they follow from constants when they are built
        self.lines = Lines()
        self.translator = Translator(self.lines.here, table, meanings)
        self.talk = Talk(self.translator, rank or 0)
        self.assumed = self.talk.assumed
        self.reader = Reader(self.translator, accept)
        self.beside = Beside()
        self.recorder = Recorder(self.translator, Functional(self.talk), self.beside)
        self.now = Started()
        self.by_hand: set[str] = set()  # tensors kept by hand that the step before left as outputs; then those that this one does
        self.number = 0  # of the step
        self.adapted = False  # an adapter says what there is
        self.nonnegative: set[str] = set()  # state that is not negative when the step begins

    # -- before the step ------------------------------------------------------------------------------------------------

    def begin(self, found: Found, inputs: Mapping[str, torch.Tensor] | None = None, choices: Sequence[bool] = ()) -> None:
        """A step starts: everything it starts from becomes a source. Without `inputs` the batch is made as it is described."""
        self.number += 1
        if self.number > 1:
            self.talk.renew()
        elif self.translator.boundary.chance is not None:
            self.translator.boundary.chance.begin()
            kinds.install(self.translator.boundary.assume)
        self.reader.renew(choices)
        self.talk.batch = 0
        self.now = Started()
        for module in found.modules.values():
            self.lines.name_modules(module)
        self.now.named, names = kept(found)
        self.now.structure = structure(found, self.number == STEPS)
        self.now.copies = flat_copies(found)
        self.now.said = dict(found.placed)
        for optimizer in found.optimizers:
            for group in optimizer.param_groups:
                self.now.trained.update(names[id(p)] for p in group["params"] if id(p) in names)
                self.now.trained.update(c.name for p in group["params"] for c in self.now.copies.get(id(p), ()))
            self.now.counts |= dict(counted(optimizer, names, self.now.copies))
        self.now.said |= _inherited(found, self.now.named)
        self.now.shapes = {n: place["shape"] for n, place in found.held.items() if "shape" in place}
        self.now.by_tensor = names
        made = {n: self._input(n) for n in self.batch} if inputs is None else inputs
        t = self.translator
        for n in self.now.named:  # memory that is known already counts as older than the step
            t.keep(local(n.tensor))
        t.begin()
        t.emitter.apart = found.apart
        t.emitter.reserved = {n.name for n in self.now.named}
        self._sources(made)
        t.memory.left_reads.clear()  # what was read to find out what there is, the step did not read
        t.memory.old_reads.clear()
        assert t.step is not None
        t.step.generators = generators()
        self._runs(True)

    def _runs(self, step: bool) -> None:
        if (chance := self.translator.boundary.chance) is not None:
            chance.within = step

    def _input(self, name: str) -> torch.Tensor:
        spec = self.batch[name]
        shape = spec.shape if self.rank is None else local_shape(name, spec, self.mesh, self.rank)
        if self.translator.real:
            return drawn(name, spec, self.mesh, self.rank)
        return torch.empty(shape, dtype=getattr(torch, spec.dtype), device=self.device)

    def given(self, made: Mapping[str, torch.Tensor]) -> None:
        """Tensors of the batch are sources from here on."""
        t = self.translator
        for name, tensor in made.items():
            t.emitter.declare(name, type_of(tensor))
            t.define(tensor, name)
            if isinstance(spec := self.batch.get(name), Ids):
                t.emitter.ids.spreads[name] = spec.spread
                t.emitter.nonnegative |= {name} if spec.spread[0][0] >= 0 else set()
                t.emitter.bounds[name] = int(spec.spread[0][0]), int(spec.spread[-1][1])
            self.now.inputs[name] = tensor

    def _sources(self, made: Mapping[str, torch.Tensor]) -> None:
        t = self.translator
        assert t.step is not None
        self.given(made)
        for name, tensor in self.now.counts.items():
            value = t.known(tensor)
            if value is not None:
                self._number(name, tensor, value)
        seen: dict[Any, str] = {}
        kept = []
        initial: dict[str, str] = {}  # what parameters held when they were built → their names
        values: dict[str, str] = {}  # and by name
        for n in self.now.named:
            here = local(n.tensor)
            if n.by_hand and n.kind == "state":
                continue
            if here.numel() == 0 and n.kind == "state" and n.of is None:
                continue
            key = _where(t, here)
            if key in seen and here.numel():
                self.now.by_tensor[id(n.tensor)] = self.now.tied[n.name] = seen[key]
                continue
            if n.counts and (value := t.known(here)) is not None:
                self._number(n.name, here, value)
                continue
            if n.buffer is not None and isinstance(value := t.read_parts(here), str) and self._follows(n, value):
                self.now.made[n.name] = value
                self.talk.ledger.made.add(n.name)
                t.step.tables.add(in_order(t.emitter, value))
                t.step.sources.setdefault(t.keep(here), n.name)
                continue  # computed from constants when the model is built: ranks may compute it differently, so no two are assumed equal
            if here.is_complex():
                raise NotSupported(f"{n.name} is complex, and not computed from constants when the model is built: {t.read_parts(here)}")
            if n.buffer is not None and self.number == 1:
                self.assumed.append(f"buffer {n.name} holds before the step what the reference's does")
            seen[key] = n.name
            value = self._start(here) if self.number == 1 else None
            if isinstance(value, Unknown) and value.reason == REDUCED and not self.adapted:
                t.boundary.note(SUMMED.format(n.name), value.source)
            if isinstance(value, str):
                if n.kind == "state":
                    self._not_negative({n.name: value}, set())
                values[n.name] = value
                if not t.emitter.is_constant(value):
                    initial.setdefault(value, n.name)
            t.emitter.declare(n.name, type_of(here))
            t.define(here, n.name)
            kept.append(n)
        if self.number == 1:
            self.talk.ledger.starts = starts_of(t.emitter, values, t.notes.initial, self.talk.received, self.adapted)
            if initial:
                self.talk.assume(ASSUMED)
            t.settle(initial)
        self.now.named = [*kept, *self._by_hand()]
        self._left()
        if self.adapted and self.number == 1:
            t.padding = t.memory.constants_beside(t.step.sources)
            if t.padding:
                self.assumed.append("memory beside the parameters of flat buffers holds after a step what it held when they were built")

    def _start(self, here: torch.Tensor) -> Value:
        """What a tensor holds before the first step; random numbers have a name."""
        value = self.translator.read(here)
        return self.translator.initial(here, value) if isinstance(value, Unknown) and value.drawn is not None else value

    def _follows(self, buffer: Named, value: str) -> bool:
        """Whether a buffer is what it is computed as: one that is made anew with the model, or a table that no step changes."""
        e = self.translator.emitter
        if not e.is_constant(value):
            return False
        if buffer.buffer == "made":
            return True
        if buffer.name in self.changing or not is_table(e, value):
            return False
        self.now.tables.add(buffer.name)
        self.talk.assume(f"buffer {buffer.name}, which no captured step changes, holds what it is computed as when the model is built")
        return True

    def _by_hand(self) -> Iterator[Named]:
        """Tensors kept by hand that the step before left are sources. The first step has their values, where these follow from constants
        and parameters; what never had a value has none."""
        t = self.translator
        assert t.step is not None
        for n in self.now.named:
            here = local(n.tensor)
            if not n.by_hand or n.kind != "state" or str(here.dtype) not in DTYPES:
                continue
            if n.name in self.by_hand:
                t.emitter.declare(n.name, type_of(here))
                t.define(here, n.name)
                yield n
            elif t.known(here) is not None or isinstance(t.read(here), str):
                t.step.sources.setdefault(t.keep(here), n.name)

    def _left(self) -> None:
        """Gradients that the step before left are sources: whether this one uses them shows."""
        t = self.translator
        for n in self._of_kind("parameter"):
            grad = n.tensor.grad
            if grad is not None and isinstance(t.read(local(grad)), Unknown) and f"{n.name}.grad" not in t.emitter.tensors:
                here = local(grad)
                name = t.emitter.declare(f"{n.name}.grad", type_of(here))
                t.define(here, name)
                self.now.left[name] = Named(name, grad, "state", of=n.name)

    def _number(self, name: str, t: torch.Tensor, value: torch.Tensor) -> None:
        """A small tensor that lives from step to step and is followed as a number: compared by name."""
        assert self.translator.step is not None
        self.translator.step.numbered[self.translator.keep(t)] = name
        self.now.numbers[name] = _values(value)

    # -- during the step --------------------------------------------------------------------------------------------------

    def note_gradients(self, optimizer: Any) -> None:
        """What an optimizer is about to use is the final gradient."""
        for group in owner_of(optimizer).param_groups:
            lr = group.get("lr")
            if isinstance(lr, torch.Tensor) and (known := self.translator.known(lr)) is not None:
                lr = plain(known)
            if isinstance(lr, float | int) and lr == 0 and IDLE.format(self.number) not in self.assumed:
                self.assumed.append(IDLE.format(self.number))
            for p in group["params"]:
                name = self.now.by_tensor.get(id(p))
                if p.grad is None:
                    continue
                if name is not None:
                    self.now.stepped[name] = optimizer
                    self.note_gradient(name, p.grad)
                for c in self.now.copies.get(id(p), ()):
                    self.note_gradient(c.name, c.within(p.grad))

    def note_gradient(self, name: str, grad: torch.Tensor) -> None:
        self.translator.emitter.place = self.lines.here()
        self.now.used.setdefault(name, self.translator.emitter.place.source)
        if name in self.now.shapes:
            grad = grad.view(self.now.shapes[name])
        self.now.gradients.setdefault(name, (self.translator.read(local(grad)), grad))

    # -- after the step ---------------------------------------------------------------------------------------------------

    def finish(self, returned: Any, name: str, found: Found) -> Captured:
        """The program of the step. `found` is what there is after it: the next step starts with that."""
        t = self.translator
        self._runs(False)
        t.emitter.place = self.lines.here()
        carried = remains.carried(t, self.rank)
        made = Outputs(t, self.rank, {*self.now.inputs, *t.emitter.masks, *self.now.left, *(n.name for n in self.now.named)})
        metrics = self._metrics(returned, made)
        assumed = list(t.notes.read_values)
        assumed += [f"{b.name} is {b.taken} (accepted, not captured the other way)" for b in self.reader.accepted]
        self._gradients(made)
        for key, metric in metrics.items():
            made.add(metric, "metric", key, key)
        after = After(found)
        tables = self._tables(after)
        changes = self._changed(after)
        self._updates(made, after, changes)
        self.talk.lost()
        self._numbers(made, after)
        program, left = self._program(name, made, after)
        t.boundary.multiplied(t.emitter.by_zero(program.ops), self.number == STEPS)
        placed = self._placed()
        for n, grad in self.now.left.items():
            if (place := described(grad.tensor) or self.now.said.get(f"gradient of {grad.of}")) is not None:
                placed[n] = place
        return Captured(
            program,
            self.rank,
            {g.name: g.members for g in self.talk.groups.values()},
            placed,
            {n.name: list(n.tensor.shape) for n in self.now.named},
            self._findings(made, found, carried),
            [
                *self.assumed,
                *t.boundary.assumed,
                *assumed,
                *self.beside.said(),
                *(f"{n} means what the given function computes ({checked})" for n, checked in t.meant.ops.items()),
            ],
            dict(t.missing),
            dict(t.calls),
            t.literals.merged(),
            self.talk.unused,
            ledger=self.talk.ledger,
            branches=list(self.reader.branches),
            chosen=list(t.notes.read_values),
            used=self.now.used,
            structure=changes,
            left=left,
            by_hand=tuple(n.name for n in self.now.named if n.by_hand),
            tables=tables,
        )

    def _findings(self, made: Outputs, found: Found, carried: Sequence[Finding]) -> list[Finding]:
        t = self.translator
        return [
            *remains.early(t, self.rank),
            *self.talk.findings,
            *made.problems,
            *remains.poisoned(t, self.rank),
            *remains.strays(t, self.rank),
            *carried,
            *remains.unfound(self.now.stepped, found, self.rank),
            *remains.drawn(t, self.rank),
            *t.boundary.findings(self.rank),
        ]

    def _tables(self, after: After) -> dict[str, bool]:
        """Buffers of checkpoints that were taken for tables of constants, and whether the step changes them."""
        there = after.tensors
        return {n: n not in there or not self._as_made(n, local(there[n].tensor)) for n in self.now.tables}

    def _as_made(self, name: str, now: torch.Tensor) -> bool:
        """Whether a table of constants is still what it was computed as."""
        e, value, before = self.translator.emitter, self.translator.read_parts(now), str(self.now.made[name])
        if not isinstance(value, str) or e.shape(value) != e.shape(before):
            return False
        return e.fingerprint(in_order(e, value)) == e.fingerprint(in_order(e, before))

    def _of_kind(self, kind: str) -> list[Named]:
        return [n for n in self.now.named if n.kind == kind]

    def _metrics(self, returned: Any, made: Outputs) -> dict[str, Value]:
        """All that the step returns but the loss, and the conditions on data."""
        self.talk.ledger.reported = plain_numbers(returned)
        metrics: dict[str, Value] = {}
        for key, value in losses(returned).items():
            read = self.translator.read_written(local(value))
            place = described(value)
            if place is not None and any(p != "replicate" for _, p in place["axes"]):
                raise NotSupported(f"{key} is a DTensor that no rank has whole ({place['axes']}): return loss.full_tensor()")
            if key == "loss":
                made.add(read, "loss", None, key)
            else:
                metrics[key] = read
        for i, branch in enumerate(self.reader.branches):
            metrics[condition_name(i)] = self.translator.emitter.cast(branch.condition, "f32")
            if branch.of is not None:
                metrics[compared_name(i)] = branch.of
        return metrics

    def _placed(self) -> dict[str, Described]:
        """How all that is kept lies, and gradients."""
        placed = {n.name: place for n in self.now.named if (place := described(n.tensor) or self.now.said.get(n.name)) is not None}
        for n in self._of_kind("parameter"):
            if n.name in self.now.gradients:
                place = described(self.now.gradients[n.name][1]) or self.now.said.get(f"gradient of {n.name}")
                if place is not None and n.name in self.now.compared:
                    placed[f"gradient of {n.name}"] = place
        return placed

    def _gradients(self, made: Outputs) -> None:
        """Gradients as outputs."""
        parameters = self._of_kind("parameter")
        for n in parameters:
            if n.name not in self.now.gradients and n.tensor.grad is not None and not self._is_zero(n.tensor.grad):
                self.note_gradient(n.name, n.tensor.grad)
        for n in parameters:
            if (
                n.name in self.now.gradients
                and made.add(self.now.gradients[n.name][0], "gradient", n.name, f"gradient of {n.name}") is not None
            ):
                self.now.compared.add(n.name)

    def _is_zero(self, grad: torch.Tensor) -> bool:
        """Whether a gradient was set to zero: another step may as well have none."""
        e, value = self.translator.emitter, self.translator.read(local(grad))
        return isinstance(value, str) and e.is_constant(value) and not any(numbers_of(e, value) or (1.0,))

    def _changed(self, after: After) -> dict[str, str]:
        """What decides on the next step besides values, as far as this one changed it."""
        now = structure(after.found, self.number == STEPS)
        before = self.now.structure
        found = {k: f"{before.get(k)} → {now.get(k)}" for k in (*before, *now) if before.get(k) != now.get(k)}
        known = {*(n.name for n in self.now.named), *self.now.tied, *self.now.numbers, *self.now.made}
        found |= {n: "gone" for n in known if n not in after.tensors and n not in after.counts}
        t = self.translator
        for name, first in self.now.tied.items():
            one, other = after.tensors.get(name), after.tensors.get(first)
            if one is not None and other is not None and _where(t, local(one.tensor)) != _where(t, local(other.tensor)):
                found[name] = f"no longer {first}"
        return found

    def _updates(self, made: Outputs, after: After, changes: Mapping[str, str]) -> None:
        """New values under the names that the next step starts with: what has a name now, whatever memory it had before."""
        t, parameters = self.translator, self._of_kind("parameter")

        def now(n: Named) -> torch.Tensor:
            return local(after.tensors[n.name].tensor)

        there = {n.name for n in self.now.named if n.name in after.tensors}
        self.by_hand = {n.name for n in self.now.named if n.by_hand and n.kind == "state" and n.name in there}
        if self.now.trained or any(t.read(now(n)) != n.name for n in parameters if n.name in there):  # by an optimizer, or by hand
            for n in parameters:
                if n.name in there:
                    made.add(t.read_written(now(n)), "parameter", n.name, f"updated parameter {n.name}")
        for n in self._of_kind("state"):
            if n.name in there:
                made.add(t.read_written(now(n)), "state", n.name, f"updated state {n.name}")
        self._created(made, after, changes)

    def _created(self, made: Outputs, after: After, changes: Mapping[str, str]) -> None:
        """State that is there only since this step, or that was computed from constants before it: compared as if it had been there."""
        t = self.translator
        known = {*(n.name for n in self.now.named), *self.now.tied, *self.now.numbers, *self.now.made}
        for name, n in after.tensors.items():
            here = local(n.tensor)
            new = name not in known or name in changes or (name in self.now.made and not self._as_made(name, here))
            if not new or name in {x.name for x in self.now.named} or not here.numel() or str(here.dtype) not in DTYPES:
                continue
            if (n.counts or n.by_hand) and t.known(here) is not None:
                continue
            value = t.read_written(here)
            if (n.buffer == "made" or n.by_hand) and isinstance(value, str) and t.emitter.is_constant(value):
                continue
            if n.by_hand:
                if isinstance(value, Unknown):
                    continue  # nor has the next step a value
                self.by_hand.add(name)
            t.emitter.declare(name, type_of(here))
            self.now.named.append(replace(n, kind="state"))
            self.now.said |= _inherited(after.found, [n])
            made.add(value, "state", name, f"new state {name}")

    def _not_negative(self, values: Mapping[str, Value], assumed: Collection[str]) -> None:
        """Note which of some values are never negative, given that `assumed` sources are not."""
        signs = Signs(self.translator.emitter, assumed.__contains__)
        real = {n: v for n, v in values.items() if isinstance(v, str) and self.translator.emitter.kind(v) == "real"}
        self.nonnegative |= {n for n, v in real.items() if signs.never_negative(v)}

    def _invariant(self, outputs: Sequence[Output]) -> set[str]:
        """State that is not negative before the step, and therefore not after it; the next step starts with what is not negative then.

        A running mean of squares is such a state, whatever its name and its optimizer's are."""
        before = {n.name for n in self._of_kind("state")} & self.nonnegative
        values: dict[str, Value] = {str(o.of): o.tensor for o in outputs if o.role == "state"}
        while True:
            self.nonnegative = set()
            self._not_negative(values, before)
            kept = before & self.nonnegative
            if kept == before:
                return before
            before = kept

    def _numbers(self, made: Outputs, after: After) -> None:
        """Small tensors that are followed as numbers, after the step."""
        for name, before in self.now.numbers.items():
            found = after.counts.get(name)
            if found is None:
                found = after.tensors[name].tensor if name in after.tensors else None
            if found is None:
                continue  # gone: compared as such
            value = self.translator.known(local(found))
            if value is None:
                self.talk.ledger.lost.append(name)
                made.problem(name, f"{name}, which is an integer, is computed from data", self.translator.emitter.place.source)
            else:
                self.talk.ledger.numbers[name] = before, _values(value)

    def _program(self, name: str, made: Outputs, after: After) -> tuple[Program, list[str]]:
        """The program, and the gradients of the step before that it uses."""
        emitter, parameters, states = self.translator.emitter, self._of_kind("parameter"), self._of_kind("state")
        domains: dict[str, Domain] = {k: d for k, s in self.batch.items() if (d := s.domain) is not None}
        domains |= {n: Domain("nonnegative") for n in (*(n.name for n in states if n.nonnegative), *self._invariant(made.outputs))}
        domains |= {n: Domain("indicator") for n in emitter.masks}
        inputs = (*self.now.inputs, *emitter.masks)
        left: list[str] = []
        while True:
            kept = (*(n.name for n in states), *left)
            program = emitter.program(name, inputs, tuple(n.name for n in parameters), kept, made.outputs, domains)
            used = {i for op in program.ops for i in op.inputs} | {o.tensor for o in program.outputs}
            more = [n for n in self.now.left if n in used and n not in left]
            if not more:
                return program, left
            left += more
            for n in more:
                owner = after.tensors.get(str(self.now.left[n].of))
                grad = None if owner is None else owner.tensor.grad
                if grad is not None:
                    made.add(self.translator.read_written(local(grad)), "state", n, f"gradient left by the step, {n}")


def _where(t: Translator, here: torch.Tensor) -> tuple[Any, ...]:
    """The memory of a tensor."""
    return t.keep(here), here.storage_offset(), tuple(here.shape)


def _inherited(found: Found, named: Sequence[Named]) -> dict[str, Described]:
    """How gradients and states lie, as an adapter says it of their parameters."""
    copies = {c.name: c.place for c in found.copies}
    said = {**found.placed, **found.held, **{n: {k: v for k, v in place.items() if k != "of"} for n, place in copies.items()}}
    states = {n.name: said[n.of] for n in named if n.of in said}
    return {**copies, **states, **{f"gradient of {p}": place for p, place in said.items()}}


def drawn(name: str, spec: Input, mesh: Mesh, rank: int | None) -> torch.Tensor:
    """Random values of a batch tensor: the rank's part of those that the reference gets."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    kind = "bool" if spec.dtype == "bool" else "int" if isinstance(spec, Ids) else "real"
    whole = sample(rng, kind, spec.shape, spec.domain)
    if rank is not None:
        (part,) = lies(name, spec).parts(mesh, rank, spec.shape)
        whole = whole[np.ix_(*(run.positions() for run in part.logical))]
    with _disable_current_modes():
        return torch.from_numpy(np.array(whole)).to(getattr(torch, spec.dtype))


def _values(value: torch.Tensor) -> tuple[float, ...]:
    with _disable_current_modes():
        return tuple(float(v) for v in value.reshape(-1).tolist())


class LaterStep(Exception):
    """A step after the first that cannot be captured: there is no verdict."""


def capture(
    resolved: Callable[[], Callable[..., Any]],
    batch: Batch,
    mesh: Mesh,
    rank: int | None,
    world: int,
    table: OpTable,
    meanings: Mapping[str, Row] | None = None,
    name: str = "step",
    choices: Ways = ((),) * STEPS,
    accept: bool = False,
    store: str | None = None,
    device: str = CPU,
    changing: Collection[str] = (),
) -> Steps:
    """The programs of one rank's first steps; `resolved` gives a function that builds it and returns its step.

    With a `store` tensors are real, and ranks talk by gloo through that file."""
    began = time.process_time()
    torch.set_num_threads(1)
    torch.autograd.set_multithreading_enabled(False)
    gpus = None if device == CPU else Fake(1 if rank is None else world)
    if gpus is not None:
        gpus.install()
    launched(rank, world)
    build = resolved()
    session = Session(batch, mesh, rank, table, meanings, accept, device, changing)
    if store is None:
        session.reader.install()
    else:
        session.translator.real = True
        session.reader.install_real()
        torch.manual_seed(0)
    patch(session.talk, session.assumed, gpus)
    kinds.install(session.translator.boundary.assume)
    session.lines.wrappers.install()
    if rank is not None:
        start_group(session.talk, rank, world, store=store)
    elif getattr(build, "grouped", False):
        launched(0, 1)
        start_group(session.talk, 0, 1, store=None if store is None else f"{store}.alone")
    handles = session.lines.hooks()
    fake = session.translator.stand_ins.mode = None if store is not None else Watched(session.translator.boundary)
    steps: list[Captured] = []
    with fake or contextlib.nullcontext(), session.recorder:
        step = build() if rank is None else build(rank, world)
        for way in choices:
            steps.append(_captured(session, step, way, name, steps))
    for h in handles:
        h.remove()
    steps[0].seconds = time.process_time() - began
    for made in {id(s): s for s in steps}.values():
        made.findings[:] = remains.waited_later(made.findings, session.talk.late)
    return tuple(steps)


def _captured(session: Session, step: Callable[..., Any], way: Sequence[bool], name: str, before: Sequence[Captured]) -> Captured:
    """The next step; the same object as the one before if it is the same program with the same numbers."""
    given = getattr(step, "found", None)  # an adapter says where the parameters are

    session.adapted = isinstance(given, Found)

    def found() -> Found:
        return given if isinstance(given, Found) else search(step)

    try:
        session.begin(found(), None, way)
        with optimizer_hooks(session):
            returned = step(dict(session.now.inputs))
        made = session.finish(returned, name, found())
    except Exception as error:
        if (why := _needs_values(error)) is not None:
            raise ReadsData(why).with_traceback(error.__traceback__) from error
        if not before:
            raise
        raise LaterStep(f"step {len(before) + 1} cannot be captured: {type(error).__name__}: {error}") from error
    return before[-1] if before and made == before[-1] else made


def _needs_values(error: Exception) -> str | None:
    """Why an error is one of a capture, where nothing has a value; None of any other."""
    if isinstance(error, DynamicOutputShapeException | DataDependentOutputException):
        return f"{error}: what it gives, or its size, depends on data"
    if isinstance(error, ValueError) and COMPUTED in str(error):
        return f"text of a computed number is read as a number: {error}"
    return None


class optimizer_hooks:  # noqa: N801 (a context manager)
    """Around every `optimizer.step()`: note gradients before, and mark ops as the optimizer's."""

    def __init__(self, session: Session):
        self.session = session

    def __enter__(self) -> None:
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

        def before(optimizer: Any, args: Any, kwargs: Any) -> None:
            self.session.note_gradients(optimizer)
            self.session.lines.optimizing = True

        def after(optimizer: Any, args: Any, kwargs: Any) -> None:
            self.session.lines.optimizing = False

        self.handles = [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]

    def __exit__(self, *args: object) -> None:
        for h in self.handles:
            h.remove()


__all__ = ["Captured", "ReadsData", "Session", "TensorType", "capture"]
