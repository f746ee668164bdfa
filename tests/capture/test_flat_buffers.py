"""Flat buffers of many parameters: every element goes where one gather, or one reduce-scatter, would bring it."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="PyTorch is absent: captured code is not tested")

from trainverify.graph.types import TensorType
from trainverify.ops import OPS
from trainverify.torch.buffers import Group, gathered_apart, owned, reduced_to_owners
from trainverify.torch.views import View, box
from trainverify.translate.emit import Emitter

GROUP = Group("ranks 3,5", (3, 5))


@pytest.mark.parametrize("places", [(0, 3, 10), (0, 5, 10), (2, 7, 9), (), (0, 40)])
def test_pieces_cover_every_element_once_and_keep_to_one_block(places: tuple[int, ...]) -> None:
    found = list(owned(GROUP, 10, places))
    assert [i for start, stop, _ in found for i in range(start, stop)] == list(range(10))
    assert all(start // 5 == (stop - 1) // 5 == at for start, stop, at in found)


def test_gathered_from_owners() -> None:
    """Elements 3 to 5 of 10 are the last two of the first rank's five; the second rank's own begin at 5."""
    e = Emitter(OPS)
    x = e.declare("x", TensorType((5,), "f32"))
    made = gathered_apart(e, GROUP, 5, x, (0, 3, 7, 10))
    sent = [(op.get("root"), op.inputs, e.shape(op.outputs[0])) for op in e.ops if op.name == "broadcast"]
    cuts = {op.outputs[0]: (op.get("start"), op.get("stop")) for op in e.ops if op.name == "slice"}
    assert [(root, [cuts[str(i)] for i in given], shape) for root, given, shape in sent] == [
        (3, [], (3,)),
        (3, [], (2,)),
        (5, [(0, 2)], (2,)),
        (5, [(2, 5)], (3,)),
    ]
    assert e.shape(made) == (10,)


def test_reduced_to_owners() -> None:
    """Every piece goes to the rank whose block it is in, as a sum or an average; only that rank has the result."""
    e = Emitter(OPS)
    x = e.declare("x", TensorType((10,), "f32"))
    made = reduced_to_owners(e, GROUP, 3, x, (0, 3, 7, 10), "avg")
    assert [(op.get("root"), op.get("op"), len(op.outputs)) for op in e.ops if op.name == "reduce"] == [
        (3, "avg", 1),
        (3, "avg", 1),
        (5, "avg", 0),
        (5, "avg", 0),
    ]
    assert e.shape(made) == (5,)


def test_a_piece_of_a_concatenation_is_cut_out_of_the_tensor_that_it_is_in() -> None:
    e = Emitter(OPS)
    a, b = e.declare("a", TensorType((4,), "f32")), e.declare("b", TensorType((6,), "f32"))
    reduced_to_owners(e, GROUP, 3, e.op("concat", (a, b), {"dim": 0}), (0, 4, 10), "sum")
    assert [(op.inputs, op.get("start"), op.get("stop")) for op in e.ops if op.name == "slice"] == [(("b",), 0, 1), (("b",), 1, 6)]


def test_runs_of_a_flattened_tensor_by_its_rows() -> None:
    """Whole rows, a run in one row, and a run that ends inside a row, which stays flat."""
    block = View(0, (5, 2, 3), (6, 3, 1))

    def digits(start: int, count: int) -> list[tuple[int, int, int]]:
        found = box(View(start, (count,), (1,)), block)
        assert found is not None
        return [(d.size, d.start, d.count) for d in found.digits]

    assert digits(6, 12) == [(5, 1, 2), (2, 0, 2), (3, 0, 3)]
    assert digits(9, 3) == [(5, 1, 1), (2, 1, 1), (3, 0, 3)]
    assert digits(10, 2) == [(5, 1, 1), (2, 1, 1), (3, 1, 2)]
    assert digits(4, 9) == [(30, 4, 9)]
