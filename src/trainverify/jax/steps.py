"""Several calls of a step: its program has to be the same each time. A step that is not jitted runs its Python anew at every call, and
what it keeps there (counters, closures, NumPy arrays, caches) would change what the next one does.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

STEPS: Final = 3
LATER: Final = "the third call of each step has the program of the first; later ones are taken to do what the third does"


def fingerprint(closed: ClosedJaxpr) -> str:
    """Equal of two traces only if they compute the same: equations, parameters, and constants by content."""
    found = hashlib.sha256()
    _closed(closed, found.update)
    return found.hexdigest()


def _closed(closed: ClosedJaxpr, add: Any) -> None:
    for c in closed.consts:
        _value(c, add)
    _jaxpr(closed.jaxpr, add)


def _jaxpr(jaxpr: Jaxpr, add: Any) -> None:
    numbers: dict[Any, int] = {}

    def atom(v: Any) -> None:
        if isinstance(v, Literal):
            add(f"literal {v.aval} ".encode())
            _value(v.val, add)
        else:
            add(f"{numbers.setdefault(v, len(numbers))} {v.aval} ".encode())

    for v in (*jaxpr.constvars, *jaxpr.invars):
        atom(v)
    for eqn in jaxpr.eqns:
        add(f"; {eqn.primitive.name} ".encode())
        for v in (*eqn.invars, *eqn.outvars):
            atom(v)
        for name, value in sorted(eqn.params.items()):
            add(f"{name}=".encode())
            _value(value, add)
    add(b"out ")
    for v in jaxpr.outvars:
        atom(v)


def _value(value: Any, add: Any) -> None:
    """A parameter or constant. Functions count by where their code is: what they compute is in the program."""
    if isinstance(value, ClosedJaxpr):
        _closed(value, add)
    elif isinstance(value, Jaxpr):
        _jaxpr(value, add)
    elif isinstance(value, Mapping):
        for k in sorted(value, key=str):
            add(f"{k}:".encode())
            _value(value[k], add)
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        add(f"{type(value).__name__}{len(value)}(".encode())
        for v in value:
            _value(v, add)
    elif hasattr(value, "dtype") and hasattr(value, "shape") and not isinstance(value, type):
        _array(value, add)
    elif callable(value) and not isinstance(value, type):
        code = getattr(value, "__code__", None)
        add(f"{type(value).__name__} {getattr(code, 'co_filename', '')}:{getattr(code, 'co_firstlineno', '')} ".encode())
    else:
        shown = repr(value)
        add((type(value).__name__ if " at 0x" in shown else shown).encode())


def _array(value: Any, add: Any) -> None:
    add(f"{value.dtype}{tuple(value.shape)}".encode())
    try:
        add(np.ascontiguousarray(np.asarray(value)).tobytes())
    except TypeError:  # a type of array without content: keys, what is only declared
        add(str(value).encode())


__all__ = ["LATER", "STEPS", "fingerprint"]
