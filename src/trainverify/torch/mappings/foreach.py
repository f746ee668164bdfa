"""`_foreach_…`: the op of one tensor for every tensor of a list."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

# argument of the foreach op → argument of the op of one tensor
_SECOND: Final = {"scalar": "other", "scalars": "other"}
FOREACH: Final[Mapping[str, tuple[str, Mapping[str, str]]]] = {
    "_foreach_add": ("add", _SECOND),
    "_foreach_sub": ("sub", _SECOND),
    "_foreach_mul": ("mul", _SECOND),
    "_foreach_div": ("div", _SECOND),
    "_foreach_pow": ("pow", {"scalar": "exponent", "scalars": "exponent"}),
    "_foreach_maximum": ("maximum", _SECOND),
    "_foreach_minimum": ("minimum", _SECOND),
    "_foreach_clamp_min": ("clamp_min", {"scalar": "min", "scalars": "min"}),
    "_foreach_clamp_max": ("clamp_max", {"scalar": "max", "scalars": "max"}),
    "_foreach_lerp": ("lerp", {"tensors1": "end", "weights": "weight"}),
    "_foreach_addcmul": ("addcmul", {"scalars": "value"}),
    "_foreach_addcdiv": ("addcdiv", {"scalars": "value"}),
    "_foreach_norm": ("linalg_vector_norm", {}),
    "_foreach_copy": ("copy", {}),
    "_foreach_zero": ("zero", {}),
    **{f"_foreach_{n}": (n, {}) for n in ("sqrt", "rsqrt", "reciprocal", "neg", "abs", "exp", "log", "sign", "sigmoid", "tanh", "erf")},
}


def single(name: str) -> str | None:
    """The op of one tensor that a foreach op is made of, without its namespace."""
    found = FOREACH.get(name)
    return None if found is None else found[0]


def each(name: str, given: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The arguments of every single op."""
    renamed = FOREACH[name][1]
    count = len(given["self"])
    calls: list[dict[str, Any]] = []
    for i in range(count):
        one = {}
        for key, value in given.items():
            listed = isinstance(value, list | tuple) and len(value) == count
            one[renamed.get(key, key)] = value[i] if listed else value
        calls.append(one)
    return calls
