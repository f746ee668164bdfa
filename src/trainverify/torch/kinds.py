"""What Python shows of a value in the user's code: the type and the attributes that it has in a real run, not those of a fake tensor."""

from __future__ import annotations

import builtins
import sys
import sysconfig
from collections.abc import Callable, MutableMapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import torch

from trainverify.torch.frames import is_ours, torchs
from trainverify.torch.lines import may_be_users
from trainverify.torch.private import FakeTensor, FakeTensorMode, _disable_current_modes
from trainverify.torch.reading import Number


class Type:
    """In the place of `type`: it is called as that is, and is that in class statements, `isinstance` and annotations."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return kind_of(args[0]) if len(args) == 1 and not kwargs else type(*args, **kwargs)

    def __instancecheck__(self, value: Any) -> bool:
        return isinstance(value, type)

    def __subclasscheck__(self, kind: Any) -> bool:
        return issubclass(kind, type)

    def __mro_entries__(self, bases: Any) -> tuple[type, ...]:
        return (type,)

    def __getattr__(self, name: str) -> Any:
        return getattr(type, name)

    def __getitem__(self, kind: Any) -> Any:
        return type[kind]

    def __or__(self, other: Any) -> Any:
        return type | other

    def __ror__(self, other: Any) -> Any:
        return other | type

    def __eq__(self, other: object) -> bool:
        return other is self or other is type

    def __hash__(self) -> int:
        return hash(type)


def kind_of(value: Any) -> Any:
    """The type of a value in a real run."""
    kind = type(value)
    if kind is Number:
        return value.__class__
    if kind is not FakeTensor:
        return kind
    return next((k for k in (torch.nn.Parameter, torch.nn.Buffer) if isinstance(value, k)), torch.Tensor)


class Attributes(dict[str, Any]):
    """Those of a fake tensor that a real one has too. What is written to them is written to the tensor."""

    def __init__(self, tensor: Any):
        super().__init__({n: v for n, v in vars(tensor).items() if n not in _fakes()})
        self.tensor = tensor

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        vars(self.tensor)[name] = value

    def __delitem__(self, name: str) -> None:
        super().__delitem__(name)
        del vars(self.tensor)[name]

    pop, popitem, clear = MutableMapping.pop, MutableMapping.popitem, MutableMapping.clear
    update, setdefault = MutableMapping.update, MutableMapping.setdefault

    def __ior__(self, other: Any) -> Any:  # type: ignore[misc]
        self.update(other)
        return self


class Shown(torch.Tensor):
    """The class that fake tensors inherit from: outside PyTorch `x.__class__` and `vars(x)` are those of a real run."""

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return kind_of(self) if _told(sys._getframe(1).f_code.co_filename) else type(self)

    def __dir__(self) -> Any:
        return sorted({*dir(torch.Tensor), *Attributes(self)}) if _told(sys._getframe(1).f_code.co_filename) else super().__dir__()

    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        return Attributes(self) if _told(sys._getframe(1).f_code.co_filename) else _ATTRIBUTES.__get__(self)


@cache
def _told(file: str) -> bool:
    return torchs(file) is None and not is_ours(file)


@cache
def _fakes() -> frozenset[str]:
    """The attributes that every fake tensor has."""
    with _disable_current_modes(), FakeTensorMode():
        return frozenset((*vars(torch.empty(0)), "_is_param", "_is_buffer"))


class NoTensor(torch.Tensor):
    """In the place of the class of fake tensors: no tensor is one."""


class _Telling(ModuleType):
    """A module of fake tensors. Installed code that takes what tells them, whenever it asks, has a way for traces: it is taken."""

    def __getattribute__(self, name: str) -> Any:
        if name in _ASKED and _told(file := (frame := sys._getframe(1)).f_code.co_filename):
            _ASSUMING[-1](TRACED.format("/".join(Path(file).parts[-2:]), frame.f_lineno))
        return super().__getattribute__(name)


TRACED: Final = "{}:{} asks whether tensors are fake: its way for traces is taken, which is to compute what that of a real run does"
_ASKED: Final = ("FakeTensor", "is_fake")
_ASSUMING: Final[list[Callable[[str], None]]] = []
_EXEC, _EVAL = builtins.exec, builtins.eval
_ATTRIBUTES: Final = vars(torch.Tensor)["__dict__"]
TYPE: Final = Type()
_PYTHON: Final = sysconfig.get_paths()["stdlib"]


def install(assume: Callable[[str], None]) -> None:
    """Fake tensors show what real ones do; `type` in all modules of the user's own that are there now: installed packages keep theirs."""
    FakeTensor.__bases__ = (Shown,)
    _ASSUMING.append(assume)
    for module in (torch._subclasses, torch._subclasses.fake_tensor):
        module.__class__ = _Telling
    for module in list(sys.modules.values()):
        if (space := getattr(module, "__dict__", {})).get("FakeTensor") is FakeTensor and _told(getattr(module, "__file__", None) or "<"):
            space["FakeTensor"] = NoTensor
        if _is_own(getattr(module, "__file__", None)):
            vars(module).setdefault("type", TYPE)
    builtins.exec, builtins.eval = _running(_EXEC), _running(_EVAL)


def _is_own(file: Any) -> bool:
    """Whether a file is the user's own, of no installed package."""
    return isinstance(file, str) and not file.startswith(_PYTHON) and "site-packages" not in file and may_be_users(file)


def _running(function: Callable[..., Any]) -> Any:
    """`exec` or `eval`, with `type` in what runs of the user's own: a module that is imported later, or text."""

    def run(source: Any, globals: Any = None, locals: Any = None, /, **more: Any) -> Any:
        frame = sys._getframe(1)
        space = frame.f_globals if globals is None else globals
        if _is_own(space.get("__file__", frame.f_code.co_filename)):
            space.setdefault("type", TYPE)
        if globals is None:
            return function(source, space, frame.f_locals if locals is None else locals, **more)
        return function(source, globals, locals, **more)

    return run


__all__ = ["install", "kind_of"]
