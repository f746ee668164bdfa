"""The operator table: declarations, and uses that do not fit one."""

from __future__ import annotations

from typing import Any

import pytest

from trainverify.graph.types import TensorType
from trainverify.ops import OPS
from trainverify.ops.table import OpError, UnknownOp, op
from trainverify.primitives import node as F
from trainverify.primitives.node import Node

X = TensorType((2, 3))
W = TensorType((5, 3))

REJECTED: list[tuple[str, dict[str, Any], tuple[TensorType | None, ...], str]] = [
    ("frobnicate", {}, (X,), "unknown operator 'frobnicate'"),
    ("all_reduce.grad", {}, (X, X), "unknown operator 'all_reduce.grad'"),
    ("softmax", {"axis": 1}, (X,), "softmax has no attribute 'axis' (it has: dim)"),
    ("softmax", {"dim": 1.0}, (X,), "softmax: attribute dim = 1.0 is not int = -1"),
    ("softmax", {"dim": True}, (X,), "softmax: attribute dim = True is not int = -1"),
    ("softmax", {"dim": 2}, (X,), "softmax(f32[2,3]): dimension 2 of a tensor with 2 dimensions"),
    ("pow", {}, (X,), "pow needs the attribute 'exponent'"),
    ("linear", {}, (X,), "linear takes 2 to 3 tensors, got 1"),
    ("linear", {}, (X, None), "linear: tensor 'w' is missing"),
    ("concat", {"dim": 0}, (X, None, X), "concat: tensor 2 is missing"),
    ("matmul", {}, (X, W), "matmul(f32[2,3], f32[5,3]): contract: sizes 3 and 5 of one label differ"),
    ("add", {}, (X,), "give a second tensor or the attribute `value`, not both"),
    ("gelu", {"approximate": "fast"}, (X,), "gelu: attribute approximate = 'fast'"),
    ("cumsum", {"dim": None}, (X,), "cumsum: attribute dim = None is not int"),
    ("to", {"dtype": "f31"}, (X,), "unknown dtype 'f31'"),
    ("float", {"dtype": "i64"}, (X,), "i64 is not a float type"),
    ("split", {"sizes": (1, 3)}, (X,), "sizes [1, 3] do not add up to 2"),
    ("chunk", {"chunks": 3, "index": 2}, (X,), "no piece 2 of 3 of a dimension of size 2"),
    ("norm", {"p": 0}, (X,), "norm needs p > 0"),
    ("grad_norm", {}, (), "grad_norm of nothing"),
    ("dropout", {"p": 1.5, "key": 0}, (X,), "p is a probability"),
    ("dropout", {"p": 0.5, "key": 0, "origin": (1, 0), "logical_shape": (2, 3)}, (X,), "block [2, 3] at [1, 0] is not inside [2, 3]"),
    ("embedding", {}, (X, W), "one_hot needs integers"),
    ("conv1d", {}, (TensorType((1, 3, 2)), TensorType((5, 3, 3))), "a window of 3 (dilation 1) in a dimension of size 2"),
    ("conv2d", {"stride": (1, 1, 1)}, (TensorType((1, 3, 7, 7)), TensorType((5, 3, 3, 3))), "[1, 1, 1] for 2 dimensions"),
    ("apply_rotary_emb", {}, (TensorType((2, 3)), W, W), "rotary embedding of size 3"),
    ("attention", {}, (X, X, X), "attention needs q, k, v"),
    ("batch_norm", {"training": False}, (X,), "batch_norm needs running statistics"),
    ("cross_entropy", {}, (X, TensorType((3,), "i64")), "targets [3] for classes [2, 3]"),
    ("sum.grad", {"wrt": (0,), "given": (1,)}, (X, TensorType(())), "names a tensor that the operator does not have"),
    ("sum.grad", {"wrt": (0,)}, (X, TensorType((2,))), "gradient of shape [2] for a value of shape []"),
]


@pytest.mark.parametrize(("name", "attrs", "types", "message"), REJECTED, ids=[f"{r[0]}: {r[3]}" for r in REJECTED])
def test_rejected(name: str, attrs: dict[str, Any], types: tuple[TensorType | None, ...], message: str) -> None:
    with pytest.raises(OpError) as caught:
        OPS.lower(name, attrs, types)
    assert message in str(caught.value)


def test_uneven_blocks_of_a_collective() -> None:
    with pytest.raises(OpError, match="dimension 0 of size 5 does not divide among 2 members"):
        OPS.lower("reduce_scatter", {"group": "g"}, (TensorType((5, 3)),), members=2)


def test_point_to_point_has_no_meaning_alone() -> None:
    for definition in OPS:
        if definition.point_to_point:
            with pytest.raises(UnknownOp):
                OPS[definition.name + ".grad"]


def test_a_name_is_declared_once() -> None:
    @op("linear", "mine")
    def linear(x: Node) -> Node:
        return x

    with pytest.raises(OpError, match="exists already"):
        OPS.extended([linear])


def test_extending_leaves_the_table_alone() -> None:
    @op("double", "mine")
    def double(x: Node) -> Node:
        """2·x."""
        return x * 2

    table = OPS.extended([double])
    assert "double" in table
    assert "double.grad" in table
    assert "double" not in OPS


def test_equal_looking_attributes_of_other_types_are_other_operators() -> None:
    exact = OPS.lower("mul", {"value": 1}, (TensorType((2,), "i64"),))
    rounded = OPS.lower("mul", {"value": 1.0}, (TensorType((2,), "i64"),))
    assert exact.types != rounded.types


def test_every_operator_says_what_it_is() -> None:
    assert [d.name for d in OPS if not d.doc.strip().endswith((".", ")"))] == []


def test_sizes_do_not_become_literals() -> None:
    """Positions, offsets and lengths are attributes of iota, slice, pad and reshape, so that shapes can shrink."""
    lowered = OPS.lower("create_mask", {"queries": 7, "keys": 11, "query_offset": 5}, ())
    assert [n for n in F.topological(lowered.outputs) if n.prim == "const"] == []
    lowered = OPS.lower("dropout", {"p": 0.5, "key": 3, "origin": (2, 0), "logical_shape": (11, 3)}, (X,))
    literals = {n.attrs[0] for n in F.topological(lowered.outputs) if n.prim == "const"}
    assert literals <= {0, 0.5, 1, 3}
