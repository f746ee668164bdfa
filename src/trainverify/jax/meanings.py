"""The user's own kernels: what a Pallas kernel or a custom call means, given as an ordinary JAX function that is traced in its place.

It is an assumption of the verdict, and listed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from trainverify.jax.mappings import MAPPINGS

MEANINGS: Final[dict[str, Callable[..., Any]]] = {}  # name of a kernel → function; filled by `meaning`, once per kernel


def meaning(name: str, function: Callable[..., Any] | None = None) -> Any:
    """Declare what a kernel means: `tvj.meaning("my_kernel", f)`, or as a decorator of f."""
    if function is None:
        return lambda f: meaning(name, f)
    if name in MAPPINGS:
        raise ValueError(f"{name!r} is a primitive of JAX's own")
    if name in MEANINGS and MEANINGS[name] is not function:
        raise ValueError(f"{name} has a meaning already")
    MEANINGS[name] = function
    return function


__all__ = ["MEANINGS", "meaning"]
