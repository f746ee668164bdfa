"""Objects that a capture makes, found among all that the process has: each is looked at once."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any, Final
from weakref import ref

import torch

_FREEZE: Final = gc.freeze
_PYTHON: Final = 1 << 9  # flag of classes that are not built into C code
_FOUND: list[Callable[[], Any]] = []  # objects that were found, for as long as they are there


def hide() -> None:
    """Pass over all objects that exist now. The code's own `gc.freeze` does nothing from now on: it would hide its objects too."""
    _FREEZE()
    gc.freeze = lambda: None


def begin() -> None:
    """All of the user's code is about to run: what exists now is around it, not in it."""
    hide()
    _FOUND.clear()


def remember() -> None:
    """Before processes are forked for captures, which look at what they make themselves: note what exists."""
    _FOUND[:] = _held()


def alive() -> list[Any]:
    """Models, optimizers and managers for `with`, in the order in which they were made. For the process of a capture."""
    gc.collect()  # what is passed over is not collected any more
    _FOUND.extend(_held())
    _FREEZE()
    there = [(found, o) for found in _FOUND if (o := found()) is not None]
    _FOUND[:] = [found for found, _ in there]
    return [o for _, o in there]


def _held() -> list[Callable[[], Any]]:
    objects = gc.get_objects()
    kinds = {k for k in set(map(type, objects)) if _looked_for(k)}
    return [_holder(o) for o in objects if type(o) in kinds]


def _looked_for(kind: type) -> bool:
    if issubclass(kind, torch.nn.Module | torch.optim.Optimizer):
        return True
    return any("__exit__" in vars(k) for k in type.mro(kind) if k.__flags__ & _PYTHON)


def _holder(value: Any) -> Callable[[], Any]:
    try:
        return ref(value)
    except TypeError:  # no reference lets it go: it counts as there from now on
        return lambda: value


__all__ = ["alive", "begin", "hide", "remember"]
