"""The builder that programs and plans share: op methods, names, types, source lines, reverse mode.

`b.linear(x, w)` appends an op of the table and returns its tensor. `backward` appends explicit backward ops:
`NAME.grad` for every op, and for every collective the backward that the caller named when using it.
"""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

from trainverify.graph.program import Op, Output, Phase, Role, Source, attributes, resolve
from trainverify.graph.types import TensorType
from trainverify.ops import OPS
from trainverify.ops.table import GRAD, OpDef, OpError, OpTable

_PACKAGE = str(Path(__file__).resolve().parent.parent)
# model code and the cases of the bug corpus: their lines are worth showing
_MODELS = (str(Path(_PACKAGE) / "zoo"), str(Path(_PACKAGE) / "bugs" / "cases"))


class BuildError(Exception):
    """A builder used in a way that makes no program."""


@dataclass(frozen=True)
class Tensor:
    """A tensor of a program under construction."""

    name: str
    type: TensorType

    @property
    def shape(self) -> tuple[int, ...]:
        return self.type.shape

    def __repr__(self) -> str:
        return f"<{self}>"

    def __str__(self) -> str:
        return f"{self.name}: {self.type}"


def caller() -> Source | None:
    """The first frame outside this package, in a model of the zoo or in a case of the bug corpus: the user's line."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not _users(frame.f_code.co_filename):
        frame = frame.f_back
    return None if frame is None else Source(_shown(frame.f_code.co_filename, os.getcwd()), frame.f_lineno)


@cache
def _users(file: str) -> bool:
    return not file.startswith(_PACKAGE) or file.startswith(_MODELS)


@cache
def _shown(file: str, folder: str) -> str:
    path = Path(file)
    return (path.relative_to(folder) if path.is_relative_to(folder) else Path(path.name)).as_posix()


# (op, gradients of its outputs) → gradients of its inputs
Conjugate = Callable[["Tape", Op, Sequence["Tensor | None"]], "Sequence[Tensor | None]"]


@dataclass(frozen=True)
class Region:
    """Ops from `start` on whose backward is written by hand: gradients of its outputs → gradients of its inputs."""

    start: int
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    backward: Callable[..., Sequence[Tensor | None]]


class Tape:
    """Ops in order, with unique names."""

    def __init__(self, name: str, ops: OpTable = OPS):
        self.name = name
        self.table = ops
        self.ops: list[Op] = []
        self.tensors: dict[str, TensorType] = {}
        self.outputs: list[Output] = []
        self.phase: Phase = "forward"
        self.prefix = ""
        self._conjugates: dict[int, Conjugate | None] = {}  # op index → what its collective does backward
        self._regions: dict[int, Region] = {}  # index of its last op → region
        self._gradients: dict[str, Tensor] = {}  # parameter → gradient accumulated so far
        self._trainable: set[str] = set()
        self._numbers: dict[str, int] = {}  # name → the last number that was added to it
        self._maker: dict[str, int] = {}  # tensor → the op that makes it, for the first `_indexed` ops
        self._indexed = 0
        self._again: dict[str, Callable[[], Tensor]] = {}  # tensor → how backward passes get it, instead of keeping it

    # -- tensors and ops ------------------------------------------------------------------------------------------

    def declare(self, name: str, type: TensorType) -> Tensor:
        if name in self.tensors:
            raise BuildError(f"there is a tensor {name!r} already")
        self.tensors[name] = type
        return Tensor(name, type)

    def fresh(self, base: str) -> str:
        name = whole = base if base.startswith(self.prefix) else self.prefix + base
        n = self._numbers.get(whole, 0)
        while name in self.tensors:
            n += 1
            name = f"{whole}.{n}"
        self._numbers[whole] = max(n - 1, 0)  # what was made since is looked at again
        return name

    def bindings(self) -> Mapping[str, Any]:
        """Values of references on one sample rank, for computing types."""
        return {}

    def members(self, group: Any) -> int:
        raise BuildError("a logical program has no groups")

    def emit(
        self,
        op: str,
        inputs: Sequence[Tensor | None],
        attrs: Mapping[str, Any],
        names: Sequence[str] | None = None,
        source: Source | None = None,
        forward: str | None = None,
    ) -> tuple[Tensor, ...]:
        """Append an op; types come from its definition."""
        try:
            canonical = attributes(attrs)
        except TypeError as error:
            raise BuildError(f"{op}: {error}") from error
        concrete = {k: resolve(v, self.bindings()) for k, v in canonical}
        definition = self.table[op]
        for t in inputs:
            self._own(op, definition, t)
        if definition.point_to_point:
            types = [TensorType(concrete["shape"], concrete.get("dtype", "f32"))] if op == "recv" else []  # type: ignore[arg-type]
        else:
            size = self.members(concrete["group"]) if definition.collective else 0
            try:
                lowered = self.table.lower(op, concrete, tuple(None if t is None else t.type for t in inputs), size)
            except OpError as error:
                types_only = ", ".join("-" if t is None else str(t.type) for t in inputs)
                named = ", ".join("-" if t is None else str(t) for t in inputs)
                raise OpError(str(error).replace(f"{op}({types_only})", f"{op}({named})", 1)) from error
            types = list(lowered.types)
        if names is not None and len(names) != len(types):
            raise BuildError(f"{op} has {len(types)} results, got {len(names)} names")
        made = [self.declare(self.fresh(op if names is None else names[i]), t) for i, t in enumerate(types)]
        tensors = tuple(None if t is None else t.name for t in inputs)
        self.ops.append(Op(op, tensors, tuple(t.name for t in made), canonical, self.phase, forward, source or caller()))
        return tuple(made)

    def _own(self, op: str, definition: OpDef, given: object) -> None:
        """Refuse what is no tensor of this program."""
        if given is None:
            return
        if not isinstance(given, Tensor):
            literal = definition.attribute("value") is not None and isinstance(given, int | float | Fraction)
            how = f"a number is given by name: value={given!r}" if literal else "everything but tensors is given by name"
            if isinstance(given, tuple | list):
                how = "an op with several results returns a tuple; take one of it"
            raise BuildError(f"{op}: {given!r} is no tensor; {how}")
        if self.tensors.get(given.name) != given.type:
            raise BuildError(f"{op}: tensor {given.name!r} does not belong to {self.name!r}")

    def constant(self, value: float | Fraction, type: TensorType, name: str, source: Source | None = None) -> Tensor:
        return self.emit("full", (), {"shape": type.shape, "value": value, "dtype": type.dtype}, [name], source)[0]

    def __getattr__(self, op: str) -> Callable[..., Any]:
        if op.startswith("_"):
            raise AttributeError(op)
        name = op[:-1] if op.endswith("_") else op  # `sum_`, `slice_`: Python's own names
        if name not in self.table:
            near = difflib.get_close_matches(name, [d.name for d in self.table], 1)
            raise AttributeError(f"no operator {name!r}" + (f"; did you mean {near[0]}?" if near else " (`trainverify ops` lists all)"))

        def apply(*inputs: Tensor | None, name: str | Sequence[str] | None = None, **attrs: Any) -> Any:
            names = [name] if isinstance(name, str) else name
            made = self.emit(op.removesuffix("_"), inputs, attrs, names)
            return made[0] if len(made) == 1 else made

        return apply

    # -- results --------------------------------------------------------------------------------------------------

    def output(self, tensor: Tensor, role: Role, of: str | None = None) -> None:
        self.outputs.append(Output(tensor.name, role, of))

    def loss(self, tensor: Tensor) -> None:
        """Report this tensor as the loss."""
        self.output(tensor, "loss")

    def metric(self, name: str, tensor: Tensor) -> None:
        self.output(tensor, "metric", name)

    def update(self, old: Tensor, new: Tensor) -> None:
        """`new` is the value of a parameter or state after the step."""
        self.output(new, "parameter" if old.name in self._trainable else "state", old.name)

    # -- reverse mode ---------------------------------------------------------------------------------------------

    def gradient(self, parameter: Tensor) -> Tensor:
        """The gradient that the backward passes so far have accumulated."""
        if parameter.name not in self._gradients:
            raise BuildError(f"{parameter.name!r} has no gradient: no backward(...) before this line reached it")
        return self._gradients[parameter.name]

    def take_gradient(self, parameter: Tensor) -> Tensor | None:
        """The accumulated gradient, if there is one; accumulation starts anew."""
        return self._gradients.pop(parameter.name, None)

    def set_gradient(self, parameter: Tensor, gradient: Tensor) -> None:
        """Replace the accumulated gradient, after a synchronisation for instance."""
        self._gradients[parameter.name] = gradient

    def recompute(self, tensor: Tensor, how: Callable[[], Tensor]) -> None:
        """Backward passes do not read this tensor but make it again; `how` is called once, at its first use there."""
        made: list[Tensor] = []

        def once() -> Tensor:
            if not made:
                made.append(how())
            return made[0]

        self._again[tensor.name] = once

    def by_hand(
        self,
        inputs: Sequence[Tensor],
        forward: Callable[[], Sequence[Tensor]],
        backward: Callable[..., Sequence[Tensor | None]],
    ) -> tuple[Tensor, ...]:
        """The outputs of `forward`, whose backward ops are those that `backward(gradients of the outputs…)` appends."""
        start = len(self.ops)
        made = tuple(forward())
        self._regions[len(self.ops) - 1] = Region(start, tuple(inputs), made, backward)
        return made

    def backward(self, *roots: Tensor, seeds: Sequence[Tensor] | None = None, wrt: Iterable[Tensor] = ()) -> list[Tensor]:
        """Append the backward ops of `roots` (seeded with 1, or with `seeds`), accumulate parameter gradients.

        Returns the gradients of `wrt`, for tensors that are not parameters.
        """
        source, before = caller(), self.phase
        self.phase = "backward"
        if seeds is None:
            seeds = [
                self.emit("full", (), {"shape": r.shape, "value": 1.0, "dtype": r.type.dtype}, [r.name + ".grad"], source)[0] for r in roots
            ]
        wanted = {t.name for t in wrt} | self._trainable
        found = self._reverse(dict(zip((r.name for r in roots), seeds, strict=True)), wanted, source)
        for name in [n for n in found if n in self._trainable]:
            old = self._gradients.get(name)
            self._gradients[name] = found[name] if old is None else self.emit("add", (old, found[name]), {}, [name + ".grad"], source)[0]
        self.phase = before
        missing = [t.name for t in wrt if t.name not in found]
        if missing:
            raise BuildError(f"no gradient reaches {missing[0]!r}")
        return [found[t.name] for t in wrt]

    def _reverse(self, seeds: dict[str, Tensor], wanted: set[str], source: Source | None) -> dict[str, Tensor]:
        before = self._ancestors(seeds)
        needs = set(wanted)  # tensors that depend on a wanted one
        for index in before:
            op = self.ops[index]
            if op.name != "detach" and any(i in needs for i in op.inputs):
                needs.update(o for o in op.outputs if self.tensors[o].kind == "real")
            if index in self._regions and any(t.name in needs for t in self._regions[index].inputs):
                needs.update(t.name for t in self._regions[index].outputs)
        grads = dict(seeds)

        def arrive(name: str | None, g: Tensor | None) -> None:
            if name is not None and g is not None and name in needs:
                old = grads.get(name)
                grads[name] = g if old is None else self.emit("add", (old, g), {}, [name + ".grad"], source)[0]

        limit = len(self.ops)  # what comes from here on belongs to a region that was gone back through
        for index in reversed(before):
            if index >= limit:
                continue
            op = self.ops[index]
            if index in self._regions and op.phase == "forward":
                region = self._regions[index]
                limit = region.start
                given = [grads.get(t.name) for t in region.outputs]
                if any(g is not None for g in given):
                    for t, g in zip(region.inputs, region.backward(*given), strict=True):
                        arrive(t.name, g)
                continue
            if op.phase != "forward" or not any(o in grads for o in op.outputs) or not any(i in needs for i in op.inputs):
                continue
            given = [grads.get(o) for o in op.outputs]
            for i, g in zip(op.inputs, self._input_gradients(index, op, given, needs, source), strict=True):
                arrive(i, g)
        return grads

    def _ancestors(self, tensors: Iterable[str]) -> list[int]:
        """The ops that some tensors are made by, directly or not, in order."""
        for index in range(self._indexed, len(self.ops)):
            self._maker.update(dict.fromkeys(self.ops[index].outputs, index))
        self._indexed = len(self.ops)
        ends = {t.name: end for end, region in self._regions.items() for t in region.outputs}
        found: set[int] = set()
        left = list(tensors)
        while left:
            name = left.pop()
            for index in (self._maker.get(name, -1), ends.get(name, -1)):
                if index >= 0 and index not in found:
                    found.add(index)
                    left += [i for i in self.ops[index].inputs if i is not None]
                    left += [t.name for t in self._regions[index].inputs] if index in self._regions else []
        return sorted(found)

    def _read(self, name: str) -> Tensor:
        return self._again[name]() if name in self._again else Tensor(name, self.tensors[name])

    def _input_gradients(
        self, index: int, op: Op, given: Sequence[Tensor | None], needs: set[str], source: Source | None
    ) -> Sequence[Tensor | None]:
        if index in self._conjugates:
            conjugate = self._conjugates[index]
            return [None] * len(op.inputs) if conjugate is None else conjugate(self, op, given)
        definition = self.table[op.name]
        if definition.collective or definition.point_to_point:
            how = "give it backward=… (identity, all_reduce, all_gather, reduce_scatter, slice, all_to_all or none)"
            if definition.point_to_point or definition.receivers == "root" or definition.senders == "root":
                how = "use its result as the start of a backward pass of its own, or put it into by_hand"
            raise BuildError(f"{op.name} ({op.source}) lies between the loss and a parameter and does not name its backward: {how}")
        wrt = tuple(i for i, n in enumerate(op.inputs) if n in needs and n is not None and self.tensors[n].kind == "real")
        known = tuple(i for i, g in enumerate(given) if g is not None)
        inputs = [None if n is None else self._read(n) for n in op.inputs] + [given[i] for i in known]
        attrs: dict[str, Any] = {**op.attributes, "wrt": wrt}
        if known != (0,):
            attrs["given"] = known
        names = [f"{op.inputs[i]}.grad" for i in wrt]
        made = dict(zip(wrt, self.emit(op.name + GRAD, inputs, attrs, names, op.source or source, op.outputs[0]), strict=True))
        return [made.get(i) for i in range(len(op.inputs))]
