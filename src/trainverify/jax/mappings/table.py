"""Rows of the mapping: a primitive by its name, and a function from its operands and parameters to values of our program.

A row reads parameters by name, or says that one does not change values (`ignore`). A parameter that it does neither with must be
None, False or empty, else the call is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainverify.graph.types import TensorType
from trainverify.jax.emit import RankEmitter
from trainverify.jax.values import Grid, Number, Opaque, Table, Value, kind_of
from trainverify.translate.emit import Unmapped
from trainverify.translate.literals import Literals

Result = Value | Sequence[Value]


@dataclass
class Arguments:
    """The operands and parameters of one call."""

    e: RankEmitter
    name: str
    operands: tuple[Value, ...]
    params: Mapping[str, Any]
    types: tuple[TensorType, ...]  # of the operands
    out: tuple[TensorType, ...]
    literal: Literals
    _taken: set[str] = field(default_factory=set)

    def param(self, name: str, default: Any = None) -> Any:
        self._taken.add(name)
        return self.params.get(name, default)

    def ignore(self, *names: str) -> None:
        """Parameters about memory, devices, precision: they do not change values."""
        self._taken.update(names)

    def left(self) -> list[str]:
        return [n for n, v in self.params.items() if n not in self._taken and not _nothing(v)]

    def operand(self, i: int) -> Value:
        value = self.operands[i]
        if isinstance(value, Opaque):
            raise Unmapped(value.reason)
        return value

    def tensor(self, i: int) -> str:
        return self.e.tensor(self.operand(i))

    def kind(self, i: int) -> str:
        return self.types[i].kind

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the (first) result."""
        return self.out[0].shape

    @property
    def dtype(self) -> str:
        return self.out[0].dtype

    def known(self, i: int) -> Grid | Table | None:
        """Integers that every rank knows."""
        value = self.operand(i)
        return value if isinstance(value, Grid | Table) else None

    def number(self, i: int) -> Any:
        """The one number that an operand is everywhere, on all ranks; None if it is not."""
        value = self.operand(i)
        if isinstance(value, Number):
            return value.value
        return value.literal if isinstance(value, Grid) else None


def _nothing(value: Any) -> bool:
    return value is None or value is False or (isinstance(value, tuple | list | dict) and not value)


def shaped(value: Value, e: RankEmitter) -> tuple[int, ...]:
    """The shape of a value."""
    if isinstance(value, Opaque):
        raise Unmapped(value.reason)
    return e.shape(value) if isinstance(value, str) else value.shape


def is_real(a: Arguments, i: int = 0) -> bool:
    return kind_of(a.types[i].dtype) == "real"


Row = Callable[[Arguments], Result]
Table_ = dict[str, Row]


def rows() -> tuple[Table_, Callable[..., Callable[[Row], Row]]]:
    """A table and the decorator that adds rows to it: `@row("add", "add_any")`."""
    table: Table_ = {}

    def row(*names: str, ignores: Iterable[str] = ()) -> Callable[[Row], Row]:
        unread = tuple(ignores)

        def add(fn: Row) -> Row:
            def read(a: Arguments) -> Result:
                a.ignore(*unread)
                return fn(a)

            for n in names:
                assert n not in table, n
                table[n] = read
            return fn

        return add

    return table, row


__all__ = ["Arguments", "Result", "Row", "is_real", "rows", "shaped"]
