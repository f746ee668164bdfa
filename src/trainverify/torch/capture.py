"""One process, one rank: run the user's code on fake tensors and write down the step as a program."""

from __future__ import annotations

import contextlib
import functools
import random
import time
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes

from trainverify.check.findings import Finding
from trainverify.evaluate.run import sample
from trainverify.graph.mesh import Mesh
from trainverify.graph.program import Domain, Output, Program, Source
from trainverify.graph.types import TensorType
from trainverify.ops.table import OpTable
from trainverify.torch.agreement import Ledger
from trainverify.torch.collectives import Talk
from trainverify.torch.discover import STEPS_TAKEN, Copy, Found, Named, NotSupported, counted, flat_copies, kept, search, tensors_of
from trainverify.torch.environment import patch, start_group
from trainverify.torch.functional import Functional
from trainverify.torch.inputs import Batch, Ids, Input, lies, local_shape
from trainverify.torch.lines import Lines
from trainverify.torch.mappings import Row
from trainverify.torch.placed import Described, described, local
from trainverify.torch.reading import Branch, Reader
from trainverify.torch.record import Recorder
from trainverify.torch.remembered import CUT, Held, changed, snapshot
from trainverify.torch.translate import Missing, Translator, type_of, view_of
from trainverify.torch.values import ReadsData, Unknown, Value

LEFT: Final = "is what the step before left there"
UNWATCHED: Final = "later steps do what this one does: of Python objects that hold something from step to step, not all are watched"


@dataclass
class Captured:
    """A rank's program, and what is known about it besides."""

    program: Program
    rank: int | None
    groups: dict[str, tuple[int, ...]] = field(default_factory=dict)
    placed: dict[str, Described] = field(default_factory=dict)  # source, or output of a gradient → how it lies
    shapes: dict[str, list[int]] = field(default_factory=dict)  # state → the shape of its parameter
    findings: list[Finding] = field(default_factory=list)
    assumed: list[str] = field(default_factory=list)
    missing: dict[str, Missing] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)
    merged: list[str] = field(default_factory=list)
    unused: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)  # of a DDP group: parameters that this rank did not use
    seconds: float = 0.0
    ledger: Ledger = field(default_factory=Ledger)
    branches: list[Branch] = field(default_factory=list)  # conditions on data, and the ways that were taken
    chosen: list[str] = field(default_factory=list)  # what a run on real tensors read
    used: dict[str, Source | None] = field(default_factory=dict)  # parameter → where its gradient is used
    remembered: list[str] = field(default_factory=list)  # where Python objects hold something else after the step
    clears: bool = True  # whether the step clears gradients itself


def condition_name(i: int) -> str:
    """Of the output that a condition on data is compared as."""
    return f"condition {i + 1}"


def compared_name(i: int) -> str:
    """Of the output that the number is compared as that a condition is a function of."""
    return f"number of condition {i + 1}"


def is_condition(metric: str | None, count: int) -> bool:
    """Whether a metric is one of the first conditions on data, or the number that it is a function of."""
    return metric in {n for i in range(count) for n in (condition_name(i), compared_name(i))}


class Outputs:
    """What a step leaves behind, as outputs of its program; what has no meaning is a problem."""

    def __init__(self, translator: Translator, rank: int | None, sources: Collection[str]):
        self.translator, self.rank, self.sources = translator, rank, sources
        self.outputs: list[Output] = []
        self.problems: list[Finding] = []

    def add(self, tensor: Value, role: Any, of: str | None, what: str) -> str | None:
        emitter = self.translator.emitter
        if isinstance(tensor, Unknown):
            if tensor.pending is None:
                self.problem(of, f"{what}: {tensor.reason}", tensor.source)
            else:
                self.translator.early.append((tensor, emitter.place.source))
            return None
        if tensor in self.sources:
            tensor = emitter.op("identity", (tensor,), label=f"{of}.unchanged")
        self.outputs.append(Output(tensor, role, of))
        return tensor

    def problem(self, of: str | None, why: str, source: Source | None) -> None:
        self.problems.append(Finding("TV504", why, self.rank, of, source, None, "unsupported"))


class Session:
    """The capture of one rank (or of the reference, whose rank is None)."""

    def __init__(
        self,
        batch: Batch,
        mesh: Mesh,
        rank: int | None,
        table: OpTable,
        meanings: Mapping[str, Row] | None = None,
        choices: Sequence[bool] = (),
        accept: bool = False,
    ):
        self.batch, self.mesh, self.rank = batch, mesh, rank
        self.lines = Lines()
        self.translator = Translator(self.lines.here, table, meanings)
        self.talk = Talk(self.translator, rank or 0)
        self.assumed = self.talk.assumed
        self.reader = Reader(self.translator, choices, accept)
        self.recorder = Recorder(self.translator, Functional(self.talk))
        self.gradients: dict[str, tuple[Value, torch.Tensor]] = {}
        self.used: dict[str, Source | None] = {}
        self.named: list[Named] = []
        self.by_tensor: dict[int, str] = {}
        self.copies: dict[int, list[Copy]] = {}
        self.said: dict[str, Described] = {}  # how tensors lie of which an adapter says it
        self.shapes: dict[str, list[int]] = {}  # of gradients that an optimizer holds in another shape
        self.inputs: dict[str, torch.Tensor] = {}
        self.trained: set[str] = set()
        self.counts: dict[str, torch.Tensor] = {}  # steps that optimizers count, by parameter
        self.numbers: dict[str, tuple[torch.Tensor, tuple[float, ...]]] = {}  # small known tensors, and their values before the step

    # -- before the step ------------------------------------------------------------------------------------------------

    def begin(self, found: Found, inputs: Mapping[str, torch.Tensor] | None = None) -> None:
        """The step starts: everything it starts from becomes a source. Without `inputs` the batch is made as it is described."""
        for module in found.modules.values():
            self.lines.name_modules(module)
        self.named, names = kept(found)
        self.copies = flat_copies(found)
        self.translator.emitter.apart = found.apart
        self.said = dict(found.placed)
        for optimizer in found.optimizers:
            for group in optimizer.param_groups:
                self.trained.update(names[id(p)] for p in group["params"] if id(p) in names)
                self.trained.update(c.name for p in group["params"] for c in self.copies.get(id(p), ()))
            self.counts |= dict(counted(optimizer, names, self.copies))
        self.said |= _inherited(found, self.named)
        self.shapes = {n: place["shape"] for n, place in found.held.items() if "shape" in place}
        self.by_tensor = names
        made = {n: self._input(n) for n in self.batch} if inputs is None else inputs
        t = self.translator
        for n in self.named:  # memory that is known already counts as older than the step
            t.keep(local(n.tensor))
        t.begin()
        self._sources(made)
        assert t.step is not None
        t.step.generators = generators()

    def _input(self, name: str) -> torch.Tensor:
        spec = self.batch[name]
        shape = spec.shape if self.rank is None else local_shape(name, spec, self.mesh, self.rank)
        if self.translator.real:
            return drawn(name, spec, self.mesh, self.rank)
        return torch.empty(shape, dtype=getattr(torch, spec.dtype))

    def _sources(self, made: Mapping[str, torch.Tensor]) -> None:
        t = self.translator
        for name, tensor in made.items():
            t.emitter.declare(name, type_of(tensor))
            t.define(tensor, name)
            domain = self.batch[name].domain if name in self.batch else None
            if domain is not None and domain.kind == "ids" and (domain.ignore is None or domain.ignore >= 0):
                t.emitter.nonnegative.add(name)
            self.inputs[name] = tensor
        for name, tensor in self.counts.items():
            value = t.known(tensor)
            if value is not None:
                self._number(name, tensor, value)
        seen: dict[Any, str] = {}
        kept = []
        for n in self.named:
            here = local(n.tensor)
            if here.numel() == 0 and n.kind == "state" and n.of is None:
                continue
            key = (t.keep(here), here.storage_offset(), tuple(here.shape))
            if key in seen and here.numel():
                self.by_tensor[id(n.tensor)] = seen[key]
                continue
            if n.buffer is not None and not here.is_floating_point() and (value := t.known(here)) is not None:
                self._number(n.name, here, value)  # a count, say
                continue
            if n.buffer == "made" and isinstance(t.read_parts(here), str):
                continue  # computed from constants when the model is built: ranks may compute it differently, so nothing is assumed of it
            if here.is_complex():
                raise NotSupported(f"{n.name} is complex, and not computed from constants when the model is built: {t.read_parts(here)}")
            if n.buffer is not None:
                self.assumed.append(f"buffer {n.name} holds before the step what the reference's does")
            seen[key] = n.name
            t.emitter.declare(n.name, type_of(here))
            t.define(here, n.name)
            kept.append(n)
        self.named = kept

    def _number(self, name: str, t: torch.Tensor, value: torch.Tensor) -> None:
        """A small tensor that lives from step to step and is followed as a number: compared by name."""
        assert self.translator.step is not None
        self.translator.step.numbered[self.translator.keep(t)] = name
        self.numbers[name] = (t, _values(value))

    def left_behind(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """What the step before put into Python objects has no value, but for what follows from constants."""
        t = self.translator
        for name, tensor in tensors.items():
            here = local(tensor)
            key, view = t.keep(here), view_of(here)
            if isinstance(t.read(here), Unknown):
                made = t.memory.written(key, view)
                why = Unknown(f"{name} {LEFT}", None if made is None else made.source)
                t.memory.write(key, view, str(here.dtype), why)

    def carried(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """What the step leaves in Python objects, computed from what the step before left there, and that nothing else depends on."""
        for name, tensor in tensors.items():
            value = self.translator.read(local(tensor))
            if isinstance(value, Unknown) and value.reason.endswith(LEFT):
                text = f"{name} carries values from step to step and is compared with nothing: no tensor of a model or an optimizer"
                self.talk.findings.append(Finding("TV505", text, self.rank, None, value.source, None, "warning"))

    def _drawn(self) -> list[Finding]:
        """Numbers that Python drew in the step: the next one has others."""
        step, now = self.translator.step, generators()
        assert step is not None
        text = "the step draws random numbers by {}, which are constants here and others in every step: draw them with torch"
        changed = [n for n, state in step.generators.items() if now[n] != state]
        return [Finding("TV504", text.format(n), self.rank, None, None, None, "unsupported") for n in changed]

    # -- during the step --------------------------------------------------------------------------------------------------

    def note_gradients(self, optimizer: Any) -> None:
        """What an optimizer is about to use is the final gradient."""
        inner = getattr(optimizer, "optim", None)
        for group in (inner or optimizer).param_groups:
            for p in group["params"]:
                name = self.by_tensor.get(id(p))
                if p.grad is None:
                    continue
                if name is not None:
                    self.note_gradient(name, p.grad)
                for c in self.copies.get(id(p), ()):
                    self.note_gradient(c.name, c.within(p.grad))

    def note_gradient(self, name: str, grad: torch.Tensor) -> None:
        self.translator.emitter.place = self.lines.here()
        self.used.setdefault(name, self.translator.emitter.place.source)
        if name in self.shapes:
            grad = grad.view(self.shapes[name])
        self.gradients.setdefault(name, (self.translator.read(local(grad)), grad))

    # -- after the step ---------------------------------------------------------------------------------------------------

    def finish(self, returned: Any, name: str) -> Captured:
        t = self.translator
        t.emitter.place = self.lines.here()
        made = Outputs(t, self.rank, {*self.inputs, *t.emitter.masks, *(n.name for n in self.named)})
        metrics = self._metrics(returned, made)
        self.assumed += t.read_values
        self.assumed += [f"{b.name} is {b.taken} (accepted, not captured the other way)" for b in self.reader.accepted]
        placed = self._gradients(made)
        for key, metric in metrics.items():
            made.add(metric, "metric", key, key)
        self._updates(made)
        self.talk.lost()
        self._numbers(made)
        return Captured(
            self._program(name, made),
            self.rank,
            {g.name: g.members for g in self.talk.groups.values()},
            placed,
            {n.name: list(n.tensor.shape) for n in self.named},
            [*self._early(), *self.talk.findings, *made.problems, *self._poisoned(), *self._strays(), *self._drawn()],
            [*self.assumed, *(f"{n} means what the given function computes ({checked})" for n, checked in t.meant.ops.items())],
            dict(t.missing),
            dict(t.calls),
            t.literals.merged(),
            self.talk.unused,
            ledger=self.talk.ledger,
            branches=list(self.reader.branches),
            chosen=list(t.read_values),
            used=self.used,
            clears=self.talk.ledger.cleared or all(n.tensor.grad is None for n in self._of_kind("parameter")),
        )

    def _of_kind(self, kind: str) -> list[Named]:
        return [n for n in self.named if n.kind == kind]

    def _metrics(self, returned: Any, made: Outputs) -> dict[str, Value]:
        """All that the step returns but the loss, and the conditions on data."""
        metrics: dict[str, Value] = {}
        for key, value in _losses(returned).items():
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

    def _gradients(self, made: Outputs) -> dict[str, Described]:
        """Gradients as outputs; how they and all that is kept lie."""
        parameters = self._of_kind("parameter")
        for n in parameters:
            if n.name not in self.gradients and n.tensor.grad is not None:
                self.note_gradient(n.name, n.tensor.grad)
        placed = {n.name: place for n in self.named if (place := described(n.tensor) or self.said.get(n.name)) is not None}
        for n in parameters:
            if n.name in self.gradients:
                value, grad = self.gradients[n.name]
                output = made.add(value, "gradient", n.name, f"gradient of {n.name}")
                place = described(grad) or self.said.get(f"gradient of {n.name}")
                if output is not None and place is not None:
                    placed[f"gradient of {n.name}"] = place
        return placed

    def _updates(self, made: Outputs) -> None:
        t, parameters = self.translator, self._of_kind("parameter")
        if self.trained or any(t.read(local(n.tensor)) != n.name for n in parameters):  # by an optimizer, or by hand
            for n in parameters:
                made.add(t.read_written(local(n.tensor)), "parameter", n.name, f"updated parameter {n.name}")
        for n in self._of_kind("state"):
            made.add(t.read_written(local(n.tensor)), "state", n.name, f"updated state {n.name}")

    def _numbers(self, made: Outputs) -> None:
        """Small tensors that are followed as numbers, after the step."""
        for name, (tensor, before) in self.numbers.items():
            value = self.translator.known(tensor)
            if value is None:
                self.talk.ledger.lost.append(name)
                made.problem(name, f"{name}, which is an integer, is computed from data", self.translator.emitter.place.source)
            else:
                self.talk.ledger.numbers[name] = before, _values(value)

    def _program(self, name: str, made: Outputs) -> Program:
        emitter, parameters, states = self.translator.emitter, self._of_kind("parameter"), self._of_kind("state")
        if any(n.tensor.grad is not None for n in parameters):
            self.assumed.append(
                "no gradients are left from the step before: this one leaves some behind, and zero_grad is called in between"
            )
        domains: dict[str, Domain] = {k: d for k, s in self.batch.items() if (d := s.domain) is not None}
        domains |= {n.name: Domain("nonnegative") for n in states if n.nonnegative}
        domains |= {n: Domain("indicator") for n in emitter.masks}
        inputs = (*self.inputs, *emitter.masks)
        return emitter.program(name, inputs, tuple(n.name for n in parameters), tuple(n.name for n in states), made.outputs, domains)

    def _early(self) -> list[Finding]:
        first: dict[int | None, Finding] = {}  # of every communication only where it is read first
        for why, source in self.translator.early:
            first.setdefault(why.pending, Finding("TV501", why.reason, self.rank, None, source))
        return list(first.values())

    def _poisoned(self) -> list[Finding]:
        poisoned = dict.fromkeys((u.reason, u.source) for u in self.translator.poisoned if u.pending is None)
        return [Finding("TV504", f"communicated: {why}", self.rank, None, at, None, "unsupported") for why, at in poisoned]

    def _strays(self) -> list[Finding]:
        """Memory that is older than the step, is still used, and was written."""
        step, found = self.translator.step, []
        assert step is not None
        for key, source in step.strays.items():
            storage = self.translator._alive[key]
            if self.translator.unchanged(key):
                continue
            if step.carried(key, self.translator.memory.old_reads.get(key, ())):
                text = f"memory of {storage.nbytes()} bytes, no tensor of a model or an optimizer, carries values from step to step"
                found.append(Finding("TV505", text, self.rank, None, source, None, "unsupported"))
            elif torch._C._storage_Use_Count(key) > 1 + (storage is None):
                text = f"memory of {storage.nbytes()} bytes that is older than the step is written by it and is compared with nothing"
                found.append(Finding("TV505", text, self.rank, None, source, None, "warning"))
        return list(dict.fromkeys(found))


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
    with unset_fake_temporarily():
        return tuple(float(v) for v in value.reshape(-1).tolist())


def _losses(returned: Any) -> dict[str, torch.Tensor]:
    """What a step reports: its loss, and metrics by name."""
    if isinstance(returned, Mapping):
        return {str(k): v for k, v in returned.items() if isinstance(v, torch.Tensor)}
    if isinstance(returned, torch.Tensor):
        return {"loss": returned}
    return {}


def capture(
    build: Callable[..., Any],
    batch: Batch,
    mesh: Mesh,
    rank: int | None,
    world: int,
    table: OpTable,
    meanings: Mapping[str, Row] | None = None,
    name: str = "step",
    choices: Sequence[bool] = (),
    accept: bool = False,
    store: str | None = None,
    again: bool = False,
) -> Captured:
    """The program of one rank; `build` returns its step. With a `store` tensors are real, and ranks talk by gloo through that file.

    With `again`, the step runs once before it is captured."""
    began = time.process_time()
    torch.set_num_threads(1)
    torch.autograd.set_multithreading_enabled(False)
    session = Session(batch, mesh, rank, table, meanings, choices, accept)
    if store is None:
        session.reader.install()
    else:
        session.translator.real = True
        session.reader.install_real()
        torch.manual_seed(0)
    patch(session.talk, session.assumed)
    session.lines.wrappers.install()
    if rank is not None:
        start_group(session.talk, rank, world, store=store)
    elif getattr(build, "grouped", False):
        start_group(session.talk, 0, 1, store=None if store is None else f"{store}.alone")
    handles = session.lines.hooks()
    fake = FakeTensorMode(allow_non_fake_inputs=True) if store is None else contextlib.nullcontext()
    with fake, session.recorder:
        step = build() if rank is None else build(rank, world)
        found = getattr(step, "found", None)  # an adapter says where the parameters are
        adapted = isinstance(found, Found)
        left = run_before(session, step) if again else {}
        session.begin(found if isinstance(found, Found) else search(step))
        session.left_behind(left)
        before = {} if adapted else snapshot(step)
        if adapted or CUT in before:
            session.assumed.append(UNWATCHED)
        with optimizer_hooks(session):
            returned = step(dict(session.inputs))
        after = {} if adapted else snapshot(step)
        places = changed(before, after, {id(n.tensor) for n in session.named})
        session.carried({n.lstrip("."): h.tensor for n in places if isinstance(h := after.get(n), Held)})
        result = replace(session.finish(returned, name), remembered=places)
    for h in handles:
        h.remove()
    result.seconds = time.process_time() - began
    return result


def generators() -> dict[str, object]:
    """How far the generators of Python and of NumPy that all code shares have come."""
    return {"random": random.getstate(), "numpy.random": repr(np.random.get_state(legacy=False))}


def run_before(session: Session, step: Callable[..., Any]) -> dict[str, torch.Tensor]:
    """A step that is not captured; which tensors it leaves in Python objects."""
    before = snapshot(step)
    session.reader.before = True
    step({n: session._input(n) for n in session.batch})
    session.reader.before = False
    after, found = snapshot(step), search(step)
    named = list(tensors_of(found.modules))
    for optimizer in found.optimizers:
        for state in getattr(optimizer, "optim", optimizer).state.values():
            if isinstance(state.get("step"), torch.Tensor):
                state["step"] = torch.tensor(float(STEPS_TAKEN), dtype=torch.float32)
    for n in named:
        n.tensor.grad = None  # as is assumed where a step leaves some behind
    places = changed(before, after, {id(n.tensor) for n in named})
    return {n.lstrip("."): h.tensor for n in places if isinstance(h := after.get(n), Held)}


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
        self.originals = [(owner, owner.zero_grad) for owner in (Optimizer, torch.nn.Module)]
        for owner, original in self.originals:
            owner.zero_grad = self._noted(original)

    def _noted(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def zero_grad(*args: Any, **kwargs: Any) -> None:
            self.session.talk.ledger.cleared = True
            original(*args, **kwargs)

        return zero_grad

    def __exit__(self, *args: object) -> None:
        for h in self.handles:
            h.remove()
        for owner, original in self.originals:
            owner.zero_grad = original


__all__ = ["Captured", "ReadsData", "Session", "TensorType", "capture"]
