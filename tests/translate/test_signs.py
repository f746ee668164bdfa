"""What is never negative by how it was made: right forms, and neighbours that may be negative."""

from __future__ import annotations

import pytest

from trainverify.graph.types import TensorType
from trainverify.translate.emit import Emitter
from trainverify.translate.signs import Signs


def emitter() -> Emitter:
    e = Emitter()
    e.begin()
    for name in ("g", "h", "v"):
        e.declare(name, TensorType((3, 5), "f32"))
    return e


def mul(e: Emitter, *factors: str, value: float | None = None) -> str:
    made, *others = factors
    if value is not None:
        made = e.op("mul", (made,), {"value": value})
    for f in others:
        made = e.op("mul", (made, f))
    return made


@pytest.mark.parametrize(
    ("factors", "value", "never"),
    [
        (("g", "g"), None, True),
        (("g", "g"), 0.01, True),
        (("g", "g"), -0.01, False),
        (("g", "h"), 0.01, False),
        (("g", "h", "g"), 0.01, False),
        (("g", "h", "h", "g"), 0.5, True),
        (("v", "g", "g"), 0.5, True),
        (("v", "g"), 0.5, False),
        (("g", "g", "g"), None, False),
    ],
)
def test_products(factors: tuple[str, ...], value: float | None, never: bool) -> None:
    """`v` is a source that is never negative."""
    e = emitter()
    assert Signs(e, {"v"}.__contains__).never_negative(mul(e, *factors, value=value)) is never
    both = e.op("mul", (mul(e, "g", "h"),) * 2)
    assert Signs(e, {"v"}.__contains__).never_negative(both)
