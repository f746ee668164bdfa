"""Arrays that the code closes over: numbers, ranges, or inputs that are equal only by content."""

from __future__ import annotations

import hashlib
import math
from typing import Any

import numpy as np

from trainverify.jax.values import DTYPES, TABLE_ELEMENTS, Grid, Number, Opaque, Table, kind_of, listed
from trainverify.translate.literals import Literals

Array = np.ndarray[Any, Any]


def content_name(data: Array, dtype: str) -> str:
    """A name that only arrays with this content have."""
    data = np.ascontiguousarray(data)
    text = f"{dtype}{list(data.shape)}".encode() + data.tobytes()
    return f"constant.{hashlib.sha256(text).hexdigest()[:16]}"


def constant(value: Any, literal: Literals) -> Number | Grid | Table | Array | Opaque:
    """What an array of the trace is: one number, integers that follow a rule or are few, or an array (to be named by its content)."""
    name = str(getattr(value, "dtype", ""))
    if name == "uint32" and math.prod(value.shape) <= TABLE_ELEMENTS:
        return listed(np.asarray(value).astype(np.int64)[None], "i64")  # followed where all numbers are known
    if name not in DTYPES:
        return Opaque(f"a constant of type {name or type(value).__name__}")
    data, dtype = np.asarray(value), DTYPES[name]
    if kind_of(dtype) == "real":
        wide = data.astype(np.float64)
        if wide.size and bool((wide == wide.reshape(-1)[0]).all()):
            return Number(real(float(wide.reshape(-1)[0]), literal), tuple(data.shape), dtype)
        return wide
    if data.size and data.size <= TABLE_ELEMENTS:
        return listed(data[None], dtype)
    return data


def whole_numbers(data: Array) -> Grid | None:
    """The rule of an array of whole numbers that follow one: 0, 1, 2 or [2, 4]."""
    if not data.size or data.size > TABLE_ELEMENTS or not (np.abs(data) < 1 << 24).all() or (data != np.rint(data)).any():
        return None
    found = listed(data.astype(np.int64)[None], "i64")
    return found if isinstance(found, Grid) else None


def real(value: float, literal: Literals) -> Any:
    return 0 if value == 0 else literal(value)


__all__ = ["constant", "content_name", "real", "whole_numbers"]
