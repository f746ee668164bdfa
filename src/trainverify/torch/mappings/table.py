"""Rows of the mapping: an ATen op by its name without overload, and a function from its arguments to tensors of our program.

A row takes arguments by their names in the schema. One that it does not take must have its default value, else the call is refused.
In-place and `out=` variants need no rows: their result is written where the schema says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any, Final

import torch

from trainverify.graph.types import TensorType
from trainverify.torch.private import _disable_current_modes
from trainverify.torch.values import DTYPES, Unknown, Unmapped, Value
from trainverify.translate.emit import Emitter
from trainverify.translate.literals import Literals, root

_READ: Final = torch.Tensor.item  # as PyTorch has it; a capture puts another in its place

Number = bool | int | float | Fraction
Result = Value | None | Sequence["Value | None"]


def plain(known: torch.Tensor) -> Any:
    """The number that a known tensor holds, also while tensors are fake."""
    with _disable_current_modes():
        return _READ(known)


class NoValue(Exception):
    """An argument without a value."""

    def __init__(self, why: Unknown):
        super().__init__(str(why))
        self.why = why


class Arguments:
    """The arguments of one call by name."""

    def __init__(
        self,
        e: Emitter,
        given: Mapping[str, Any],
        defaults: Mapping[str, Any],
        read: Callable[[torch.Tensor], Value],
        known: Callable[[torch.Tensor], torch.Tensor | None],
        literal: Literals,
        out: Sequence[TensorType | None],
    ):
        self.e = e
        self.given = given
        self.defaults = defaults
        self.literal = literal
        self.out = out  # types of the results as PyTorch has them; None for one that is not there
        self._read = read
        self._known = known
        self._taken: set[str] = set()

    def raw(self, name: str) -> Any:
        self._taken.add(name)
        return self.given.get(name, self.defaults.get(name))

    def ignore(self, *names: str) -> None:
        """Arguments about memory, devices and kernels: they do not change values."""
        self._taken.update(names)

    def left(self) -> list[str]:
        """Arguments that were given, are not the default, and were not taken."""
        return [n for n, v in self.given.items() if n not in self._taken and not _same(v, self.defaults.get(n))]

    # -- tensors ------------------------------------------------------------------------------------------------------

    def read(self, tensor: torch.Tensor) -> str:
        value = self._read(tensor)
        if isinstance(value, Unknown):
            raise NoValue(value)
        return value

    def tensor(self, name: str) -> str:
        value = self.raw(name)
        if not isinstance(value, torch.Tensor):
            raise Unmapped(f"argument {name} is {value!r}")
        return self.read(value)

    def optional(self, name: str) -> str | None:
        value = self.raw(name)
        return None if value is None else self.tensor(name)

    def tensors(self, name: str) -> list[str]:
        return [self.read(t) for t in self.raw(name)]

    def known(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The value of a small tensor that follows from constants alone."""
        return self._known(tensor)

    def operand(self, name: str) -> str | Number:
        """A tensor, or a number: a Python scalar, or a tensor without dimensions whose value is known."""
        value = self.raw(name)
        if isinstance(value, torch.Tensor):
            if value.ndim == 0 and (found := self._known(value)) is not None:
                return self.literal(plain(found))
            return self.read(value)
        return self.number(name)

    # -- plain values -------------------------------------------------------------------------------------------------

    def number(self, name: str) -> Number:
        value = self.raw(name)
        if isinstance(value, torch.Tensor) and (found := self._known(value)) is not None and value.ndim == 0:
            value = plain(found)
        if not isinstance(value, bool | int | float):
            raise Unmapped(f"argument {name} is {value!r}")
        return self.literal(value)

    def exact(self, name: str) -> float:
        """A number as it is, without recovery; of a float32 tensor, what it stands for."""
        value = self.raw(name)
        if isinstance(value, torch.Tensor) and (found := self._known(value)) is not None and value.ndim == 0:
            value = float(self.literal(plain(found))) if found.dtype == torch.float32 else plain(found)
        if not isinstance(value, int | float):
            raise Unmapped(f"argument {name} is {value!r}")
        return value

    def integer(self, name: str) -> int:
        value = self.raw(name)
        if isinstance(value, bool) or not isinstance(value, int):
            raise Unmapped(f"argument {name} is {value!r}")
        return value

    def flag(self, name: str) -> bool:
        value = self.raw(name)
        if not isinstance(value, bool):
            raise Unmapped(f"argument {name} is {value!r}")
        return value

    def ints(self, name: str) -> tuple[int, ...] | None:
        value = self.raw(name)
        if value is None:
            return None
        return (value,) if isinstance(value, int) else tuple(int(v) for v in value)

    def dtype(self, name: str = "dtype") -> str | None:
        """A dtype argument; None where it is left out. Results are cast to PyTorch's dtype anyway."""
        value = self.raw(name)
        if value is None:
            return None
        if str(value) not in DTYPES:
            raise Unmapped(f"dtype {value}")
        return DTYPES[str(value)]

    # -- making tensors -------------------------------------------------------------------------------------------------

    def as_tensor(self, value: str | Number, dtype: str | None = None) -> str:
        if isinstance(value, str):
            return value
        return self.e.full((), value, dtype or ("bool" if isinstance(value, bool) else "i64" if isinstance(value, int) else "f32"))

    def real(self, name: str) -> str:
        """A tensor as real numbers: integers and booleans are cast, as PyTorch's promotion does."""
        return name if self.e.kind(name) == "real" else self.e.cast(name, "f32")

    def times(self, x: str, factor: Number) -> str:
        """x · factor; an integer, a fraction and a square root of one are exact."""
        if factor == 1:
            return x
        if isinstance(factor, float) and (square := root(factor)) is not None:
            return self.e.op("mul", (x, self.e.op("sqrt", (self.e.full((), square, "f32"),))))
        return self.e.op("mul", (x,), {"value": factor})


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return a is b
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    return a is b or (type(a) is type(b) and bool(a == b))


Row = Callable[[Arguments], Result]
Table = dict[str, Row]


def rows() -> tuple[Table, Callable[..., Callable[[Row], Row]]]:
    """A table and the decorator that adds rows to it: `@row("aten::add")`."""
    table: Table = {}

    def row(*names: str) -> Callable[[Row], Row]:
        def add(fn: Row) -> Row:
            for n in names:
                assert n not in table, n
                table[n] = fn
            return fn

        return add

    return table, row
