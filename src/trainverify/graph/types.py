"""Types of tensors: a shape and a dtype, written `f32[2048,256]`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

# dtype → kind of its values. Float widths are all the reals; they are compared as names only.
DTYPES: Final[dict[str, str]] = {
    "f64": "real",
    "f32": "real",
    "bf16": "real",
    "f16": "real",
    "f8e4m3": "real",
    "f8e5m2": "real",
    "i64": "int",
    "i32": "int",
    "i16": "int",
    "i8": "int",
    "u8": "int",
    "bool": "bool",
}
_FLOATS: Final = ("f8e4m3", "f8e5m2", "f16", "bf16", "f32", "f64")


@dataclass(frozen=True, slots=True)
class TensorType:
    shape: tuple[int, ...]
    dtype: str = "f32"

    @property
    def kind(self) -> str:
        return DTYPES[self.dtype]

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


def promote(dtypes: list[str]) -> str:
    """The float type that PyTorch gives a mix of float types."""
    floats = {d for d in dtypes if DTYPES[d] == "real"}
    if {"f16", "bf16"} <= floats:
        floats |= {"f32"}
    return max(floats, key=_FLOATS.index) if floats else "f32"


def result_dtype(kind: str, dtypes: list[str], asked: str | None = None) -> str:
    """dtype of a result of this kind from tensors of these dtypes; `asked` is an explicit `dtype` attribute."""
    if asked is not None and DTYPES[asked] == kind:
        return asked
    if kind == "real":
        return promote(dtypes)
    if kind == "bool":
        return "bool"
    ints = [d for d in dtypes if DTYPES[d] == "int"]
    return ints[0] if ints and len(set(ints)) == 1 else "i64"
