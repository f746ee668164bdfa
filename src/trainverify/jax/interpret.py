"""Running through a jaxpr: every equation becomes operators of our program, by a row of the mapping or as control flow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

import jax
from trainverify.graph.program import Phase, Source
from trainverify.graph.types import TensorType
from trainverify.jax import beside
from trainverify.jax.constants import constant, whole_numbers
from trainverify.jax.emit import RankEmitter
from trainverify.jax.hlo.text import Aval
from trainverify.jax.lines import phase_of, where
from trainverify.jax.lowered import check, lowered
from trainverify.jax.mappings import MAPPINGS, communication, shaping
from trainverify.jax.mappings.table import Arguments, Row
from trainverify.jax.places import Free, Sharded
from trainverify.jax.randomness import key_result, refuse_other_laws
from trainverify.jax.ranges import bounds, within
from trainverify.jax.values import DTYPES, Grid, Number, Opaque, Table, Value, kind_of, lost
from trainverify.translate.emit import Place, Unmapped
from trainverify.translate.integers import holds, wraps
from trainverify.translate.literals import Literals

Item = Value | Sharded | Free
Handler = Callable[["Interpreter", Any, list[Item]], Sequence[Item]]


@dataclass(frozen=True)
class Missing:
    """A primitive without a meaning here: how often, why, and where first."""

    count: int
    reason: str
    source: Source | None


def type_of(aval: Any) -> TensorType:
    name = str(aval.dtype)
    return TensorType(tuple(aval.shape), DTYPES.get(name, "i64"))


def unknown_type(aval: Any) -> str | None:
    name = str(aval.dtype)
    return None if name in DTYPES else f"values of type {name}"


class Interpreter:
    """One pass over a jaxpr for the ranks of an emitter. `handlers` run what contains programs, and what sees whole arrays."""

    def __init__(
        self,
        e: RankEmitter,
        literal: Literals,
        handlers: Mapping[str, Handler],
        rows: Mapping[str, Row] = MAPPINGS,
        meanings: Mapping[str, Callable[..., Any]] | None = None,
    ):
        self.e, self.literal, self.rows, self.handlers = e, literal, rows, handlers
        self.meanings = dict(meanings or {})
        self.used: set[str] = set()  # meanings
        self.calls: Counter[str] = Counter()
        self.missing: dict[str, Missing] = {}
        self.primitives: dict[str, Any] = {}  # of JAX, by name
        self.phase: Phase = "forward"
        self.inside = False  # of a formula: what it writes has the place of the call

    def closed(self, jaxpr: ClosedJaxpr, args: Sequence[Item]) -> list[Item]:
        return self.run(jaxpr.jaxpr, [self.constant(c) for c in jaxpr.consts], args)

    def constant(self, value: Any) -> Item:
        found = constant(value, self.literal)
        if not isinstance(found, np.ndarray):
            return found
        dtype = DTYPES[str(value.dtype)]
        if (rule := whole_numbers(found)) is not None and kind_of(dtype) == "real":
            return self.e.cast(self.e.tensor(rule), dtype)
        return self.closed_over(found, dtype)

    def closed_over(self, data: np.ndarray[Any, Any], dtype: str) -> Item:
        """An array as an input; where it is infinite, that is written: inputs are real numbers."""
        if np.isnan(data).any():
            return Opaque("an array that the code closes over has elements that are no numbers")
        made = self.e.closed_over(np.where(np.isinf(data), 0, data), dtype)
        for value in sorted({float(v) for v in data[np.isinf(data)]}):
            mask = self.e.closed_over(data == value, "bool")
            made = self.e.op("where", (mask, self.e.full((), value, dtype), made))
        return made

    def run(self, jaxpr: Jaxpr, consts: Sequence[Item], args: Sequence[Item]) -> list[Item]:
        env: dict[Any, Item] = {}
        env.update(zip(jaxpr.constvars, consts, strict=True))
        env.update(zip(jaxpr.invars, args, strict=True))

        def read(atom: Any) -> Item:
            return self.constant(_array(atom)) if isinstance(atom, Literal) else env[atom]

        for eqn in jaxpr.eqns:
            results = self.equation(eqn, [read(v) for v in eqn.invars])
            env.update(zip(eqn.outvars, results, strict=True))
        return [read(v) for v in jaxpr.outvars]

    def equation(self, eqn: Any, given: list[Item]) -> Sequence[Item]:
        """The results of one equation; without a meaning they are opaque, and the primitive is noted."""
        name, outer, place, label = eqn.primitive.name, self.phase, self.e.place, self.e.label
        if not self.inside:
            source, function, variable = where(eqn.source_info)
            self.phase = phase_of(eqn.source_info, outer)
            self.e.place = Place(source or place.source, function or place.module, self.phase)
            self.e.label = variable or name
        self.calls[name] += 1
        self.primitives.setdefault(name, eqn.primitive)
        try:
            refuse_other_laws(eqn, given)
            found = self.meaning(eqn, given)
            if found is None and (key := key_result(self.e, name, given, eqn)) is not None:
                found = [key]
            if found is None:
                handler = self.handlers.get(name)
                found = handler(self, eqn, given) if handler is not None else self.primitive(eqn, given)
        except Unmapped as error:
            self.note(name, str(error))
            found = [Opaque(f"{name}: {error}") for _ in eqn.outvars]
        finally:
            self.phase, self.e.place, self.e.label = outer, place, label
        return found

    def note(self, name: str, reason: str) -> None:
        old = self.missing.get(name)
        self.missing[name] = Missing(1, reason, self.e.place.source) if old is None else replace(old, count=old.count + 1)

    def primitive(self, eqn: Any, given: list[Item]) -> Sequence[Item]:
        """A row of the mapping on values that a rank has."""
        values = [v for v in given if not isinstance(v, Sharded | Free)]
        assert len(values) == len(given), eqn.primitive.name
        types = tuple(type_of(v.aval) for v in eqn.invars)
        return self.apply(eqn.primitive.name, values, eqn.params, types, tuple(v.aval for v in eqn.outvars))

    def apply(
        self, name: str, values: Sequence[Value], params: Mapping[str, Any], types: Sequence[TensorType], avals: Sequence[Any]
    ) -> list[Value]:
        if name == "select_n" and isinstance(which := values[0], Grid) and which.literal is not None:
            chosen = values[1 + min(max(which.literal, 0), len(values) - 2)]  # what is not chosen does not matter
            values = [which, *(chosen for _ in values[1:])]
        opaque = next((v for v in values if isinstance(v, Opaque)), None)
        if opaque is not None:
            return [lost(opaque) for _ in avals]
        row = self.rows.get(name)
        if row is None:
            raise Unmapped("no mapping")
        strange = next((t for v in avals if (t := unknown_type(v)) is not None), None)
        if strange == "values of type uint32" and (name in _MOVES or all(isinstance(v, Grid) for v in values)):
            return self._unsigned(name, values, params, types, avals)
        if strange == "values of type uint32" and name == "convert_element_type" and within(self.e, values[0], 0, (1 << 32) - 1):
            return [values[0]]  # the same numbers
        if strange is not None:
            raise Unmapped(strange)
        start = len(self.e.ops)
        a = Arguments(self.e, name, tuple(values), params, tuple(types), tuple(type_of(v) for v in avals), self.literal)
        result = row(a)
        if left := a.left():
            raise Unmapped(f"parameter {left[0]}={params[left[0]]!r}")
        found = [result] if isinstance(result, str | Number | Grid | Table | Opaque) else list(result)
        made = [self.checked(v, kind) for v, kind in zip(found, a.out, strict=True)]
        if name not in ON_RANKS:
            beside.note(self.e, name, self.primitives.get(name), row, values, params, a)
        elif name in self.primitives:
            check(self.e, self.e.ops[start:], lambda: lowered(self.primitives[name], params, types, self.e.mesh))
        return made

    def everywhere(self, item: Sharded | Free) -> Value:
        """An array that lies on a mesh, whole on every rank."""
        raise Unmapped("an array that lies on a mesh")

    def checked(self, value: Value, kind: TensorType) -> Value:
        """A result of the type that JAX says. Integers that its dtype does not have would wrap around."""
        if isinstance(value, Opaque):
            return value
        made = self.e.tensors[value] if isinstance(value, str) else TensorType(value.shape, value.dtype)
        if made.shape != kind.shape or made.kind != kind.kind:
            raise Unmapped(f"{made} where JAX has {kind}")
        if isinstance(value, str):
            value = self.e.cast(value, kind.dtype)
            outside = wraps(self.e, value)
        else:
            value = value if value.dtype == kind.dtype else replace(value, dtype=kind.dtype)
            found = None if isinstance(value, Number) else bounds(self.e, value)
            outside = found is not None and not holds(kind.dtype, found)
        if outside:
            raise Unmapped(f"integers that may wrap around: they may not fit in {kind.dtype}")
        return value

    def fitting(self, name: str, kind: TensorType) -> str:
        """The same of a tensor that no row makes."""
        found = self.checked(name, kind)
        assert isinstance(found, str)
        return found

    def _unsigned(
        self, name: str, values: Sequence[Value], params: Mapping[str, Any], types: Sequence[TensorType], avals: Sequence[Any]
    ) -> list[Value]:
        """Integers that are known to be unsigned ones, if they do not wrap around."""
        signed = [Aval(tuple(v.shape), "int64") if str(v.dtype) == "uint32" else v for v in avals]
        found = self.apply(name, values, params, types, signed)
        if any(v is not w and not within(self.e, x, 0, (1 << 32) - 1) for v, w, x in zip(avals, signed, found, strict=True)):
            raise Unmapped("values of type uint32")
        return found

    def meaning(self, eqn: Any, given: list[Item]) -> Sequence[Item] | None:
        """What the user says that a kernel computes."""
        if not self.meanings:
            return None
        name = kernel_name(eqn)
        if name not in self.meanings:
            return None
        self.used.add(name)
        shapes = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars]
        return self.closed(jax.make_jaxpr(self.meanings[name])(*shapes), given)


def kernel_name(eqn: Any) -> str:
    """The name of a kernel or custom call, else of the primitive."""
    primitive = str(eqn.primitive.name)
    if primitive not in ("pallas_call", "ffi_call", "custom_call"):
        return primitive
    info = eqn.params.get("name_and_src_info")
    return str(eqn.params.get("name") or eqn.params.get("target_name") or (primitive if info is None else info.name))


def _array(atom: Any) -> Any:
    value = atom.val
    return value if hasattr(value, "dtype") and hasattr(value, "shape") else np.asarray(value, atom.aval.dtype)


ON_RANKS: Final = frozenset((*communication.ROWS, "pvary", "pcast", "mesh_cast", "sharding_constraint", "reshard"))  # not run on one device
_MOVES: Final = frozenset((*shaping.ROWS, "sort", "select_n"))  # integers that stay what they are
MOST_STEPS: Final = 4096  # of a loop that is unrolled


__all__ = ["MOST_STEPS", "Handler", "Interpreter", "Item", "Missing", "type_of"]
