"""Types of an op's results from its definition, or why it has none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainverify.check.findings import Severity
from trainverify.graph.program import Op, Value, frozen
from trainverify.graph.types import DTYPES, TensorType
from trainverify.ops.table import OpDef, OpError, OpTable, check_arity, check_attributes, check_literals

Types = tuple[TensorType | None, ...]


@dataclass(frozen=True)
class Problem:
    code: str
    message: str
    severity: Severity = "error"


class Operators:
    """One operator table, and a memo over all bodies of a run."""

    def __init__(self, table: OpTable):
        self.table = table
        self._definitions: dict[str, OpDef | None] = {}
        self._known: dict[Any, tuple[TensorType, ...] | Problem | None] = {}

    def definition(self, name: str) -> OpDef | None:
        if name not in self._definitions:
            try:
                self._definitions[name] = self.table[name]
            except OpError:
                self._definitions[name] = None
        return self._definitions[name]

    def results(self, op: Op, attrs: Mapping[str, Value], inputs: Types, members: int) -> tuple[TensorType, ...] | Problem | None:
        """Types of the results; None where another rank decides them (a broadcast that this rank only receives)."""
        try:
            check_literals(op.name, attrs)
        except OpError as error:
            return Problem("TV106", str(error))
        key = (op.name, repr(attrs), inputs, members)
        if key not in self._known:
            self._known[key] = self._results(op, attrs, inputs, members)
        return self._known[key]

    def _results(self, op: Op, attrs: Mapping[str, Value], inputs: Types, members: int) -> tuple[TensorType, ...] | Problem | None:
        definition = self.definition(op.name)
        assert definition is not None
        for name, value in attrs.items():
            if definition.attribute(name) is None:
                known = ", ".join(a.name for a in definition.attributes) or "none"
                return Problem("TV106", f"{op.name} has no attribute {name!r} (it has: {known})", "unsupported")
            try:
                frozen(value)
            except TypeError as error:
                return Problem("TV106", f"{op.name}: {error}")
        try:
            check_attributes(definition, attrs)
        except OpError as error:
            return Problem("TV106", str(error))
        if definition.collective and definition.senders == "root" and all(t is None for t in inputs):
            return None
        try:
            if definition.point_to_point:
                return self._message(definition, attrs, inputs)
            return self.table.lower(op.name, attrs, inputs, members).types
        except OpError as error:
            return Problem("TV105", str(error))
        except MemoryError:
            raise
        except Exception as error:  # an operator of the user may raise anything
            shown = ", ".join("-" if t is None else str(t) for t in inputs)
            return Problem("TV105", f"{op.name}({shown}): {type(error).__name__}: {error}")

    def _message(self, definition: OpDef, attrs: Mapping[str, Any], inputs: Types) -> tuple[TensorType, ...] | Problem:
        check_arity(definition, [t is not None for t in inputs])
        if definition.attribute("shape") is None:
            return ()
        shape, dtype = attrs["shape"], attrs.get("dtype", "f32")
        made = TensorType(shape, dtype)
        bad = malformed(made)
        return (made,) if bad is None else Problem("TV106", f"{definition.name}: {bad}")


def malformed(kind: object) -> str | None:
    """What is wrong with a type, if anything."""
    if not isinstance(kind, TensorType):
        return f"{kind!r} is not a type"
    if not isinstance(kind.dtype, str) or kind.dtype not in DTYPES:
        return f"dtype {kind.dtype!r} is not one of {', '.join(DTYPES)}"
    if not isinstance(kind.shape, tuple) or any(type(s) is not int or s < 0 for s in kind.shape):
        return f"shape {kind.shape!r} is not a tuple of sizes"
    return None
