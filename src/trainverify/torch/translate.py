"""From calls as PyTorch makes them to ops of our program, one after the other as they run."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any, Final

import torch

from trainverify.graph.program import Source
from trainverify.graph.types import TensorType
from trainverify.ops import OPS
from trainverify.ops.table import OpTable
from trainverify.torch.boundary import Boundary
from trainverify.torch.data_draws import seed_read
from trainverify.torch.followed import Followed
from trainverify.torch.frames import ENGINE, is_ours, torchs
from trainverify.torch.integers import NARROW, fits
from trainverify.torch.mappings import COMPLEX, MAPPINGS, Row
from trainverify.torch.mappings.complex import conjugate
from trainverify.torch.mappings.creation import RANDOM
from trainverify.torch.mappings.foreach import each, single
from trainverify.torch.mappings.table import Arguments, NoValue, plain
from trainverify.torch.meanings import MEANINGS, Meanings
from trainverify.torch.overlap import reads_what_it_writes
from trainverify.torch.private import FakeTensor, _disable_current_modes, unset_fake_temporarily
from trainverify.torch.rewrites import rewritten
from trainverify.torch.stand_ins import Given, StandIns
from trainverify.torch.storage import Memory, Piece, checked
from trainverify.torch.values import COMPLEX_PARTS, DTYPES, ReadsData, Unknown, Unmapped, Value
from trainverify.torch.views import View, is_dense
from trainverify.translate.emit import Emitter, Place
from trainverify.translate.functions import known_image
from trainverify.translate.literals import Literals

SHADOWED: Final = 1  # elements of a tensor whose value is followed while it depends on constants only
DATA: Final = 4096  # elements of a tensor that is there from the start, up to which it is written out
_NOTHING: Final = frozenset(
    (
        "aten::detach_",
        "aten::requires_grad_",
        *("aten::record_stream", "fsdp::record_grad_output_stream"),
        *(f"aten::_assert_{n}" for n in ("async", "scalar", "tensor_metadata")),
        *(f"aten::{n}_" for n in ("squeeze", "unsqueeze", "t", "transpose", "swapdims", "swapaxes")),  # another view of the same memory
    )
)


CHOOSING: Final = frozenset(("aten::nonzero", "aten::_unique2", "aten::unique_dim"))  # results whose size depends on data
_DISPATCH: Final = (  # files of PyTorch's through which a call reaches the recorder
    "_compile.py",
    "_dynamo/eval_frame.py",
    "utils/_python_dispatch.py",
    "utils/_stats.py",
    "_ops.py",
    "_subclasses/fake_tensor.py",
)
_COPIES: Final = frozenset(("aten::to", "aten::contiguous", "aten::reshape"))  # a view, or a copy with memory of its own
_VIEWS: Final = frozenset(("aten::_unsafe_view",))  # views without a note in their schema


@dataclass
class Missing:
    """Calls without a mapping."""

    count: int = 0
    reason: str = ""
    source: Source | None = None


@dataclass
class Notes:
    """What is noted while a step is written down, and before the first one."""

    poisoned: list[Unknown] = field(default_factory=list)  # values that communication needs and that are not there
    early: list[tuple[Unknown, Source | None]] = field(default_factory=list)  # results that are read before `wait`, and where
    read_values: list[str] = field(default_factory=list)
    initial: dict[str, Unknown] = field(default_factory=dict)  # before the first step: names for what has no value


@dataclass
class Step:
    """What the program under construction is, besides its ops."""

    sources: dict[int, str] = field(default_factory=dict)  # storage → source that it is the memory of
    before: set[int] = field(default_factory=set)  # storages that are older than the step
    strays: dict[tuple[int, bool], Source | None] = field(default_factory=dict)  # older storages that are written, by DDP's reducer or not
    written: dict[int, list[tuple[int, int]]] = field(default_factory=dict)  # of these, which elements
    numbered: dict[int, str] = field(default_factory=dict)  # storage of a small known tensor that has a name → its name
    generators: dict[str, object] = field(default_factory=dict)  # of random numbers, Python's: how far they were when the step began
    counts: dict[int, torch.Tensor] = field(default_factory=dict)  # integers that are followed beside the program, before the step
    tables: set[str] = field(default_factory=set)  # what buffers hold that are computed from constants when the model is built
    bounds: dict[int, set[int]] = field(default_factory=dict)  # storage → where sources begin and end in it

    def carried(self, key: int, reads: Sequence[tuple[int, int]]) -> bool:
        """Whether a step reads what the step before it wrote."""
        return any(a < d and c < b for a, b in reads for c, d in self.written.get(key, ()))


def view_of(t: torch.Tensor) -> View:
    return View(int(t.storage_offset()), tuple(int(s) for s in t.shape), tuple(int(s) for s in t.stride()))


def memory_of(t: torch.Tensor) -> tuple[View, str]:
    """Where the numbers of a tensor lie, and their dtype; a complex one is two of them."""
    view, name = view_of(t), str(t.dtype)
    if name in COMPLEX_PARTS:
        return View(2 * view.offset, (*view.shape, 2), (*(2 * s for s in view.stride), 1)), COMPLEX_PARTS[name]
    return view, DTYPES.get(name, name)


def key_of(t: torch.Tensor) -> int:
    return int(t.untyped_storage()._cdata)


def parts_type(t: torch.Tensor) -> TensorType:
    """The type of a tensor, where a complex one has a last dimension of its parts."""
    return TensorType((*(int(s) for s in t.shape), 2), COMPLEX_PARTS[str(t.dtype)]) if t.is_complex() else type_of(t)


def type_of(t: torch.Tensor) -> TensorType:
    name = str(t.dtype)
    if name not in DTYPES:
        raise Unmapped(f"dtype {name}")
    return TensorType(tuple(int(s) for s in t.shape), DTYPES[name])


def flat(value: Any) -> Iterator[Any]:
    """Tensors of a result, with None where one is not there."""
    if isinstance(value, list | tuple):
        for v in value:
            yield from flat(v)
    else:
        yield value


class Translator:
    def __init__(self, place: Callable[[], Place], table: OpTable = OPS, mappings: Mapping[str, Row] | None = None):
        self.emitter = Emitter(table, rewritten)
        self.emitter.image = known_image
        self.memory = Memory(self.emitter)
        self.mappings = {**MAPPINGS, **(mappings or {})}
        self.literals = Literals()
        self.missing: dict[str, Missing] = {}
        self.calls: Counter[str] = Counter()
        self.meant = Meanings()  # ops whose meaning the user gave
        self.again: Any = None  # the recorder, for functions that are captured in an op's place
        self.notes = Notes()
        self.step: Step | None = None
        self.padding: list[tuple[int, Piece]] = []  # constants beside sources in one memory that no step changes
        self.real = False  # tensors have values: what Python reads of them is noted
        self._place = place
        self.boundary = Boundary(lambda: place().source)
        self.stand_ins = StandIns()
        self._alive: dict[int, Any] = {}  # storages are kept, so that their addresses stay theirs
        self._known: dict[int, torch.Tensor] = {}  # storage → its values, where these follow from constants
        self._shadowed: dict[int, Place] = {}  # storage → where its known values were computed
        self.followed = Followed(self.keep, self.known)

    # -- reading and writing ------------------------------------------------------------------------------------------

    def keep(self, t: torch.Tensor) -> int:
        """The memory of a tensor, as a number. It is not given back while the step is captured."""
        other = isinstance(t, FakeTensor) and not self.stand_ins.same_mode(t)
        if other or t.layout is not torch.strided:
            what = "a fake tensor of another mode" if other else f"a tensor of layout {t.layout}"
            raise self.boundary.refused(ReadsData(f"{self._place().source}: {what}: its memory is not followed"))
        storage = t.untyped_storage()
        key = int(storage._cdata)
        self._alive.setdefault(key, storage)
        return self.stand_ins.memory(key)

    def stood_in(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Given:
        """The arguments of a call, with fake tensors for those that were there before. Memory that others may write is as it was."""
        real = False
        for t in (t for v in (*args, *kwargs.values()) for t in flat(v) if isinstance(t, torch.Tensor)):
            self.boundary.read(self.keep(t))
            real = real or not isinstance(t, FakeTensor)
        if self.stand_ins.mode is None or not real or func.namespace != "aten" or func._schema.name == "aten::lift_fresh":
            return Given(args, kwargs, {})
        return self.stand_ins.given(args, kwargs, self._stands)

    def _stands(self, real: torch.Tensor, fake: torch.Tensor) -> None:
        self.known(real)
        self.keep(fake)

    def read(self, t: torch.Tensor) -> Value:
        key = self.keep(t)
        if str(t.dtype) not in DTYPES:
            return Unknown(f"a tensor of dtype {t.dtype}")
        if t.is_neg():
            return Unknown("a view that is negated when it is read")
        if (found := self.known(t)) is not None:
            if self.step is not None and self._is_old(key) and not self.step.written.get(key):
                view = view_of(t)
                self.memory.old_reads.setdefault(key, []).append((view.offset, view.stop))
            return self._literal(found, type_of(t), self._shadowed.get(key))
        found_there = self.memory.read(key, view_of(t), DTYPES[str(t.dtype)])
        return self.initial(t, found_there) if self.step is None and isinstance(found_there, Unknown) else found_there

    def initial(self, t: torch.Tensor, why: Unknown) -> Value:
        """What has no value before the first step gets a name: of two copies it shows that they are equal."""
        view = view_of(t)
        if why.pending is not None or not t.numel() or not is_dense(view) or self.memory.has_values(self.keep(t), view):
            return why
        name = self.emitter.declare(self.emitter.fresh("initial"), type_of(t))
        self.memory.write(self.keep(t), view, DTYPES[str(t.dtype)], name)
        self.notes.initial[name] = why
        return name

    def settle(self, names: Mapping[str, str]) -> None:
        """What was called by name before the first step is what a parameter starts with, or has no value."""
        if self.notes.initial:
            self.memory.settle(self.emitter.settle(names, self.notes.initial), {**names}, self.notes.initial)
            self.notes.initial = {}

    def read_parts(self, t: torch.Tensor) -> Value:
        """A tensor that may be complex: then its parts, along a last dimension."""
        if not t.is_complex():
            return self.read(t)
        if t.is_neg():
            return Unknown("a view that is negated when it is read")
        found = self.memory.read(self.keep(t), *memory_of(t))
        return conjugate(self.emitter, found) if t.is_conj() and isinstance(found, str) else found

    def known(self, t: torch.Tensor) -> torch.Tensor | None:
        """The values of a tensor that follow from constants alone; data that is there from the start counts."""
        key = self.keep(t)
        self.boundary.read(key)
        found = self._known.get(key)
        if found is None:
            if key in self.memory.storages or type(t) is not torch.Tensor or t.numel() > DATA or t.is_meta:
                return None
            if not self.real:
                self.boundary.share(key, t)
            with _disable_current_modes():
                found = self._known[key] = torch.empty(0, dtype=t.dtype).set_(t.untyped_storage()).detach().clone()
        with _disable_current_modes():
            return found.as_strided(t.shape, t.stride(), t.storage_offset())

    def read_written(self, t: torch.Tensor) -> Value:
        """A tensor after the step, as the user's line that wrote it would read it."""
        self.emitter.place = self.memory.written(self.keep(t), view_of(t)) or Place()
        return self.read(t)

    def _literal(self, values: torch.Tensor | None, kind: TensorType, made: Place | None = None) -> str:
        assert values is not None
        with _disable_current_modes():
            numbers = [self.literals(v) for v in values.reshape(-1).tolist()]
        e = self.emitter
        if len(set(numbers)) <= 1:
            return e.full(kind.shape, numbers[0] if numbers else 0, kind.dtype, made)
        return e.reshape(e.op("stack", [e.full((), n, kind.dtype, made) for n in numbers], {"dim": 0}), kind.shape)

    def write(self, t: torch.Tensor, value: Value) -> None:
        key = self.keep(t)
        self.boundary.written(key)
        if key in self._known:
            whole = self._known.pop(key)
            shape = (whole.numel(),)
            if str(whole.dtype) in DTYPES:
                dtype = DTYPES[str(whole.dtype)]
                made = self._literal(whole, TensorType(shape, dtype), self._shadowed.get(key))
                self.memory.write(key, View(0, shape, (1,)), dtype, made)
        if self.step is not None and key in self.step.before and key not in self.step.sources:
            self._stray(t)
        if t.is_conj() or t.is_neg():
            value = Unknown("a write to a view that is conjugated or negated when it is read", self.emitter.place.source)
        self.memory.write(key, *memory_of(t), value)

    def _stray(self, t: torch.Tensor) -> None:
        """The step writes memory that is older than it and is no source."""
        assert self.step is not None
        if (reducer := _from_backward()) and t.dtype == torch.int32:
            return  # DDP's reducer notes which parameters were used, and starts anew in every step
        key, (view, _) = self.keep(t), memory_of(t)
        self.step.strays.setdefault((key, reducer), self._place().source)
        self.step.written.setdefault(key, []).append((view.offset, view.stop))

    def define(self, t: torch.Tensor, name: str) -> None:
        """From now on a tensor is a source of the program."""
        key = self.keep(t)
        self._known.pop(key, None)
        self.memory.write(key, view_of(t), type_of(t).dtype, name)
        if self.step is not None:
            self.step.sources[key] = name
            self.step.bounds.setdefault(key, set()).update((view_of(t).offset, view_of(t).stop))

    def forget(self, key: int) -> None:
        self._known.pop(key, None)
        self.followed.values.pop(key, None)
        if key in self.memory.storages:
            self.memory.forget(key)

    def begin(self) -> None:
        """A step starts here: what ran before only made what it starts from."""
        if self.step is not None:
            self._renew()
        self.step = Step(before=set(self._alive))
        self.memory.begin()
        self.step.counts = self.followed.copies()
        self.emitter.begin()
        self.missing.clear()
        self.calls.clear()

    def _renew(self) -> None:
        """Between two steps: of what the first one left in memory only what follows from constants has a value."""
        gone = {key for key in self._alive if torch._C._storage_Use_Count(key) <= 1}
        for held in (self._alive, self._known, self._shadowed, self.followed.values):
            for key in gone.intersection(held):
                del held[key]
        self.memory.drop(gone)
        self.boundary.drop(gone)
        self.emitter, names = self.emitter.next_step({*self.memory.values(), *(str(p.value) for _, p in self.padding)})
        self.memory.renew(self.emitter, names)
        self.padding = [(key, replace(p, value=names[str(p.value)])) for key, p in self.padding if key not in gone]
        for key, p in self.padding:
            self.memory.place(key, p)
        self.literals = Literals()
        self.notes, self.missing, self.calls = Notes(), {}, Counter()

    # -- calls ----------------------------------------------------------------------------------------------------------

    def item(self, t: torch.Tensor) -> Any:
        found = self.known(t)
        if found is None and self.real:
            with _disable_current_modes():
                value = t.item()
            self.noted(f"{value!r} is read")
            return value
        if found is None:
            found = self.followed.read(t)
        if found is None:
            found = seed_read(self, t, lambda: self.memory.read(self.keep(t), *memory_of(t)))
        if found is None:
            place = self._place()
            text = f"{place.source}: the value of a computed tensor is read (.item(), if tensor:, .tolist() …)"
            if str(t.dtype) in DTYPES and getattr(self.memory.read(self.keep(t), *memory_of(t)), "reason", "") == "a random number":
                text += "; it was drawn by torch, which draws none here: choose data by a DataLoader, or by NumPy with a seed"
            raise self.boundary.refused(ReadsData(text))
        return plain(found)

    def noted(self, what: str) -> None:
        """A choice that a run on real tensors made."""
        if self.step is not None:
            text = f"chosen by the data of this run at {self._place().source}: {what}"
            if text not in self.notes.read_values:
                self.notes.read_values.append(text)

    def here(self) -> Place:
        return self._place()

    def has_row(self, name: str) -> bool:
        """Whether an operator, or the one that it is the in-place variant of, is mapped."""
        short = name.removesuffix("_")
        return name in self.mappings or short in self.mappings or single(short.removeprefix("aten::")) is not None or short in COMPLEX

    def refuse(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any, why: str) -> None:
        """A call without a meaning here, which may have written any of its arguments."""
        self.emitter.place = self._place()
        self.calls[str(func._schema.name)] += 1
        (value,) = self._unmapped(str(func._schema.name), why, 1)
        for t in flat([out, *args, *kwargs.values()]):
            if isinstance(t, torch.Tensor) and value is not None:
                self.write(t, value)

    def call(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any, fault: str | None = None) -> None:
        """One call that has run, with its result; `fault` says what PyTorch computes otherwise."""
        schema = func._schema
        if schema.name in _NOTHING:
            return
        if fault is not None:
            self.refuse(func, args, kwargs, out, f"PyTorch computes something else: {fault}")
            return
        given = {a.name: v for a, v in zip(schema.arguments, args, strict=False)} | dict(kwargs)
        written = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        if not written and (any(r.alias_info is not None for r in schema.returns) or schema.name in _VIEWS):
            self._view(str(schema.name), given, out)
            return
        name = str(schema.name)
        self.calls[name] += 1
        targets = [t for n in written for t in flat(given.get(n))] if written else list(flat(out))
        for t in targets if written else ():
            if isinstance(t, torch.Tensor):
                self.boundary.written(self.keep(t))
        if not any(isinstance(t, torch.Tensor) for t in targets):
            if self.real and targets:
                self.noted(f"{name} gives {out!r}")
            return
        if self.real and name in CHOOSING and self.step is not None:
            self._chosen(name, targets)
            return
        complex_ones = any(isinstance(t, torch.Tensor) and t.is_complex() for v in (*given.values(), out) for t in flat(v))
        if not complex_ones and self._shadow(func, name, args, kwargs, targets, out):
            return
        self._follow(func, name, args, kwargs, targets, out)
        self.emitter.place = self._place()
        self.emitter.label = name.rpartition("::")[2].strip("_")
        if written and reads_what_it_writes(func, given, written):
            values = self._unmapped(name, "it writes memory that it reads by another view", len(targets))
            for t, value in zip(targets, values, strict=True):
                if isinstance(t, torch.Tensor) and value is not None:
                    self.write(t, value)
            return
        if name in MEANINGS:
            self.meant.check(func, name, args, kwargs)
            self._meant(name, args, kwargs, targets)
            return
        defaults = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
        entries = {k: v for k, v in given.items() if not (k in written and _is_out(schema, k))}
        results = self._complex if complex_ones else self._results
        for t, value in zip(targets, results(name, bool(written), entries, defaults, targets), strict=True):
            if t is not None and value is not None:
                self.write(t, value)

    def _chosen(self, name: str, targets: Sequence[Any]) -> None:
        """Positions that depend on data are as in this run."""
        for t in targets:
            if isinstance(t, torch.Tensor):
                self.noted(f"{name} gives {t.numel()} numbers")
                with _disable_current_modes():
                    self._known[self.keep(t)] = t.detach().clone().reshape(-1)

    def _meant(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], targets: Sequence[Any]) -> None:
        """An op of another library, by the function that the user gave for it."""
        assert self.again is not None
        with self.again:
            made = [t for t in flat(MEANINGS[name](*args, **kwargs)) if t is not None]
        self.emitter.place = self._place()
        wanted = [t for t in targets if isinstance(t, torch.Tensor)]
        if [tuple(t.shape) for t in made] != [tuple(t.shape) for t in wanted]:
            values: Sequence[Value | None] = self._unmapped(name, "its meaning has results of other shapes", len(wanted))
        else:
            values = [self.read(t) for t in made]
        for t, value in zip(wanted, values, strict=True):
            if value is not None:
                self.write(t, value if isinstance(value, Unknown) else self.emitter.cast(value, type_of(t).dtype))

    def _view(self, name: str, given: Mapping[str, Any], out: Any) -> None:
        """A view is read where it is used. One with memory of its own is data that becomes a fake tensor."""
        inputs = [t for v in given.values() for t in flat(v) if isinstance(t, torch.Tensor)]
        keys = {self.keep(t) for t in inputs}
        place = self._place() if self.step is not None else Place()
        for t in flat(out):
            if place.source is not None and isinstance(t, torch.Tensor):
                self.memory.viewed[self.keep(t), view_of(t)] = place
            if isinstance(t, torch.Tensor) and self.keep(t) not in keys:
                found = self.known(inputs[0]) if len(inputs) == 1 else None
                if found is None and name in _COPIES and inputs[0].numel() == t.numel():
                    self._copied(inputs[0], t)
                elif found is None or not t.is_contiguous():
                    self.write(t, Unknown(f"{name}: data that was there before it was captured", self._place().source))
                else:
                    if not inputs[0].untyped_storage().resizable():  # not PyTorch's own memory
                        self.boundary.share(self.keep(t), inputs[0])
                    with unset_fake_temporarily():
                        self._known[self.keep(t)] = found.detach().clone().reshape(-1)

    def _copied(self, source: torch.Tensor, t: torch.Tensor) -> None:
        """What may be a view and is a copy: the same elements in row-major order."""
        self.emitter.place = self._place()
        value = self.read(source)
        kind = type_of(t)
        self.write(t, value if isinstance(value, Unknown) else self.emitter.cast(self.emitter.reshape(value, kind.shape), kind.dtype))

    def _results(
        self, name: str, in_place: bool, given: Mapping[str, Any], defaults: Mapping[str, Any], targets: Sequence[Any]
    ) -> Sequence[Value | None]:
        space, _, short = name.rpartition("::")
        names = [short] + ([short.removesuffix("_")] if in_place else [])
        for n in names:
            if (one := single(n)) is not None and space == "aten":
                row = self.mappings[f"aten::{one}"]
                calls = each(n, given)
                own = each(n, {**defaults, "self": given["self"]})
                found: list[Value | None] = []
                for call, default, target in zip(calls, own, targets, strict=True):
                    found += self._applied(name, row, call, _filled(one, default), [target])
                return found
            if f"{space}::{n}" in self.mappings:
                return self._applied(name, self.mappings[f"{space}::{n}"], given, defaults, targets)
        return self._unmapped(name, "no mapping", len(targets))

    def _complex(
        self, name: str, in_place: bool, given: Mapping[str, Any], defaults: Mapping[str, Any], targets: Sequence[Any]
    ) -> Sequence[Value | None]:
        """The same where a tensor is complex."""
        row = COMPLEX.get(name) or (COMPLEX.get(name.removesuffix("_")) if in_place else None)
        if row is None:
            return self._unmapped(name, "no mapping for complex tensors", len(targets))
        return self._applied(name, row, given, defaults, targets)

    def _applied(
        self, name: str, row: Row, given: Mapping[str, Any], defaults: Mapping[str, Any], targets: Sequence[Any]
    ) -> Sequence[Value | None]:
        try:
            kinds = [parts_type(t) if isinstance(t, torch.Tensor) else None for t in targets]
            a = Arguments(self.emitter, given, defaults, self.read_parts, self.known, self.literals, kinds)
            made = row(a)
            results: list[Value | None] = [made] if made is None or isinstance(made, str | Unknown) else list(made)
            left = a.left()
            if left:
                raise Unmapped("argument " + ", ".join(f"{n}={_shown(given[n])}" for n in left))
            if len(results) != len(targets):
                raise Unmapped(f"{len(results)} results for {len(targets)} outputs")
            for i, (value, kind) in enumerate(zip(results, kinds, strict=True)):
                if isinstance(value, str) and kind is not None:
                    results[i] = checked(self.emitter, value, kind.shape, kind.dtype)
                    if kind.dtype in NARROW and not fits(self.emitter, value, kind.dtype):
                        raise Unmapped(f"numbers that may not fit in {kind.dtype}: there they wrap around")
            return results
        except NoValue as error:
            if error.why.pending is not None:
                self.notes.early.append((error.why, self.emitter.place.source))
            return [error.why] * len(targets)
        except Unmapped as error:
            return self._unmapped(name, str(error), len(targets))
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:  # a row that is not made for such arguments
            return self._unmapped(name, f"{type(error).__name__}: {error}", len(targets))

    def _unmapped(self, name: str, reason: str, count: int) -> list[Value | None]:
        found = self.missing.setdefault(name, Missing(0, reason, self.emitter.place.source))
        found.count += 1
        return [Unknown(f"{name}: {reason}", self.emitter.place.source)] * count

    def _shadow(self, func: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], targets: Sequence[Any], out: Any) -> bool:
        """Follow the values of small tensors that depend on constants only; whether that was possible."""
        short = name.rpartition("::")[2].removesuffix("_")
        tensors = [t for v in (*args, *kwargs.values()) for t in flat(v) if isinstance(t, torch.Tensor)]
        counts = short == "cat" and all(t.numel() <= SHADOWED and not t.is_floating_point() for t in tensors)  # DDP joins counters
        small = counts or all(t.numel() <= SHADOWED for t in targets if t is not None)
        if not small or not name.startswith("aten::") or _is_random(func, short) or "empty" in short:
            return False
        if any(self.known(t) is None for t in tensors):
            return False
        self._old_numbers(func, short, tensors, targets)

        def real(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return self.known(value)
            if isinstance(value, list | tuple):
                return type(value)(real(v) for v in value)
            return torch.device("cpu") if isinstance(value, torch.device) else value

        with unset_fake_temporarily():
            given, named = [real(v) for v in args], {k: real(v) for k, v in kwargs.items()}
            meant = self._unrounded(func, given, named) if any(t.dtype == torch.float32 for t in tensors) else ()
            made = func(*given, **named)
            for r, exact in zip(flat(made), meant, strict=False):
                self.literals.rounds(plain(r), exact)
            for t, r in zip(flat(out), flat(made), strict=True):
                if isinstance(t, torch.Tensor):
                    key = self.keep(t)
                    if tensors and self.step is not None:  # not a literal of the user's, but computed from one
                        self._shadowed[key] = self._place()
                    if key not in self._known:
                        self._known[key] = torch.empty(0, dtype=r.dtype).set_(r.untyped_storage())
        return True

    def _unrounded(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[float]:
        """What a call of scalars would give in float64, on the numbers that float32 constants stand for."""

        def wide(value: Any) -> Any:
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                return torch.tensor(float(self.literals(plain(value))), dtype=torch.float64).reshape(value.shape)
            if isinstance(value, list | tuple):
                return type(value)(wide(v) for v in value)
            return torch.float64 if value is torch.float32 else value

        try:
            made = list(flat(func(*[wide(v) for v in args], **{k: wide(v) for k, v in kwargs.items()})))
            return [float(r) for r in made] if all(isinstance(r, torch.Tensor) and r.is_floating_point() for r in made) else []
        except (RuntimeError, TypeError):  # more than one element, or no kernel for float64
            return []

    def _old_numbers(self, func: Any, short: str, tensors: Sequence[torch.Tensor], targets: Sequence[Any]) -> None:
        """Note which known tensors that are older than the step are read and written."""
        step = self.step
        if step is None:
            return
        in_place = any(a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments)
        for t in tensors:
            overwritten = short in ("zero", "fill", "copy") and in_place and t is tensors[0]
            if self._is_old(self.keep(t)) and not overwritten and not step.written.get(self.keep(t)):
                view = view_of(t)
                self.memory.old_reads.setdefault(self.keep(t), []).append((view.offset, view.stop))
        for t in targets if in_place else ():
            if isinstance(t, torch.Tensor) and self._is_old(self.keep(t)):
                self._stray(t)

    def _is_old(self, key: int) -> bool:
        """Whether memory is older than the step, without being a source or a number that is compared by name."""
        return self.step is not None and key in self.step.before and key not in self.step.sources and key not in self.step.numbered

    def _follow(self, func: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], targets: Sequence[Any], out: Any) -> None:
        short = name.rpartition("::")[2].removesuffix("_")
        followed = name.startswith("aten::") and not _is_random(func, short) and "empty" not in short
        self.followed.call(self.step is not None, short if followed else "", func, args, kwargs, targets, out)

    # -- what communication and the step's end need ---------------------------------------------------------------------

    def missing_communication(self, why: Unknown) -> None:
        if why.pending is not None:
            self.notes.early.append((why, self.emitter.place.source))
        self.notes.poisoned.append(why)

    def named(self, t: torch.Tensor) -> str:
        """A tensor that must have a value."""
        value = self.read(t)
        if isinstance(value, Unknown):
            raise NoValue(value)
        return value


def _filled(one: str, default: Mapping[str, Any]) -> dict[str, Any]:
    """Defaults of the op of one tensor, where the foreach op has no such argument."""
    more: dict[str, Any] = {"alpha": 1} if one in ("add", "sub") else {"value": 1} if one in ("addcmul", "addcdiv") else {}
    return {**more, **{k: v for k, v in default.items() if k != "self"}}


def is_computed(func: Any) -> bool:
    """Whether a call computes numbers: it is no view, and draws no random ones."""
    schema = func._schema
    if schema.name in _NOTHING or schema.name.rpartition("::")[2].removesuffix("_") in RANDOM or "empty" in schema.name:
        return False
    written = any(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments)
    return written or not (any(r.alias_info is not None for r in schema.returns) or schema.name in _VIEWS)


def _is_random(func: Any, short: str) -> bool:
    """Whether an op draws random numbers, as PyTorch marks it or as we know."""
    return short in RANDOM or torch.Tag.nondeterministic_seeded in func.tags


def _from_backward() -> bool:
    """Whether C++ called within a backward pass, without a function of Python's in between."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if torchs(file) not in _DISPATCH and not is_ours(file):
            return frame.f_code is ENGINE
        frame = frame.f_back
    return False


def _is_out(schema: Any, name: str) -> bool:
    """Whether an argument only receives a result: `out=`."""
    return any(a.name == name and a.kwarg_only for a in schema.arguments)


def _shown(value: Any) -> str:
    return f"tensor{list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
