"""Writing the program that a set of ranks runs: attributes that ranks have different values of become references."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from trainverify.graph.mesh import Mesh
from trainverify.graph.program import Ref, Value, attributes, has_ref
from trainverify.graph.types import TensorType
from trainverify.jax.constants import content_name
from trainverify.jax.values import Column, Divergent, Grid, Number, Opaque, Rounded, Table
from trainverify.jax.values import Value as Held
from trainverify.ops import OPS
from trainverify.ops.table import OpTable
from trainverify.translate.emit import Emitter, Rewriting, Unmapped
from trainverify.translate.functions import known_image
from trainverify.translate.integers import EXCHANGES, Bounds, hull, tensor_bounds

Labels = tuple[str, ...]  # of one meeting for each group, or for each pair of ranks


class Fact(NamedTuple):
    """What is known about tensors that are sent."""

    infinities: frozenset[float]  # that may be in them
    defined: bool  # whether they have a value whatever the inputs are
    bounds: Bounds  # of integers
    finite: bool  # whether nothing in them divides by what may be 0, or takes a root of what may be negative


@dataclass(frozen=True)
class Constant:
    """An array that the code closes over, as an input named by its content."""

    name: str
    data: np.ndarray[Any, Any]


def plain(value: Any) -> Value:
    """Integers of NumPy's as Python's, numbers without how they were computed: attributes are plain."""
    if isinstance(value, tuple):
        return tuple(plain(v) for v in value)
    if isinstance(value, Rounded):
        return int(value) if value.denominator == 1 else Fraction(value)
    found: Value = value.item() if isinstance(value, np.generic) else value
    return found


class RankEmitter(Emitter):
    """The program that `ranks` of a mesh run."""

    def __init__(
        self,
        mesh: Mesh,
        ranks: Sequence[int],
        table: OpTable = OPS,
        lengths: Sequence[int] = (),
        rewritten: Rewriting | None = None,
    ):
        super().__init__(table, rewritten)
        self.image = known_image
        self.prefix = ""
        self.mesh, self.ranks = mesh, tuple(ranks)
        self.lengths = sorted(lengths)  # of ranges that start at 0 in the logical program
        self.groups: dict[str, tuple[int, ...]] = {}
        self.columns: dict[tuple[Value, ...], str] = {}
        self.constants: dict[str, Constant] = {}
        self.draws: dict[str, Any] = {}  # random numbers, by how they are drawn
        self.limits: dict[str, tuple[Fraction, Fraction]] = {}  # the least and the largest of real ones
        self.streams: Mapping[str, int] = {}  # the longest draw of any program, where they draw by several lengths
        self.traffic: list[tuple[Labels, tuple[str, ...]]] = []  # what is sent, by where it meets what other ranks do
        self.labels: dict[str, Labels] = {}  # the same of what comes from other ranks
        self.facts: Mapping[str, Fact] | None = None  # about what others send, if they run other programs
        self.kept: dict[Any, Any] = {}  # of mappings: what they need again
        self._counted: dict[Any, str] = {}
        self._serial: dict[Hashable, int] = {}

    @property
    def shared(self) -> bool:
        """Whether all ranks run this program: what holds for what a rank sends holds for what it receives."""
        return len(self.ranks) == max(self.mesh.size, 1)

    def numbered(self, what: Hashable) -> int:
        """How many of a sort there are already."""
        n = self._serial.get(what, 0)
        self._serial[what] = n + 1
        return n

    # -- what ranks have different values of --------------------------------------------------------------------------

    def bound(self, value: Any) -> Value:
        """An attribute: a column of integers, or a list with one value for each rank, becomes a reference if they differ."""
        if isinstance(value, np.ndarray):
            value = [int(v) for v in value]
            value = value * len(self.ranks) if len(value) == 1 else value
        if isinstance(value, tuple):
            return tuple(self.bound(v) for v in value)
        if not isinstance(value, list):
            return plain(value)
        if len(value) != len(self.ranks):
            raise Unmapped(f"{len(value)} values for {len(self.ranks)} ranks")
        if all(v == value[0] for v in value):
            return value[0]  # type: ignore[no-any-return]
        return Ref(self.columns.setdefault(tuple(value), f"rank.{len(self.columns)}"))

    def column(self, value: Any) -> tuple[Any, ...]:
        """What an attribute is on every rank (one entry if it is the same)."""
        if isinstance(value, tuple):
            return (tuple(self.column(v)[0] for v in value),)  # of a list, on the first rank
        if not isinstance(value, Ref):
            return (value,)
        return next(c for c, n in self.columns.items() if n == value.name)

    def several(
        self, name: str, inputs: Sequence[str | None], attrs: Mapping[str, Any] | None = None, label: str | None = None
    ) -> tuple[str, ...]:
        given = {k: self.bound(v) for k, v in (attrs or {}).items()}
        if not any(has_ref(v) for v in given.values()):
            return super().several(name, inputs, given, label)
        concrete = {k: self.column(v)[0] for k, v in given.items()}
        outputs = super().several(name, inputs, concrete, label)
        op = replace(self.ops[-1], attrs=attributes(given))
        self.ops[-1] = op
        self.made.update(dict.fromkeys(outputs, op))
        return outputs

    def communicate(self, name: str, inputs: Sequence[str], attrs: Mapping[str, Any], kind: TensorType | None) -> str | None:
        result = super().communicate(name, inputs, {k: self.bound(v) for k, v in attrs.items()}, kind)
        labels = self._meetings(name, attrs)
        if name != "recv":
            self.traffic.append((labels, tuple(inputs)))
        if result is not None:
            self.made[result] = self.ops[-1]
            self.labels[result] = labels
            if self.kind(result) != "real" and (name in EXCHANGES or attrs.get("op") in ("max", "min")):
                self.intervals[result] = self._exchanged(labels, (self.kept.get(("sent", attrs.get("batch"))), *inputs))
        return result

    def _meetings(self, name: str, attrs: Mapping[str, Any]) -> Labels:
        """Where communication meets that of other ranks, by names that all programs have: a group, or a sender and a receiver, and how
        many meetings of the same ranks there were before."""
        if name in ("send", "recv"):
            ends = zip(self.ranks, attrs["peer"], strict=True)
            whom = [f"{r} to {p}" if name == "send" else f"{p} to {r}" for r, p in ends]
        else:
            whom = list(dict.fromkeys(attrs["group"]))
        return tuple(f"{w}, number {self.numbered((name, w) if name in ('send', 'recv') else w)}" for w in whom)

    def _exchanged(self, labels: Labels, sent: Sequence[str | None]) -> Bounds:
        """Bounds of integers of other ranks: if they run this program those of what is sent here, else what is known of all."""
        if self.facts is not None:
            return hull([self.facts[n].bounds if n in self.facts else None for n in labels])
        return hull([tensor_bounds(self, i) for i in sent if i is not None])

    # -- values as tensors --------------------------------------------------------------------------------------------

    def tensor(self, value: Held) -> str:
        """A value as a tensor of the program."""
        match value:
            case str():
                return value
            case Opaque():
                raise Unmapped(value.reason)
            case Number():
                return self.full(value.shape, value.value, value.dtype)
            case Grid():
                return self._spread(self.slim(value), value.shape)
            case Table():
                return self._listed(value)

    def slim(self, value: Held) -> str:
        """The same with size 1 in dimensions that an integer does not depend on; it broadcasts to the value."""
        if isinstance(value, Number):
            return self.full((), value.value, value.dtype)
        if not isinstance(value, Grid):
            return self.tensor(value)
        if value.dtype == "bool" and value.literal is None:
            raise Divergent(value.start)
        moving = [d for d, s in enumerate(value.strides) if s and value.shape[d] > 1]
        shape = tuple(n if d in moving else 1 for d, n in enumerate(value.shape))
        if not moving:
            made = self._constant(value.start, value.dtype)
            return self.reshape(made, shape) if shape else made
        total: str | None = None
        for d in moving:
            start = value.start if total is None else np.zeros(1, np.int64)
            part = self._range(start, value.strides[d], value.shape[d], value.dtype)
            part = self.reshape(part, tuple(n if e == d else 1 for e, n in enumerate(shape)))
            total = part if total is None else self.op("add", (total, part))
        assert total is not None
        return total

    def _constant(self, start: Column, dtype: str) -> str:
        if (start == start[0]).all():
            return self.full((), int(start[0]), dtype)
        key = (tuple(start.tolist()), dtype)
        if key not in self._counted:
            self._counted[key] = self.op("full", (), {"shape": (), "value": start, "dtype": dtype}, "number")
        return self._counted[key]

    def _range(self, start: Column, step: int, count: int, dtype: str) -> str:
        """start, start + step, …: of ranks that start elsewhere a slice of one range from 0 on."""
        key = (tuple(start.tolist()), step, count, dtype)
        if key not in self._counted:
            self._counted[key] = self._counting(start, step, count, dtype)
        return self._counted[key]

    def _counting(self, start: Column, step: int, count: int, dtype: str) -> str:
        last = int(start.max()) + count
        if step != 1 or int(start.min()) < 0 or (start == start[0]).all():
            stop = start + step * count
            return self.op("arange", (), {"start": start, "stop": stop, "step": step, "dtype": dtype}, "positions")
        whole = next((n for n in self.lengths if n >= last), last)
        every = self._range(np.zeros(1, np.int64), 1, whole, dtype)
        return self.op("slice", (every,), {"dim": 0, "start": start, "stop": start + count}, "positions")

    def _spread(self, name: str, shape: tuple[int, ...]) -> str:
        return name if self.shape(name) == shape else self.op("expand", (name,), {"shape": shape})

    def _listed(self, value: Table) -> str:
        if len(value.data) > 1:
            raise Unmapped("a list of integers that ranks have different values of")
        return self.closed_over(value.data[0], value.dtype)

    def closed_over(self, data: np.ndarray[Any, Any], dtype: str) -> str:
        """An array as an input that is named by its content."""
        name = content_name(data, dtype)
        if name not in self.constants:
            self.constants[name] = Constant(name, data)
            self.declare(name, TensorType(tuple(data.shape), dtype))
            if data.size and data.dtype.kind in "iu":
                self.bounds[name] = int(data.min()), int(data.max())
        return name


__all__ = ["Constant", "Fact", "Labels", "RankEmitter"]
