"""The user's own kernels: what an op of another library means, given as an ordinary PyTorch function.

The function takes the arguments of the op and returns its results; it is captured in the op's place. It is an assumption of the verdict.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

MEANINGS: Final[dict[str, Callable[..., Any]]] = {}  # "lib::op" → function; filled by `meaning`, once per op


def meaning(name: str, function: Callable[..., Any] | None = None) -> Any:
    """Declare what the op `lib::op` means: `tvt.meaning("lib::op", f)`, or as a decorator of f."""
    if function is None:
        return lambda f: meaning(name, f)
    if "::" not in name or name.startswith("aten::"):
        raise ValueError(f"{name!r}: expected lib::op, and not one of PyTorch's own")
    if name in MEANINGS and MEANINGS[name] is not function:
        raise ValueError(f"{name} has a meaning already")
    MEANINGS[name] = function
    return function
