"""Programs: single-assignment lists of ops in execution order, with function bodies for repeated structure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from types import MappingProxyType
from typing import Any, Final, Literal

from trainverify.graph.types import TensorType

Phase = Literal["forward", "backward", "optimizer", "metric"]
PHASES: Final[tuple[Phase, ...]] = ("forward", "backward", "optimizer", "metric")
Role = Literal["loss", "gradient", "parameter", "state", "metric", "declared"]  # "declared": a lineage claim to check, never in files
CALL: Final = "call"
EMPTY: Final[Mapping[str, Any]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Source:
    """Where the user wrote an op; `caller` is the line that led there, with its own caller."""

    file: str
    line: int
    caller: Source | None = field(default=None, compare=False)

    @property
    def callers(self) -> tuple[Source, ...]:
        """The lines that led here, the nearest first."""
        return () if self.caller is None else (self.caller, *self.caller.callers)

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True, slots=True)
class Ref:
    """An attribute value that every rank (or call) binds for itself."""

    name: str

    def __str__(self) -> str:
        return f"${self.name}"


Value = None | bool | int | float | Fraction | str | Ref | tuple["Value", ...]
Attrs = tuple[tuple[str, Value], ...]


@dataclass(frozen=True, slots=True)
class Op:
    """One operation. `forward` is the first output of the forward op that a backward op belongs to."""

    name: str
    inputs: tuple[str | None, ...]
    outputs: tuple[str, ...]
    attrs: Attrs = ()
    phase: Phase = "forward"
    forward: str | None = None
    source: Source | None = None

    @property
    def attributes(self) -> dict[str, Value]:
        return dict(self.attrs)

    def get(self, name: str, default: Any = None) -> Any:
        for key, value in self.attrs:
            if key == name:
                return value
        return default

    def with_attrs(self, **changes: Value) -> Op:
        return replace(self, attrs=attributes({**self.attributes, **changes}))

    def __str__(self) -> str:
        args = [i or "-" for i in self.inputs] + [f"{k}={show_value(v)}" for k, v in self.attrs]
        left = f"{', '.join(self.outputs)} = " if self.outputs else ""
        return f"{left}{self.name}({', '.join(args)})"


def attributes(values: Mapping[str, Any]) -> Attrs:
    """Attribute pairs in canonical order; lists become tuples."""
    return tuple((k, frozen(v)) for k, v in sorted(values.items()))


def frozen(value: Any) -> Value:
    if isinstance(value, list | tuple):
        return tuple(frozen(v) for v in value)
    if value is None or isinstance(value, bool | int | float | Fraction | str | Ref):
        return value
    raise TypeError(f"{value!r} cannot be an attribute")


def show_value(value: Value) -> str:
    if isinstance(value, tuple):
        return "[" + ", ".join(show_value(v) for v in value) + "]"
    return str(value)


@dataclass(frozen=True, slots=True)
class Domain:
    """What an input is assumed to hold: `ids` in [0, size) or `ignore`; `nonnegative`; `positive`; `indicator` (0 or 1).

    With `bits`, nonnegative numbers are at most 1 − 2^-bits: uniform random numbers with so many bits.
    """

    kind: Literal["ids", "nonnegative", "positive", "indicator"]
    size: int | None = None
    ignore: int | None = None
    bits: int | None = None

    @property
    def most(self) -> float:
        """The largest real number."""
        return math.inf if self.bits is None else 1 - 2.0**-self.bits

    def __str__(self) -> str:
        if self.kind != "ids":
            return self.kind + ("" if self.bits is None else ", below 1")
        return f"ids in [0, {self.size})" + ("" if self.ignore is None else f" or {self.ignore} (ignored)")


@dataclass(frozen=True, slots=True)
class Output:
    """A result of the step. `of` is the parameter or state it belongs to, or the metric's name."""

    tensor: str
    role: Role
    of: str | None = None

    def __str__(self) -> str:
        match self.role:
            case "loss":
                return "loss"
            case "gradient":
                return f"gradient of {self.of}"
            case "declared":
                return f"declared lineage of {self.tensor}"
            case "metric":
                return f"metric {self.of}"
            case _:
                return f"{'unchanged' if self.tensor == self.of else 'updated'} {self.role} {self.of}"


@dataclass(frozen=True)
class Function:
    """A body shared by many calls; its tensors are local to a call."""

    name: str
    tensors: Mapping[str, TensorType]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    ops: tuple[Op, ...]

    @cached_property
    def sorts(self) -> list[int]:
        return sorts(self.tensors, self.ops)

    def __repr__(self) -> str:
        return f"<function {self.name}: {len(self.ops)} ops>"


@dataclass(frozen=True)
class Program:
    """A training step, or one device's part of it."""

    name: str
    tensors: Mapping[str, TensorType]
    inputs: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()
    state: tuple[str, ...] = ()
    ops: tuple[Op, ...] = ()
    outputs: tuple[Output, ...] = ()
    functions: Mapping[str, Function] = field(default_factory=dict)
    domains: Mapping[str, Domain] = field(default_factory=dict)

    @property
    def sources(self) -> tuple[str, ...]:
        """Everything that is there before the first op."""
        return (*self.inputs, *self.parameters, *self.state)

    @cached_property
    def sorts(self) -> list[int]:
        return sorts(self.tensors, self.ops)

    def output(self, role: Role, of: str | None = None) -> str | None:
        return next((o.tensor for o in self.outputs if o.role == role and o.of == of), None)

    def __repr__(self) -> str:
        return f"<program {self.name}: {len(self.ops)} ops, {len(self.outputs)} outputs>"

    def __str__(self) -> str:
        return "\n".join(lines(self))


ALONE: Final = -1  # the sort of an op that is like no other


def sorts(tensors: Mapping[str, TensorType], ops: Sequence[Op]) -> list[int]:
    """What ops are without the names of their tensors, as numbers: equal for the same op, attributes, types and phase."""
    known: dict[Any, int] = {}
    types: dict[str | None, int] = {}
    by_id: dict[int, int] = {}
    for name, kind in tensors.items():
        number = by_id.get(id(kind))
        if number is None:
            number = by_id[id(kind)] = _number(known, kind, kind)
        types[name] = number
    types[None] = 0
    attrs_of: dict[int, int] = {}
    found: list[int] = []
    for op in ops:
        try:
            attrs = attrs_of.get(id(op.attrs))
            if attrs is None:
                attrs = attrs_of[id(op.attrs)] = _number(known, op.attrs, (op.attrs, _classes(op.attrs)))
            key = (op.name, op.phase, attrs, len(op.inputs), *[types[i] for i in op.inputs], *[types[o] for o in op.outputs])
            number = known.get(key)
            if number is None:
                number = known[key] = len(known) + 1
        except (KeyError, TypeError):
            number = ALONE
        found.append(number)
    return found


def _number(known: dict[Any, int], item: object, key: object) -> int:
    try:
        return known.setdefault(key, len(known) + 1)
    except TypeError:  # not well-formed: like nothing else
        return known.setdefault(("itself", id(item)), len(known) + 1)


def _classes(attrs: Attrs) -> tuple[type, ...]:
    """The classes of the values of attributes: 1 is not True."""
    found = [v.__class__ for _, v in attrs]
    if tuple in found:
        found += [x.__class__ for _, v in attrs if v.__class__ is tuple for x in _flat(v)]
    return tuple(found)


def _flat(values: tuple[Any, ...]) -> Iterator[Any]:
    for v in values:
        if v.__class__ is tuple:
            yield from _flat(v)
        else:
            yield v


def lines(program: Program) -> Iterator[str]:
    """The program as text."""
    yield f"program {program.name}"
    for title, names in (("input", program.inputs), ("parameter", program.parameters), ("state", program.state)):
        for n in names:
            yield f"  {title} {n}: {program.tensors[n]}" + (f"  # {program.domains[n]}" if n in program.domains else "")
    for f in program.functions.values():
        yield f"  function {f.name}({', '.join(f'{n}: {f.tensors[n]}' for n in f.inputs)}) -> {', '.join(f.outputs)}"
        for op in f.ops:
            yield f"    {_line(op, f.tensors)}"
    for op in program.ops:
        yield f"  {_line(op, program.tensors)}"
    for o in program.outputs:
        yield f"  output {o.tensor}: {o}"


def _line(op: Op, tensors: Mapping[str, TensorType]) -> str:
    types = ", ".join(str(tensors[o]) if o in tensors else "?" for o in op.outputs)
    where = f"  # {op.phase}" + (f", {op.source}" if op.source else "")
    return f"{op}{': ' + types if types else ''}{where}"


def resolve(value: Value, bindings: Mapping[str, Value]) -> Value:
    """A value with its references replaced where `bindings` has them."""
    if isinstance(value, Ref):
        return bindings.get(value.name, value)
    if isinstance(value, tuple):
        return tuple(resolve(v, bindings) for v in value)
    return value


def bind(op: Op, bindings: Mapping[str, Value]) -> Op:
    if not bindings or not refers(op):
        return op
    return replace(op, attrs=tuple((k, resolve(v, bindings)) for k, v in op.attrs))


def has_ref(value: Value) -> bool:
    if isinstance(value, tuple):
        for v in value:  # noqa: SIM110 (on the way of every op)
            if isinstance(v, Ref) or (isinstance(v, tuple) and has_ref(v)):
                return True
        return False
    return isinstance(value, Ref)


def refers(op: Op) -> bool:
    """Whether some attribute of an op has a reference."""
    for _, v in op.attrs:  # noqa: SIM110 (on the way of every op)
        if isinstance(v, Ref) or (isinstance(v, tuple) and has_ref(v)):
            return True
    return False


def refs(value: Value) -> list[Ref]:
    """The references in a value."""
    if isinstance(value, Ref):
        return [value]
    return [r for v in value for r in refs(v)] if isinstance(value, tuple) else []


def call_bindings(call: Op) -> dict[str, Value]:
    """What a call binds for its body: every attribute but the function's name."""
    return {k: v for k, v in call.attrs if k != "function"}


class CallError(Exception):
    """A call of a function that does not exist, does not fit, or contains itself."""


MAX_CALL_DEPTH: Final = 32


def inline(program: Program, functions: Mapping[str, Function] = EMPTY) -> Program:
    """The same program without calls; a tensor of the n-th call's body is named `function.n/tensor`."""
    bodies = {**functions, **program.functions}
    if not any(op.name == CALL for op in program.ops):
        return replace(program, functions={}) if program.functions else program
    tensors = dict(program.tensors)
    ops: list[Op] = []
    counts: dict[str, int] = {}

    def emit(op: Op, names: Mapping[str, str], bindings: Mapping[str, Value], depth: int) -> None:
        op = bind(op, bindings)
        outputs = tuple(names.get(o, o) for o in op.outputs)
        inputs = tuple(None if i is None else names.get(i, i) for i in op.inputs)
        if op.name != CALL:
            owner = None if op.forward is None else names.get(op.forward, op.forward)
            ops.append(replace(op, inputs=inputs, outputs=outputs, forward=owner))
            return
        body = bodies.get(str(op.get("function")))
        if body is None or depth > MAX_CALL_DEPTH:
            raise CallError(f"call of {op.get('function')!r}: " + ("no such function" if body is None else "nested too deeply"))
        if len(inputs) != len(body.inputs) or len(outputs) != len(body.outputs):
            raise CallError(f"call of {body.name!r} with {len(inputs)} inputs and {len(outputs)} outputs")
        n = counts[body.name] = counts.get(body.name, -1) + 1
        prefix = f"{body.name}.{n}/"
        inner = {t: prefix + t for t in body.tensors}
        while not tensors.keys().isdisjoint(inner.values()):  # a tensor of the program may be called so
            inner = {t: name + "'" for t, name in inner.items()}
        inner |= {k: v for k, v in zip(body.inputs, inputs, strict=True) if v is not None}
        produced = {o for b in body.ops for o in b.outputs}
        direct = {b: o for b, o in zip(body.outputs, outputs, strict=True) if b in produced}
        inner |= direct
        tensors.update({inner[t]: kind for t, kind in body.tensors.items() if t not in body.inputs})
        for step in body.ops:
            emit(step, inner, {**bindings, **call_bindings(op)}, depth + 1)
        for b, o in zip(body.outputs, outputs, strict=True):
            if direct.get(b) != o:  # an input passed through, or one tensor returned twice
                ops.append(Op("identity", (inner[b],), (o,), phase=op.phase, source=op.source))

    for op in program.ops:
        emit(op, {}, {}, 0)
    return replace(program, tensors=tensors, ops=tuple(ops), functions={})
