"""What Python objects hold from step to step: everything that a step's function refers to, before and after it.

A tensor that is put in the place of another one (`state["m"] = 0.9 * state["m"] + g`), a counter, a learning rate that a scheduler sets:
no memory of a model or an optimizer is written, and the next step may still do something else. The step is then captured once more,
after one that ran before it.
"""

from __future__ import annotations

import functools
import types
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
from torch.optim import Optimizer

from trainverify.torch.discover import referred
from trainverify.torch.placed import local
from trainverify.torch.reading import Number
from trainverify.torch.translate import key_of

DEPTH: Final = 7
MOST: Final = 20_000  # objects
SHOWN: Final = 3
CUT: Final = "what is not looked at"
_OF_MODULES: Final = frozenset(vars(torch.nn.Module()))  # attributes that every module has
_PLAIN: Final = (int, float, complex, str, bytes, type(None))


def snapshot(step: Any) -> dict[str, Any]:
    """Where a value or a tensor is → what it is: the value, or the storage of the tensor and the tensor itself. At CUT, whether there is
    more than is looked at."""
    found: dict[str, Any] = {}
    seen: set[int] = set()
    waiting = deque([("", step, 0)])
    while waiting and len(seen) < MOST:
        name, value, depth = waiting.popleft()
        if isinstance(value, Number):
            value = value.tensor
        if isinstance(value, torch.Tensor):
            found[name] = Held(value)
        elif isinstance(value, _PLAIN):
            found[name] = repr(value)
        elif depth == DEPTH:
            found[CUT] = True
        elif id(value) not in seen:
            seen.add(id(value))
            if isinstance(value, list | tuple | deque | set | dict):
                found[f"{name} has"] = len(value)
            waiting.extend((f"{name}{part}", inner, depth + 1) for part, inner in _parts(value))
    if waiting:
        found[CUT] = True
    return found


class Held:
    """A tensor, by the memory that it has."""

    def __init__(self, tensor: torch.Tensor):
        self.tensor = tensor
        try:
            self.key: int | None = key_of(local(tensor))
        except (RuntimeError, NotImplementedError):  # no memory of its own
            self.key = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Held) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


def changed(before: Mapping[str, Any], after: Mapping[str, Any], known: set[int]) -> list[str]:
    """Where something else is now. `known` are the tensors that are compared by name."""
    places = [n for n in dict.fromkeys((*before, *after)) if n != CUT and before.get(n) != after.get(n)]
    return [n for n in places if not any(isinstance(v := side.get(n), Held) and id(v.tensor) in known for side in (before, after))]


def told(places: list[str]) -> str:
    more = f" and {len(places) - SHOWN} more" if len(places) > SHOWN else ""
    return ", ".join(n.removesuffix(" has").lstrip(".") for n in places[:SHOWN]) + more


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """What an object refers to, as far as it is the user's."""
    if isinstance(value, torch.nn.Module):
        yield from ((f".{n}", m) for n, m in value._modules.items() if m is not None)
        if not _is_torchs(value):
            yield from ((f".{n}", v) for n, v in vars(value).items() if n not in _OF_MODULES)
    elif isinstance(value, Optimizer):
        for i, group in enumerate(value.param_groups):
            yield from ((f".param_groups[{i}][{k!r}]", v) for k, v in group.items() if k != "params")
    elif isinstance(value, dict):
        yield from ((f"[{k!r}]", v) for k, v in value.items() if isinstance(k, _PLAIN))
    elif isinstance(value, list | tuple | deque):
        yield from ((f"[{i}]", v) for i, v in enumerate(value))
    elif isinstance(value, functools.partial):
        yield from ((f".{i}", v) for i, v in enumerate((value.func, *value.args, *value.keywords.values())))
    elif isinstance(value, types.MethodType):
        yield from (("", value.__self__), ("", value.__func__))
    elif isinstance(value, types.FunctionType):
        if not value.__module__.startswith(("torch.", "trainverify.")):
            yield from ((f".{n}", v) for n, v in referred(value))
            yield from ((f".{n}", v) for n, v in vars(value).items())
            yield from ((f".{i}", v) for i, v in enumerate(value.__defaults__ or ()))
    elif isinstance(value, torch.optim.lr_scheduler.LRScheduler):
        yield ".last_epoch", value.last_epoch
        yield ".optimizer", value.optimizer
    elif not isinstance(value, type | types.ModuleType) and not _is_torchs(value):
        slots = [n for kind in type(value).__mro__ for n in getattr(kind, "__slots__", ()) if hasattr(value, n)]
        yield from ((f".{n}", getattr(value, n)) for n in slots if not n.startswith("__"))
        yield from ((f".{n}", v) for n, v in getattr(value, "__dict__", {}).items())


def _is_torchs(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] in ("torch", "trainverify", "builtins", "numpy", "_io", "logging", "threading")
