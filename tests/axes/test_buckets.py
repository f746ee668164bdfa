"""Which tensors are rows of flat buckets: also through ops that change their elements, such as a scale between a view and a slice."""

from __future__ import annotations

from trainverify.axes.buckets import joined
from trainverify.graph.program import Output
from trainverify.graph.types import TensorType
from trainverify.ops import OPS
from trainverify.translate.emit import Emitter


def test_rows_through_ops_on_their_elements() -> None:
    e = Emitter(OPS)
    x = e.declare("x", TensorType((5, 7), "f32"))
    flat = e.op("reshape", (x,), {"shape": (35,)})
    scaled = e.op("mul", (flat,), {"value": 0.5})
    part = e.op("slice", (scaled,), {"dim": 0, "start": 0, "stop": 16})
    total = e.op("sum", (part,), {})
    found = joined(e.program("p", [x], [], [], [Output(total, "loss")], {}))
    assert {scaled, part} <= found.tensors
    assert flat not in found.tensors
    assert flat in found.rows
    assert not {x, total} & found.rows
