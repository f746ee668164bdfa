"""What the storage model holds: names of tensors of the program, or why there is no value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from trainverify.graph.program import Source
from trainverify.translate.emit import Unmapped

DTYPES: Final[Mapping[str, str]] = {
    "torch.float64": "f64",
    "torch.float32": "f32",
    "torch.bfloat16": "bf16",
    "torch.float16": "f16",
    "torch.float8_e4m3fn": "f8e4m3",
    "torch.float8_e5m2": "f8e5m2",
    "torch.int64": "i64",
    "torch.int32": "i32",
    "torch.int16": "i16",
    "torch.int8": "i8",
    "torch.uint8": "u8",
    "torch.bool": "bool",
}
COMPLEX_PARTS: Final[Mapping[str, str]] = {"torch.complex64": "f32", "torch.complex128": "f64"}


@dataclass(frozen=True, slots=True)
class Unknown:
    """A value without a meaning here, and why: an op without a mapping, a random number, memory that was never written.

    `pending` is the number of the communication that has not been waited for, `drawn` the distribution of random numbers and their seed.
    """

    reason: str
    source: Source | None = None
    pending: int | None = None
    drawn: tuple[str, int] | None = None

    def __str__(self) -> str:
        return self.reason + (f" ({self.source})" if self.source else "")


Value = str | Unknown


class ReadsData(Exception):
    """The step reads a computed value in Python: what it does next may depend on data."""


__all__ = ["COMPLEX_PARTS", "DTYPES", "ReadsData", "Unknown", "Unmapped", "Value"]
