"""Operators: what a definition is, how it is declared, and how it becomes primitive nodes.

```python
@op("linear", "linear algebra", example="x[b,k] w[o,k] bias[o]")
def linear(x: Node, w: Node, bias: Node | None = None) -> Node: ...
```
Positional parameters annotated `Node` are tensors, keyword-only parameters are attributes; both are read
from the signature. `NAME.grad` exists for every operator and is derived, never written.

A collective is declared the same way over a *stacked* tensor: dimension 0 runs over the members of the
group in its order. `senders` / `receivers` say whose values those are (all members, or the root only).
"""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any, Final, Literal

from trainverify.graph.types import DTYPES, TensorType, result_dtype
from trainverify.primitives import node as F
from trainverify.primitives.node import Node, ShapeError
from trainverify.primitives.plain import compound, plain
from trainverify.primitives.vjp import vjp

GRAD: Final = ".grad"
LITERAL_BITS: Final = 4096  # of an integer attribute, or of either half of a fraction


class OpError(Exception):
    """An operator used in a way that its definition does not allow."""


class UnknownOp(OpError):
    """No operator of that name: unsupported, never skipped."""


@dataclass(frozen=True)
class Attribute:
    name: str
    type: Any
    default: Any = inspect.Parameter.empty

    @property
    def required(self) -> bool:
        return self.default is inspect.Parameter.empty

    def describe(self) -> str:
        kind = self.type.__name__ if isinstance(self.type, type) else str(self.type).replace("typing.", "")
        return kind if self.required else f"{kind} = {self.default!r}"


@dataclass(frozen=True)
class OpDef:
    """One operator; everything the program needs to know about it."""

    name: str
    family: str
    fn: Callable[..., Node | tuple[Node, ...]]
    tensors: tuple[str, ...]
    required: int
    variadic: bool
    attributes: tuple[Attribute, ...]
    collective: bool = False
    senders: Literal["all", "root"] = "all"
    receivers: Literal["all", "root"] = "all"
    point_to_point: bool = False
    gradient_of: OpDef | None = None
    doc: str = ""
    example: str = ""  # arguments to show it with: "x[b,k] w[o,k]; dim=1"

    def attribute(self, name: str) -> Attribute | None:
        return next((a for a in self.attributes if a.name == name), None)

    def __repr__(self) -> str:
        return f"<operator {self.name}>"


@dataclass(frozen=True)
class Lowered:
    """An operator at given types: primitive nodes from inputs to outputs."""

    inputs: tuple[Node | None, ...]
    outputs: tuple[Node, ...]
    types: tuple[TensorType, ...]
    windowed: Lowered | None = None  # the same with windows as one primitive, if there are any

    @property
    def adds(self) -> bool:
        """Whether it is the sum of its inputs, and nothing else."""
        node = self.outputs[0]
        return node.prim == "map" and node.attrs[0] == "add" and len(self.outputs) == 1 and node.args == self.inputs


def op(name: str, family: str, **flags: Any) -> Callable[[Callable[..., Any]], OpDef]:
    """Declare an operator. The function's signature is its interface, its docstring its description."""

    def declare(fn: Callable[..., Any]) -> OpDef:
        hints = typing.get_type_hints(fn)
        tensors: list[str] = []
        required, variadic = 0, False
        attributes: list[Attribute] = []
        for p in inspect.signature(fn).parameters.values():
            if p.kind is p.VAR_POSITIONAL:
                variadic = True
            elif p.kind is p.KEYWORD_ONLY:
                if not (flags.get("collective") and p.name == "members"):
                    attributes.append(Attribute(p.name, hints[p.name], p.default))
            else:
                tensors.append(p.name)
                required += p.default is p.empty
        doc = inspect.getdoc(fn) or ""
        return OpDef(name, family, fn, tuple(tensors), required, variadic, tuple(attributes), doc=doc, **flags)

    return declare


def collective(name: str, **flags: Any) -> Callable[[Callable[..., Any]], OpDef]:
    return op(name, "communication", collective=True, **flags)


def _fits(value: Any, kind: Any) -> bool:
    """Whether an attribute value has a declared type; bool is not an int, an int is a float."""
    if kind is Any:
        return True
    if kind is None or kind is type(None):
        return value is None
    origin = typing.get_origin(kind)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, k) for k in typing.get_args(kind))
    if origin is Literal:
        return value in typing.get_args(kind)
    if origin is tuple:
        item, *rest = typing.get_args(kind)
        if rest and rest[0] is Ellipsis:
            return isinstance(value, tuple) and all(_fits(v, item) for v in value)
        return isinstance(value, tuple) and len(value) == 1 + len(rest) and all(map(_fits, value, (item, *rest)))
    if kind is float:
        return isinstance(value, int | float | Fraction) and not isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, kind)


def check_attributes(definition: OpDef, attrs: Mapping[str, Any]) -> None:
    for name, value in attrs.items():
        attribute = definition.attribute(name)
        if attribute is None:
            known = ", ".join(a.name for a in definition.attributes) or "none"
            raise OpError(f"{definition.name} has no attribute {name!r} (it has: {known})")
        if not _fits(value, attribute.type):
            raise OpError(f"{definition.name}: attribute {name} = {value!r} is not {attribute.describe()}")
    for attribute in definition.attributes:
        if attribute.required and attribute.name not in attrs:
            raise OpError(f"{definition.name} needs the attribute {attribute.name!r}")


def check_literals(name: str, attrs: Mapping[str, Any]) -> None:
    """Refuse numbers too long to be printed, compared and computed with."""
    for attribute, value in attrs.items():
        if (bits := longest(value)) > LITERAL_BITS:
            raise OpError(f"{name}: attribute {attribute} has a number of {bits} bits; the limit is {LITERAL_BITS}")


def longest(value: Any) -> int:
    """Bits of the longest number in a value."""
    kind = type(value)
    if kind is int:
        return int(value.bit_length())
    if kind is Fraction:
        return max(int(value.numerator.bit_length()), int(value.denominator.bit_length()))
    return max(map(longest, value), default=0) if kind is tuple else 0


def check_arity(definition: OpDef, present: list[bool]) -> None:
    n = len(present)
    if n < definition.required or (n > len(definition.tensors) and not definition.variadic):
        low, high = definition.required, len(definition.tensors)
        want = f"at least {low}" if definition.variadic else str(low) if low == high else f"{low} to {high}"
        raise OpError(f"{definition.name} takes {want} tensors, got {n}")
    every = definition.variadic and not definition.name.endswith(".grad")  # a derivative takes its operator's optional tensors as they are
    for i, here in enumerate(present):
        if not here and (every or i < definition.required):
            raise OpError(f"{definition.name}: tensor {i + 1 if definition.variadic else repr(definition.tensors[i])} is missing")


@dataclass(frozen=True)
class OpTable:
    """A fixed set of operators. `extended` makes a new table; none is ever changed."""

    definitions: Mapping[str, OpDef]
    _cache: dict[Any, Lowered] = field(default_factory=dict, repr=False, compare=False)

    def __repr__(self) -> str:
        return f"<{len(self.definitions)} operators>"

    def __iter__(self) -> Iterator[OpDef]:
        return iter(self.definitions.values())

    def __contains__(self, name: str) -> bool:
        return name in self.definitions or (name.endswith(GRAD) and name[: -len(GRAD)] in self.definitions)

    def extended(self, more: Iterable[OpDef]) -> OpTable:
        result = dict(self.definitions)
        for d in more:
            if d.name in result or d.name.endswith(GRAD):
                raise OpError(f"operator {d.name!r} exists already or is reserved")
            result[d.name] = d
        return OpTable(result)

    def __getitem__(self, name: str) -> OpDef:
        if name in self.definitions:
            return self.definitions[name]
        base = self.definitions.get(name[: -len(GRAD)]) if name.endswith(GRAD) else None
        if base is None or base.collective or base.point_to_point:
            raise UnknownOp(f"unknown operator {name!r}")
        return gradient(base)

    def lower(self, name: str, attrs: Mapping[str, Any], inputs: tuple[TensorType | None, ...], members: int = 0) -> Lowered:
        """The operator as primitive nodes; raises OpError when it does not fit.

        For a collective, `inputs` are the types that one member passes and `members` the size of the group:
        nodes get a leading dimension over members, the result types are one member's.
        """
        check_literals(name, attrs)
        key = (name, members, inputs, tuple((k, type(v), v) for k, v in sorted(attrs.items())), repr(sorted(attrs.items())))
        if (found := self._cache.get(key)) is None:
            found = self._cache[key] = _lower(self[name], attrs, inputs, members)
        return found


def _lower(definition: OpDef, attrs: Mapping[str, Any], inputs: tuple[TensorType | None, ...], members: int) -> Lowered:
    check_attributes(definition, attrs)
    check_arity(definition, [t is not None for t in inputs])
    if definition.point_to_point:
        raise OpError(f"{definition.name} has a meaning only together with its peer's op")
    lead = () if not definition.collective else (members,) if definition.senders == "all" else (1,)
    nodes = tuple(None if t is None else F.input_(i, lead + t.shape, t.kind) for i, t in enumerate(inputs))
    extra = {"members": members} if definition.collective else {}
    try:
        result = definition.fn(*nodes, **attrs, **extra)
        F.check_integers(F.topological(result if isinstance(result, tuple) else [result]))
    except (ShapeError, ArithmeticError, IndexError, TypeError, KeyError, ValueError) as error:
        shown = ", ".join("-" if t is None else str(t) for t in inputs)
        raise OpError(f"{definition.name}({shown}): {error}") from error
    outputs = list(result) if isinstance(result, tuple) else [result]
    outputs = F.rebuild([*outputs, *(n for n in nodes if n is not None)], _without_detach)
    count = len(outputs) - sum(n is not None for n in nodes)
    rest = iter(outputs[count:])
    fresh = tuple(None if n is None else next(rest) for n in nodes)
    dtypes = [t.dtype for t in inputs if t is not None]
    asked = attrs.get("dtype", None if (a := definition.attribute("dtype")) is None else a.default)
    drop = 1 if definition.collective else 0
    wish = asked if isinstance(asked, str) else None
    kinds = [TensorType(o.shape[drop:], result_dtype(o.kind, dtypes, wish)) for o in outputs[:count]]
    if definition.gradient_of is not None:  # a gradient has the type of what it is the gradient of
        kinds = [t for i in attrs["wrt"] if (t := inputs[i]) is not None]
    made = Lowered(fresh, tuple(outputs[:count]), tuple(kinds))
    return replace(_plain(made), windowed=made) if compound(made.outputs) else made


def _plain(lowered: Lowered) -> Lowered:
    """With windows written out."""
    given = [n for n in lowered.inputs if n is not None]
    found = iter(plain([*lowered.outputs, *given]))
    outputs = tuple(next(found) for _ in lowered.outputs)
    return Lowered(tuple(None if n is None else next(found) for n in lowered.inputs), outputs, lowered.types)


def _without_detach(node: Node, args: tuple[Node, ...]) -> Node:
    return args[0] if node.attrs[:1] == ("detach",) else Node(node.prim, args, node.attrs, node.shape, node.kind)


def gradient(base: OpDef) -> OpDef:
    """`NAME.grad`: forward inputs, then gradients of the outputs in `given`; returns gradients of inputs in `wrt`."""

    def fn(*tensors: Node | None, wrt: tuple[int, ...], given: tuple[int, ...] = (0,), **attrs: Any) -> tuple[Node, ...]:
        n = len(tensors) - len(given)
        check_arity(base, [t is not None for t in tensors[:n]])
        result = base.fn(*tensors[:n], **attrs)
        outputs = list(result) if isinstance(result, tuple) else [result]
        if any(not 0 <= i < len(outputs) for i in given) or any(not 0 <= i < n or tensors[i] is None for i in wrt):
            raise ShapeError("`given` or `wrt` names a tensor that the operator does not have")
        sources = [t for i in wrt if (t := tensors[i]) is not None]
        return tuple(vjp([outputs[i] for i in given], tensors[n:], sources))

    attributes = (Attribute("wrt", tuple[int, ...]), Attribute("given", tuple[int, ...], (0,)), *base.attributes)
    doc = f"Gradient of `{base.name}`."
    return OpDef(base.name + GRAD, base.family, fn, base.tensors, base.required, True, attributes, gradient_of=base, doc=doc)


def dtype_kind(dtype: str) -> str:
    if dtype not in DTYPES:
        raise ShapeError(f"unknown dtype {dtype!r}")
    return DTYPES[dtype]
