"""Whether an object is built of what the classes of `graph` say: the types of all fields, all the way down."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from functools import cache
from typing import Any, Literal

from trainverify.graph.lineage import Layout
from trainverify.graph.mesh import Mesh
from trainverify.graph.plan import Edit, Plan, Template
from trainverify.graph.program import Domain, Function, Op, Output, Program, Ref, Source
from trainverify.graph.types import TensorType

KNOWN = (Program, Plan, Template, Edit, Function, Op, Output, Domain, Ref, Source, TensorType, Layout, Mesh)


def malformed(value: object) -> str | None:
    """The first field that does not have its type; None if all have."""
    if not isinstance(value, Program | Plan):
        return f"{type(value).__name__} is not a program or plan"
    return _inside(value, type(value).__name__)


@cache
def _fields(kind: Any) -> tuple[tuple[str, Any], ...]:
    hints = typing.get_type_hints(kind)
    return tuple((f.name, hints[f.name]) for f in dataclasses.fields(kind))


def _inside(value: Any, where: str) -> str | None:
    kind: Any = type(value)
    for name, hint in _fields(kind):
        wrong = _unlike(getattr(value, name), hint, f"{where}.{name}")
        if wrong is not None:
            return wrong
    return None


def _unlike(value: Any, hint: Any, where: str) -> str | None:
    """Where a value is not what a hint says. What no hint describes further is not looked into."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        found = [_unlike(value, a, where) for a in args]
        return None if None in found else found[0]
    if origin is Literal:
        return None if any(type(value) is type(a) and value == a for a in args) else f"{where} is {value!r}"
    if origin is tuple:
        if not isinstance(value, tuple):
            return f"{where} is {type(value).__name__}, not a tuple"
        items = args[:1] * len(value) if args[1:] == (Ellipsis,) else args
        if len(items) != len(value):
            return f"{where} has {len(value)} parts"
        return next((w for i, (v, a) in enumerate(zip(value, items, strict=True)) if (w := _unlike(v, a, f"{where}[{i}]"))), None)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        if not isinstance(value, Mapping):
            return f"{where} is {type(value).__name__}, not a mapping"
        key, item = args
        found = [_unlike(k, key, where) or _unlike(v, item, f"{where}[{k!r}]") for k, v in value.items()]
        return next((w for w in found if w), None)
    if not isinstance(hint, type):
        return None
    if not isinstance(value, hint) or (hint in (int, float) and isinstance(value, bool)):
        return f"{where} is {type(value).__name__}, not {hint.__name__}"
    return _inside(value, where) if type(value) in KNOWN else None
