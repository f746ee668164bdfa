"""Code that reads computed values: `.item()` gives a symbolic number, a branch on one is captured both ways.

Under fake tensors there is no value to read. A number that is read stays a tensor without dimensions: arithmetic on it is recorded, and
it goes back into tensors as one. Where Python needs to know it (`if norm > 1:`) the capture takes the way it is told to; the condition
is an output that ranks and reference must agree on, and the step is captured once for every combination of ways.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from trainverify.graph.program import Source
from trainverify.torch.constants import decided
from trainverify.torch.mappings.table import NoValue
from trainverify.torch.translate import Translator
from trainverify.torch.values import ReadsData

MOST_BRANCHES: Final = 3  # conditions on data that are captured both ways
_BINARY: Final = ("add", "sub", "mul", "truediv", "pow", "floordiv", "mod")
_COMPARISONS: Final = ("lt", "le", "gt", "ge", "eq", "ne")


_FUNCTIONS: Final = frozenset(
    (*_COMPARISONS, "abs", "neg", "logical_and", "logical_or", "logical_not", "to", "reshape", "identity", "mul", "where")
)


@dataclass(frozen=True)
class Branch:
    """A condition on data, and the way that was taken."""

    condition: str  # the tensor
    taken: bool
    source: Source | None
    of: str | None = None  # the one number that it is a function of
    function: str = ""  # as text; equal texts are equal functions

    @property
    def name(self) -> str:
        return f"condition at {self.source}"


class Number:
    """A computed number that Python holds."""

    def __init__(self, tensor: torch.Tensor, where: Callable[[], Source | None]):
        self.tensor = tensor
        self._where = where

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*_tensors(args), **{k: _tensors(v) for k, v in (kwargs or {}).items()})

    def _made(self, tensor: torch.Tensor) -> Number:
        return Number(tensor, self._where)

    def __neg__(self) -> Number:
        return self._made(-self.tensor)

    def __pos__(self) -> Number:
        return self

    def __abs__(self) -> Number:
        return self._made(self.tensor.abs())

    def __bool__(self) -> bool:
        return bool(self.tensor != 0)

    def __format__(self, spec: str) -> str:
        return "<computed>"

    def __str__(self) -> str:
        return "<computed>"

    __repr__ = __str__

    def item(self) -> Number:
        return self

    def _refuse(self, what: str) -> Any:
        raise ReadsData(f"{self._where()}: {what} needs the value of a computed number")

    def __float__(self) -> float:
        return float(self._refuse("float(), or a function of math or numpy,"))

    def __int__(self) -> int:
        return int(self._refuse("int()"))

    def __index__(self) -> int:
        return int(self._refuse("a size or an index"))

    def __round__(self, digits: int = 0) -> Any:
        return self._refuse("round()")

    def __hash__(self) -> int:
        return int(self._refuse("a key"))


def _tensors(value: Any) -> Any:
    if isinstance(value, Number):
        return value.tensor
    if isinstance(value, list | tuple):
        return type(value)(_tensors(v) for v in value)
    return value


def _binary(name: str, swapped: bool) -> Callable[[Number, Any], Any]:
    function = getattr(operator, name)

    def apply(self: Number, other: Any) -> Any:
        if isinstance(other, torch.Tensor) and other.ndim:
            return NotImplemented
        pair = (_tensors(other), self.tensor) if swapped else (self.tensor, _tensors(other))
        made = function(*pair)
        return made if isinstance(other, torch.Tensor) else self._made(made)

    return apply


def _compared(name: str) -> Callable[[Number, Any], bool]:
    function = getattr(operator, name)
    return lambda self, other: bool(function(self.tensor, _tensors(other)))


for _name in _BINARY:
    setattr(Number, f"__{_name}__", _binary(_name, False))
    setattr(Number, f"__r{_name}__", _binary(_name, True))
for _name in _COMPARISONS:
    setattr(Number, f"__{_name}__", _compared(_name))


class Reader:
    """What reading a tensor in Python gives."""

    def __init__(self, translator: Translator, choices: Sequence[bool] = (), accept: bool = False):
        self.translator = translator
        self.choices = tuple(choices)
        self.before = False  # a step runs that is not captured: conditions on data hold
        self.accept = accept  # go on after the last choice, and assume the way that is taken
        self.branches: list[Branch] = []
        self.accepted: list[Branch] = []

    def install(self) -> None:
        """For the rest of this process."""
        item, truth, number = torch.Tensor.item, torch.Tensor.__bool__, torch.Tensor.__float__

        def read(t: torch.Tensor) -> Any:
            return item(t) if self._plain(t) else (self.branch(t) if t.dtype == torch.bool else Number(t.detach(), self._where))

        def decide(t: torch.Tensor) -> bool:
            return bool(truth(t)) if self._plain(t) else self.branch(t if t.dtype == torch.bool else t != 0)

        def real(t: torch.Tensor) -> float:
            if not self._plain(t):
                raise ReadsData(f"{self._where()}: float() needs the value of a computed tensor")
            return float(number(t))

        torch.Tensor.item, torch.Tensor.__bool__, torch.Tensor.__float__ = read, decide, real

    def install_real(self) -> None:
        """For a run on real tensors, where values are there: what is read without PyTorch's dispatcher is noted, or refused."""
        to_list = torch.Tensor.tolist

        def listed(t: torch.Tensor) -> Any:
            value = to_list(t)
            if self.translator.step is not None and self.translator.known(t) is None:
                self.translator.noted(f"{value!r:.80} is read")
            return value

        def refused(name: str) -> Any:
            original = getattr(torch.Tensor, name)

            def call(t: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
                if self.translator.step is not None:
                    raise ReadsData(f"{self._where()}: {name} takes values out of PyTorch")
                return original(t, *args, **kwargs)

            return call

        torch.Tensor.tolist = listed
        for name in ("numpy", "__array__", "__dlpack__", "data_ptr"):
            setattr(torch.Tensor, name, refused(name))

    def _plain(self, t: torch.Tensor) -> bool:
        """Whether reading is PyTorch's own affair: outside the step, a value that is known, a subclass, or no single number."""
        from torch._subclasses.fake_tensor import FakeTensor

        kinds = (torch.Tensor, torch.nn.Parameter, FakeTensor)
        outside = self.translator.step is None and not self.before
        return outside or t.numel() != 1 or type(t) not in kinds or self.translator.known(t) is not None

    def _where(self) -> Source | None:
        return self.translator._place().source

    def branch(self, t: torch.Tensor) -> bool:
        """The way to take at a condition on data."""
        tr = self.translator
        if self.before:
            return True
        place = tr._place()
        tr.emitter.place = place
        try:
            condition = tr.named(t.reshape(()))
        except NoValue as error:
            raise ReadsData(f"{place.source}: a condition on a value without a meaning here: {error.why}") from error
        if (constant := decided(tr.emitter, condition)) is not None:
            return constant
        found = next((b for b in (*self.branches, *self.accepted) if b.condition == condition), None)
        if found is not None:
            return found.taken
        if len(self.branches) == MOST_BRANCHES:
            if not self.accept:
                raise ReadsData(f"{place.source}: more than {MOST_BRANCHES} conditions on data: they are not captured both ways")
            self.accepted.append(Branch(condition, True, place.source))
            return True
        at = len(self.branches)
        taken = self.choices[at] if at < len(self.choices) else True
        function, leaves = self._function(condition)
        self.branches.append(Branch(condition, taken, place.source, leaves[0] if len(leaves) == 1 else None, function))
        return taken

    def _function(self, name: str) -> tuple[str, list[str]]:
        """A condition as a function of the numbers that are compared."""
        op = self.translator.emitter.made.get(name)
        if op is not None and op.name == "full":
            return f"{op.get('value')}", []
        if op is None or op.name not in _FUNCTIONS or op.outputs != (name,):
            return "x", [name]
        texts, leaves = [], []
        for i in op.inputs:
            text, found = self._function(str(i))
            texts.append(text)
            leaves += found
        attrs = [f"{k}={v!r}" for k, v in op.attrs]
        return f"{op.name}({', '.join([*texts, *attrs])})", list(dict.fromkeys(leaves))


__all__ = ["MOST_BRANCHES", "Branch", "Number", "Reader", "ReadsData"]
