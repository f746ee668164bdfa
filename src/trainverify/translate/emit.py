"""Writing a program op by op: names, types from the operators' definitions, the user's lines."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from trainverify.graph.program import Domain, Op, Output, Phase, Program, Source, attributes
from trainverify.graph.types import DTYPES, TensorType
from trainverify.ops import OPS
from trainverify.ops.table import OpError, OpTable
from trainverify.translate.names import clean


class Unmapped(Exception):
    """An op, or an argument of one, that has no meaning here."""


@dataclass(frozen=True)
class Place:
    """Where an op comes from: the user's line, the module that runs, and the pass."""

    source: Source | None = None
    module: str = ""
    phase: Phase = "forward"


def mask_name(module: str, keep: float, drawn: Sequence[str]) -> str:
    """The name of the next mask that a module draws; the same on all ranks, whatever wraps the module."""
    base = f"{clean(module) or 'step'}/kept.{keep:g}"
    return f"{base}.{sum(n.rpartition('.')[0] == base for n in drawn)}"


Rewriting = Callable[["Emitter", str, Sequence[str | None], Mapping[str, Any]], str | None]


@dataclass
class Ids:
    """What is known about integer tensors, and about what is made of them."""

    spreads: dict[str, tuple[tuple[float, float], ...]] = field(default_factory=dict)  # where those of sources lie, as it is declared
    functions: dict[str | None, Any] = field(default_factory=dict)  # what tensors are functions of, where it was asked for
    witnesses: dict[Any, str] = field(default_factory=dict)  # the first tensor that has the elements of an integer tensor in an order
    spelled: dict[str, Op] = field(default_factory=dict)  # lookups that are written otherwise

    def forget(self) -> None:
        """Tensors get other names."""
        for known in (self.functions, self.witnesses, self.spelled):
            known.clear()


class Emitter:
    """The program of one rank under construction."""

    def __init__(self, table: OpTable = OPS, rewritten: Rewriting | None = None):
        self.table = table
        self._rewritten = rewritten  # an op in another way, if there is one
        self.ops: list[Op] = []
        self.tensors: dict[str, TensorType] = {}
        self.made: dict[str | None, Op] = {}  # tensor → the op that makes it
        self.place = Place()
        self.label = "op"
        self.prefix = "before/"  # of names, until the step begins
        self.apart = False  # flat memory is followed piece by piece
        self.masks: list[str] = []  # of dropout, in the order in which they are drawn
        self.nonnegative: set[str] = set()  # sources of integers that are never negative
        self.reserved: set[str] = set()  # names that no op's result gets: state that may become a source has them
        self.bounds: dict[str, tuple[int, int]] = {}  # of sources of integers: the smallest and the largest
        self.intervals: dict[str, tuple[int, int] | None] = {}  # the same of what was made from them, where it was asked for
        self.image: Callable[[Emitter, str], tuple[int, int] | None] | None = None  # the same of functions of one integer
        self.ids = Ids()
        self._numbers: dict[str, int] = {}
        self._constants: dict[tuple[Any, ...], str] = {}
        self._fingerprints: dict[str, str] = {}

    @property
    def shared(self) -> bool:
        """Whether all ranks run this program: what holds for what a rank sends holds for what it receives."""
        return False

    def column(self, value: Any) -> tuple[Any, ...]:
        """What an attribute is on every rank that runs this program (one entry if it is the same)."""
        return (value,)

    def begin(self) -> None:
        """The step begins: its names have no prefix, and its literals are its own."""
        self.prefix = ""
        self._constants.clear()

    def next_step(self, wanted: Iterable[str]) -> tuple[Emitter, dict[str, str]]:
        """An emitter for the step after this one, and the names there of those wanted tensors that follow from constants alone.

        All other tensors are gone: they depend on what this step was given."""
        constant: set[str] = set()
        for op in self.ops:
            if not self.talks(op) and all(i in constant for i in op.inputs if i is not None):
                constant.update(op.outputs)
        needed = constant.intersection(wanted)
        for op in reversed(self.ops):
            if not needed.isdisjoint(op.outputs):
                needed.update(i for i in op.inputs if i is not None)
        made = Emitter(self.table, self._rewritten)
        made.image = self.image
        names: dict[str, str] = {}
        for op in self.ops:
            if needed.isdisjoint(op.outputs):
                continue
            for o in op.outputs:
                names[o] = made.declare(made.fresh(o.removeprefix(made.prefix)), self.tensors[o])
            inputs = tuple(None if i is None else names[i] for i in op.inputs)
            copy = replace(op, inputs=inputs, outputs=tuple(names[o] for o in op.outputs))
            made.ops.append(copy)
            made.made.update(dict.fromkeys(copy.outputs, copy))
        return made, names

    def settle(self, names: Mapping[str, str], unknown: Iterable[str]) -> set[str]:
        """Tensors are called by the names of sources from now on; what still depends on unknown ones."""
        gone = {n for n in unknown if n not in names}
        for i, op in enumerate(self.ops):
            if any(n in names for n in op.inputs if n is not None):
                self.ops[i] = op = replace(op, inputs=tuple(None if n is None else names.get(n, n) for n in op.inputs))
                self.made.update(dict.fromkeys(op.outputs, op))
            if not gone.isdisjoint(n for n in op.inputs if n is not None):
                gone.update(o for o in op.outputs if o not in names)
        self._fingerprints.clear()
        self.ids.forget()
        return gone

    def talks(self, op: Op) -> bool:
        definition = self.table.definitions.get(op.name)
        return definition is not None and (definition.collective or definition.point_to_point)

    def by_zero(self, ops: Sequence[Op]) -> set[Source | None]:
        """Lines that multiply what a program computes or is given by a literal 0: what acts through the product alone does not show."""
        constants: dict[str | None, bool] = {}  # what follows from constants alone → whether it is 0
        found: set[Source | None] = set()
        for op in ops:
            if not self.talks(op) and all(i in constants for i in op.inputs):
                constants.update(dict.fromkeys(op.outputs, op.name == "full" and op.get("value") == 0))
            elif op.name == "mul" and (op.get("value") == 0 or any(constants.get(i) for i in op.inputs)):
                found.add(op.source)
        return found

    def is_constant(self, name: str) -> bool:
        """Whether a tensor follows from constants alone."""
        seen, waiting = set[str](), [name]
        while waiting:
            op = self.made.get(waiting.pop())
            if op is None or self.talks(op):
                return False
            waiting += [i for i in op.inputs if i is not None and i not in seen]
            seen.update(waiting)
        return True

    def fresh(self, base: str) -> str:
        base = self.prefix + base
        n = self._numbers.get(base, 0)
        name = base if n == 0 else f"{base}.{n}"
        while name in self.tensors or name in self.reserved:
            n += 1
            name = f"{base}.{n}"
        self._numbers[base] = n + 1
        return name

    def declare(self, name: str, kind: TensorType) -> str:
        if name in self.tensors:
            raise ValueError(f"there is a tensor {name!r} already")
        self.tensors[name] = kind
        return name

    def op(self, name: str, inputs: Sequence[str | None], attrs: Mapping[str, Any] | None = None, label: str | None = None) -> str:
        """Append an op with one result."""
        other = None if self._rewritten is None else self._rewritten(self, name, inputs, attrs or {})
        return self.several(name, inputs, attrs, label)[0] if other is None else other

    def several(
        self, name: str, inputs: Sequence[str | None], attrs: Mapping[str, Any] | None = None, label: str | None = None
    ) -> tuple[str, ...]:
        """Append an op; types come from its definition."""
        pairs = attributes(attrs or {})
        try:
            lowered = self.table.lower(name, dict(pairs), tuple(None if i is None else self.tensors[i] for i in inputs))
        except OpError as error:
            raise Unmapped(f"{error}") from error
        base = f"{self.place.module}/{label or self.label}" if self.place.module else (label or self.label)
        outputs = tuple(self.declare(self.fresh(base), t) for t in lowered.types)
        op = Op(name, tuple(inputs), outputs, pairs, self.place.phase, None, self.place.source)
        self.ops.append(op)
        self.made.update(dict.fromkeys(outputs, op))
        return outputs

    def communicate(self, name: str, inputs: Sequence[str], attrs: Mapping[str, Any], kind: TensorType | None) -> str | None:
        """Append communication; `kind` is the type of its result."""
        base = f"{self.place.module}/{name}" if self.place.module else name
        outputs = () if kind is None else (self.declare(self.fresh(base), kind),)
        op = Op(name, tuple(inputs), outputs, attributes(attrs), self.place.phase, None, self.place.source)
        self.ops.append(op)
        self.made.update(dict.fromkeys(outputs, op))
        return outputs[0] if outputs else None

    def shape(self, name: str) -> tuple[int, ...]:
        return self.tensors[name].shape

    def kind(self, name: str) -> str:
        return self.tensors[name].kind

    def full(self, shape: tuple[int, ...], value: Any, dtype: str, made: Place | None = None) -> str:
        """A literal everywhere, computed at `made` if that is known; equal ones are made once."""
        kind = DTYPES[dtype]
        if kind == "bool":
            value = bool(value)
        elif kind == "int":
            value = int(value)
        key = (shape, value, type(value), dtype, made)
        if key not in self._constants:
            place, self.place = self.place, made or Place(phase=self.place.phase)
            self._constants[key] = self.op("full", (), {"shape": shape, "value": value, "dtype": dtype}, "constant")
            self.place = place
        return self._constants[key]

    def fingerprint(self, name: str) -> str:
        """Equal of two tensors only if they are the same function of the same sources."""
        left = [name]
        while left:
            at = left[-1]
            op = self.made.get(at)
            more = [] if op is None else [str(i) for i in op.inputs if i is not None and i not in self._fingerprints]
            if more and at not in self._fingerprints:
                left += more
                continue
            left.pop()
            inputs = () if op is None else tuple(i if i is None else self._fingerprints[i] for i in op.inputs)
            parts = (at,) if op is None else (op.name, op.attrs, op.outputs.index(at), inputs, self.tensors[at])
            self._fingerprints[at] = hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
        return self._fingerprints[name]

    def mask(self, kind: TensorType, keep: float) -> str | None:
        """A random mask as a source: by the module that draws it, and how many it has drawn. None outside of the step's forward pass."""
        if self.prefix or self.place.phase != "forward":
            return None
        name = mask_name(self.place.module, keep, self.masks)
        self.masks.append(self.declare(name, kind))
        return name

    def cast(self, name: str, dtype: str) -> str:
        return name if self.tensors[name].dtype == dtype else self.op("to", (name,), {"dtype": dtype})

    def reshape(self, name: str, shape: tuple[int, ...]) -> str:
        return name if self.tensors[name].shape == shape else self.op("reshape", (name,), {"shape": shape})

    def steps(self, name: str, steps: Iterable[tuple[str, Mapping[str, Any]]]) -> str:
        for op, attrs in steps:
            name = self.op(op, (name,), attrs)
        return name

    def program(
        self,
        name: str,
        inputs: Sequence[str],
        parameters: Sequence[str],
        state: Sequence[str],
        outputs: Sequence[Output],
        domains: Mapping[str, Domain],
    ) -> Program:
        """What was written, without ops that nothing needs. Communication is always kept: others take part in it."""
        needed = {o.tensor for o in outputs}
        kept: list[Op] = []
        for op in reversed(self.ops):
            if self.talks(op) or any(o in needed for o in op.outputs):
                kept.append(op)
                needed.update(i for i in op.inputs if i is not None)
        kept.reverse()
        sources = (*inputs, *parameters, *state)
        made = {o for op in kept for o in op.outputs}
        tensors = {n: t for n, t in self.tensors.items() if n in made or n in sources}
        return Program(name, tensors, tuple(inputs), tuple(parameters), tuple(state), tuple(kept), tuple(outputs), {}, dict(domains))
