"""Functions in the place of others, for the rest of a process that captures."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

# Which names of which modules had a function when processes were about to be forked, by the function's id. Empty: not looked up yet.
_NAMED: dict[int, list[tuple[dict[str, Any], str]]] = {}
_MODULES: dict[str, ModuleType] = {}


def look_up() -> None:
    """Before processes are forked: the names of all functions, once for all of them."""
    _NAMED.clear()
    _MODULES.clear()
    for at, module in list(sys.modules.items()):
        space = getattr(module, "__dict__", None)
        if isinstance(space, dict):
            _MODULES[at] = module
            for name, value in list(space.items()):
                if callable(value) and not isinstance(value, type):
                    _NAMED.setdefault(id(value), []).append((space, name))


def everywhere(changed: Mapping[int, object]) -> None:
    """Put functions in the place of others, by id, in all modules that have imported them by name."""
    known = changed.keys() <= _NAMED.keys()
    for space, name in [place for f in changed for place in _NAMED.get(f, ())] if known else ():
        _put(space, name, changed)
    for module in _others() if known else list(sys.modules.values()):
        space = getattr(module, "__dict__", {})
        for name in list(space):
            _put(space, name, changed)


def _others() -> Iterator[ModuleType]:
    """Modules that were not there when names were looked up, and those of the code."""
    from trainverify.torch.lines import is_users

    for at, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if _MODULES.get(at) is not module or not isinstance(file, str) or ("site-packages" not in file and is_users(file)):
            yield module


def _put(space: dict[str, Any], name: str, changed: Mapping[int, object]) -> None:
    before = space.get(name)
    if id(before) in changed:
        space[name] = made = changed[id(before)]
        _NAMED.setdefault(id(made), []).append((space, name))


__all__ = ["everywhere", "look_up"]
