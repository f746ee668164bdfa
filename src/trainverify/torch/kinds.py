"""`type(x)` in the user's modules: the type that x has in a real run, not that of a fake tensor or of a number of ours."""

from __future__ import annotations

import sys
import sysconfig
from typing import Any, Final

import torch
from torch._subclasses.fake_tensor import FakeTensor

from trainverify.torch.lines import is_users
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


TYPE: Final = Type()
_PYTHON: Final = sysconfig.get_paths()["stdlib"]


def install() -> None:
    """In all modules of the user's own that are there now; those of installed packages keep `type`."""
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and not file.startswith(_PYTHON) and "site-packages" not in file and is_users(file):
            vars(module).setdefault("type", TYPE)


__all__ = ["install", "kind_of"]
