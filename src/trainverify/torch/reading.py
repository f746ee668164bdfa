"""Code that reads computed values: `.item()` gives a symbolic number, a branch on one is captured both ways.

Under fake tensors there is no value to read. A number that is read stays a tensor without dimensions: arithmetic on it is recorded, and
it goes back into tensors as one. Where Python needs to know it (`if norm > 1:`) the capture takes the way it is told to; the condition
is an output that ranks and reference must agree on, and the step is captured once for every combination of ways.
"""

from __future__ import annotations

import json
import numbers
import operator
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, Final

import torch

from trainverify.graph.program import Source
from trainverify.torch.boundary import Boundary
from trainverify.torch.constants import decided
from trainverify.torch.frames import is_ours, torchs
from trainverify.torch.handlers import handled
from trainverify.torch.mappings.table import NoValue
from trainverify.torch.private import FakeTensor, _disable_current_modes
from trainverify.torch.translate import Translator
from trainverify.torch.values import ReadsData

COMPUTED: Final = "<computed>"  # a computed number as text
MOST_BRANCHES: Final = 3  # conditions on data that are captured both ways
_BINARY: Final = ("add", "sub", "mul", "truediv", "pow", "floordiv", "mod")
_COMPARISONS: Final = ("lt", "le", "gt", "ge", "eq", "ne")
_OBJECTS: Final = frozenset(("__new__", "__init__", "__getattribute__", "__doc__", "__getformat__"))  # of every object, or of its class
_WORDS: Final = {
    "__float__": "float(), or a function of math or numpy,",
    "__index__": "a size or an index",
    "__hash__": "a key",
    "__reduce_ex__": "pickle",
}
RAISES: Final = "{} of computed numbers at {} raises no error: {}"

_LEAVING: Final = ("numpy", "__array__", "__dlpack__", "__reduce_ex__", "share_memory_")

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
    """A computed number that Python holds. It says that it is a float or an int, and is none: code in C would read a value of it."""

    def __init__(self, tensor: torch.Tensor, boundary: Boundary):
        self._tensor = tensor
        self._boundary = boundary

    @property  # type: ignore[misc]  # `isinstance` asks for it
    def __class__(self) -> type:
        return float if self._tensor.is_floating_point() else int

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*_tensors(args), **{k: _tensors(v) for k, v in (kwargs or {}).items()})

    def _made(self, tensor: torch.Tensor) -> Number:
        return Number(tensor, self._boundary)

    def __neg__(self) -> Number:
        return self._made(-self._tensor)

    def __pos__(self) -> Number:
        return self

    def __abs__(self) -> Number:
        return self._made(self._tensor.abs())

    def __bool__(self) -> bool:
        return bool(self._tensor != 0)

    def __copy__(self) -> Number:
        return self

    def __deepcopy__(self, known: Any) -> Number:
        return self

    def __format__(self, spec: str) -> str:
        self._boundary.shown()
        return COMPUTED

    def __str__(self) -> str:
        return format(self)

    __repr__ = __str__

    def _raises(self, name: str, one: Any, other: Any) -> None:
        """Where Python raises an error that PyTorch does not. A handler of the user's sees it: it is captured both ways."""
        if name == "pow":
            self._no_root(one, other)
        elif name in ("truediv", "floordiv", "mod"):
            zero = other == 0
            if isinstance(zero, torch.Tensor) and not handled(ZeroDivisionError):
                self._boundary.assume(RAISES.format(name, self._boundary.where(), "its divisor is not 0"))
            elif zero:
                raise ZeroDivisionError("division by zero")

    def _no_root(self, one: Any, other: Any) -> None:
        """Powers of Python's are floats, complex numbers or errors where PyTorch's are integers, NaN or inf."""
        if not isinstance(other, torch.Tensor) and other >= 0 and other % 1 == 0:
            return
        whole = not any(v.is_floating_point() if isinstance(v, torch.Tensor) else isinstance(v, float) for v in (one, other))
        if whole or handled(ZeroDivisionError, OverflowError):
            self._refuse("a power that need not be a number of its type")
        if isinstance(one, torch.Tensor) or one <= 0:
            self._boundary.assume(RAISES.format("pow", self._boundary.where(), "its base is positive"))

    def _refuse(self, what: str) -> Any:
        raise self._boundary.refused(ReadsData(f"{self._boundary.where()}: {what} needs the value of a computed number"))

    def __getattr__(self, name: str) -> Any:
        if hasattr(self.__class__, name):
            return self._refuse(name)
        raise AttributeError(f"'{self.__class__.__name__}' object has no attribute '{name}'")


def _tensors(value: Any) -> Any:
    if isinstance(value, Number):
        return value._tensor
    if isinstance(value, list | tuple):
        return type(value)(_tensors(v) for v in value)
    return value


def _holds_number(value: Any) -> bool:
    return type(value) is Number or (isinstance(value, list | tuple) and any(map(_holds_number, value)))


def _stacked(value: Any) -> torch.Tensor:
    """Numbers in lists as one tensor, computed ones among them."""
    if isinstance(value, list | tuple):
        return torch.stack([_stacked(v) for v in value])
    if isinstance(value, torch.Tensor):
        return value.detach()
    return torch.full((), value, dtype=torch.float64 if isinstance(value, float) else torch.int64)


def _patch_factories() -> None:
    """`torch.tensor(x.item())`: a computed number goes back into a tensor."""

    def put(name: str) -> None:
        original = getattr(torch, name)

        def call(data: Any, *args: Any, dtype: Any = None, device: Any = None, requires_grad: bool = False, **kwargs: Any) -> torch.Tensor:
            if not _holds_number(data):
                more = {"requires_grad": True} if requires_grad else {}
                return original(data, *args, dtype=dtype, device=device, **more, **kwargs)
            made = _stacked(_tensors(data))
            kind = dtype or (torch.get_default_dtype() if made.is_floating_point() else torch.int64)
            return made.to(kind, copy=True).requires_grad_(requires_grad)

        setattr(torch, name, call)

    for name in ("tensor", "as_tensor"):
        put(name)


def _binary(name: str, swapped: bool) -> Callable[[Number, Any], Any]:
    function = getattr(operator, name)

    def apply(self: Number, other: Any, *modulus: Any) -> Any:
        if isinstance(other, torch.Tensor):
            if other.ndim:
                return NotImplemented
        elif modulus or not isinstance(other, int | float):  # computed numbers say that they are such
            return self._refuse(f"{name} with {type(other).__name__}")
        pair = (_tensors(other), self._tensor) if swapped else (self._tensor, _tensors(other))
        if isinstance(other, torch.Tensor):
            return function(*pair)
        self._raises(name, *pair)
        return self._made(function(*pair))

    return apply


def _compared(name: str) -> Callable[[Number, Any], bool]:
    function = getattr(operator, name)

    def apply(self: Number, other: Any) -> Any:
        if isinstance(other, torch.Tensor | int | float):  # computed numbers say that they are such
            return bool(function(self._tensor, _tensors(other)))
        return self._refuse(f"a comparison with {type(other).__name__}") if isinstance(other, numbers.Number) else NotImplemented

    return apply


def _refusing(what: str) -> Callable[..., Any]:
    return lambda self, *args: self._refuse(what)


for _name in _BINARY:
    setattr(Number, f"__{_name}__", _binary(_name, False))
    setattr(Number, f"__r{_name}__", _binary(_name, True))
for _name in _COMPARISONS:
    setattr(Number, f"__{_name}__", _compared(_name))
for _name in {*vars(int), *vars(float)} - _OBJECTS - vars(Number).keys() | {"__hash__", "__reduce_ex__", "__complex__"}:
    if _name.startswith("__"):  # what else Python asks of its numbers
        setattr(Number, _name, _refusing(_WORDS.get(_name, f"{_name.strip('_')}()")))


def _patch_memory(boundary: Boundary) -> None:
    """Addresses tell memory apart, as in a real run; there is nothing at them. PyTorch itself takes 0 for what has no memory."""
    storage, on, memory = torch.UntypedStorage, torch.UntypedStorage.device, torch.Tensor.untyped_storage

    def asking() -> FrameType:
        frame = sys._getframe(3)
        while torchs(frame.f_code.co_filename) == "storage.py" and frame.f_back is not None:
            frame = frame.f_back
        return frame

    def told(s: torch.UntypedStorage) -> bool:
        return on.__get__(s).type == "meta" and torchs(asking().f_code.co_filename) is None

    def number(s: torch.UntypedStorage) -> int:
        if boundary.chance is not None:
            boundary.chance.numbered(asking(), s)
        return int(s._cdata) << 16

    def address(s: torch.UntypedStorage) -> int:
        return number(s) if told(s) else int(at(s))

    def place(t: torch.Tensor) -> int:
        s = t.untyped_storage()
        return number(s) + int(t.storage_offset()) * t.element_size() if told(s) else int(start(t))

    def untyped(t: torch.Tensor) -> torch.UntypedStorage:
        s = memory(t)
        if hasattr(t, "fake_device"):
            s.of = t.fake_device
        return s

    def device(s: torch.UntypedStorage) -> torch.device:
        return s.of if told(s) and hasattr(s, "of") else on.__get__(s)

    def refused(name: str) -> Any:
        original = getattr(storage, name)

        def call(s: torch.UntypedStorage, *args: Any) -> Any:
            if on.__get__(s).type == "meta":
                raise boundary.refused(ReadsData(f"{boundary.where()}: {name} of a tensor's memory reads or writes values"))
            return original(s, *args)

        return call

    at, start = storage.data_ptr, torch.Tensor.data_ptr
    storage.data_ptr, torch.Tensor.data_ptr = address, place
    storage.device, torch.Tensor.untyped_storage = property(device), untyped
    for name in ("__getitem__", "__setitem__", "tolist"):
        setattr(storage, name, refused(name))
    to_json = json.JSONEncoder.default

    def encoded(encoder: Any, value: Any) -> Any:
        return value._refuse("json") if type(value) is Number else to_json(encoder, value)

    json.JSONEncoder.default = encoded  # type: ignore[assignment, method-assign]


class Reader:
    """What reading a tensor in Python gives."""

    def __init__(self, translator: Translator, accept: bool = False):
        self.translator = translator
        self.choices: tuple[bool, ...] = ()
        self.accept = accept  # go on after the last choice, and assume the way that is taken
        self.branches: list[Branch] = []
        self.accepted: list[Branch] = []

    def renew(self, choices: Sequence[bool]) -> None:
        """A step begins, and these are the ways that it takes."""
        self.choices, self.branches, self.accepted = tuple(choices), [], []

    def install(self) -> None:
        """For the rest of this process."""
        item, truth, number, shown = torch.Tensor.item, torch.Tensor.__bool__, torch.Tensor.__float__, torch.Tensor.__repr__
        boundary = self.translator.boundary

        def read(t: torch.Tensor) -> Any:
            return item(t) if self._plain(t) else (self.branch(t) if t.dtype == torch.bool else Number(t.detach(), boundary))

        def decide(t: torch.Tensor) -> bool:
            return bool(truth(t)) if self._plain(t) else self.branch(t if t.dtype == torch.bool else t != 0)

        def real(t: torch.Tensor) -> float:
            if not self._plain(t):
                raise boundary.refused(ReadsData(f"{boundary.where()}: float() needs the value of a computed tensor"))
            return float(number(t))

        def text(t: torch.Tensor, **kwargs: Any) -> str:
            boundary.shown()
            return str(shown(t, **kwargs))

        torch.Tensor.item, torch.Tensor.__bool__, torch.Tensor.__float__, torch.Tensor.__repr__ = read, decide, real, text
        self._refuse(_LEAVING, self._has_no_value)
        self._follow_written()
        _patch_memory(boundary)
        _patch_factories()

    def install_real(self) -> None:
        """For a run on real tensors, where values are there: what is read without PyTorch's dispatcher is noted, or refused."""
        to_list = torch.Tensor.tolist

        def listed(t: torch.Tensor) -> Any:
            value = to_list(t)
            if self.translator.step is not None and self.translator.known(t) is None:
                self.translator.noted(f"{value!r:.80} is read")
            return value

        torch.Tensor.tolist = listed
        self._refuse(("numpy", "__array__", "__dlpack__", "data_ptr"), lambda t: self.translator.step is not None)

    def _refuse(self, names: Sequence[str], when: Callable[[torch.Tensor], bool]) -> None:
        """Methods that take values out of PyTorch."""
        boundary = self.translator.boundary

        def refused(name: str) -> Any:
            original = getattr(torch.Tensor, name)

            def call(t: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
                if when(t):
                    raise boundary.refused(ReadsData(f"{boundary.where()}: {name} takes values out of PyTorch"))
                return original(t, *args, **kwargs)

            return call

        for name in names:
            setattr(torch.Tensor, name, refused(name))

    def _has_no_value(self, t: torch.Tensor) -> bool:
        """Whether there is nothing behind a tensor, or something else than in a real run."""
        return isinstance(t, FakeTensor) or (self.translator.step is not None and self.translator.known(t) is None) or self._stale(t)

    def _stale(self, t: torch.Tensor) -> bool:
        """Whether a tensor that was there before has been written since: its memory holds what it held, since calls run on stand-ins."""
        if type(t) not in (torch.Tensor, torch.nn.Parameter) or t.is_meta or t.layout is not torch.strided:
            return False
        found = self.translator.known(t)
        if found is None:
            return bool(self.translator.memory.storage(self.translator.keep(t)).pieces)
        with _disable_current_modes():
            return not torch.equal(*(v.detach().reshape(-1).contiguous().view(torch.uint8) for v in (found, t)))

    def _follow_written(self) -> None:
        """Functions that read a tensor's memory without PyTorch's dispatcher: of one that was there before they give what it holds now."""
        to_list, copied, boundary = torch.Tensor.tolist, torch.Tensor.__deepcopy__, self.translator.boundary

        def listed(t: torch.Tensor) -> Any:
            if is_ours(sys._getframe(1).f_code.co_filename) or not self._stale(t):
                return to_list(t)
            if (found := self.translator.known(t)) is None:
                raise boundary.refused(ReadsData(f"{boundary.where()}: tolist() needs the values of a computed tensor"))
            with _disable_current_modes():
                return found.tolist()

        def deeply(t: torch.Tensor, memo: dict[Any, Any]) -> Any:
            plain = t.is_leaf and type(t) in (torch.Tensor, torch.nn.Parameter)
            return FakeTensor.__deepcopy__(t, memo) if plain else copied(t, memo)

        torch.Tensor.tolist, torch.Tensor.__deepcopy__ = listed, deeply

    def _plain(self, t: torch.Tensor) -> bool:
        """Whether reading is PyTorch's own affair: outside the step, a value that is known, a subclass, or no single number."""
        kinds = (torch.Tensor, torch.nn.Parameter, FakeTensor)
        return self.translator.step is None or t.numel() != 1 or type(t) not in kinds or self.translator.known(t) is not None

    def branch(self, t: torch.Tensor) -> bool:
        """The way to take at a condition on data."""
        tr = self.translator
        place = tr._place()
        tr.emitter.place = place
        try:
            condition = tr.named(t.reshape(()))
        except NoValue as error:
            text = f"{place.source}: a condition on a value without a meaning here: {error.why}"
            raise tr.boundary.refused(ReadsData(text)) from error
        if (constant := decided(tr.emitter, condition)) is not None:
            return constant
        found = next((b for b in (*self.branches, *self.accepted) if b.condition == condition), None)
        if found is not None:
            return found.taken
        if len(self.branches) == MOST_BRANCHES:
            if not self.accept:
                text = f"{place.source}: more than {MOST_BRANCHES} conditions on data: they are not captured both ways"
                raise tr.boundary.refused(ReadsData(text))
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


__all__ = ["COMPUTED", "MOST_BRANCHES", "Branch", "Number", "Reader", "ReadsData"]
