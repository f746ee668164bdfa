"""Ops that are alike are looked at once: each of these has a good twin before it, and is found all the same."""

from __future__ import annotations

from dataclasses import replace

import pytest

from trainverify.check import validate
from trainverify.graph.program import Op, Output, Program, attributes
from trainverify.graph.types import TensorType


def program(second: Op, made: TensorType) -> Program:
    """The same sum twice, the second one as given."""
    tensors = {"x": TensorType((3, 5)), "w": TensorType((3, 5)), "a": TensorType((3,)), "b": made, "c": TensorType(())}
    ops = (
        Op("sum", ("x",), ("a",), attributes({"dim": 1})),
        second,
        Op("sum", ("a",), ("c",), attributes({"dim": 0})),
    )
    return Program("twice", tensors, inputs=("x",), parameters=("w",), ops=ops, outputs=(Output("c", "loss"),))


GOOD = Op("sum", ("w",), ("b",), attributes({"dim": 1}))


@pytest.mark.parametrize(
    ("second", "made", "code"),
    [
        (Op("sum", ("w",), ("b",), attributes({"dim": True})), TensorType((3,)), "TV106"),
        (Op("sum", ("w",), ("b",), attributes({"dim": 1.0})), TensorType((3,)), "TV106"),
        (GOOD, TensorType((5,)), "TV105"),
        (GOOD, TensorType((3,), "bf16"), "TV105"),
        (Op("sum", ("w",), ("b",), attributes({"dim": 1}), "sideways"), TensorType((3,)), "TV106"),
        (Op("sum", ("w",), ("b",), (("dim", 1), ("dim", 1))), TensorType((3,)), "TV106"),
    ],
)
def test_a_wrong_twin_is_found(second: Op, made: TensorType, code: str) -> None:
    findings = validate(program(second, made), None)
    assert [f.code for f in findings if "b" in f.message and f.severity == "error"] == [code], findings


def test_the_same_mistake_twice_is_told_twice() -> None:
    """Expected: both places, not only the first."""
    base = program(GOOD, TensorType((5,)))
    again = Op("sum", ("x",), ("d",), attributes({"dim": 1}))
    twice = replace(base, tensors={**base.tensors, "d": TensorType((5,))}, ops=(*base.ops, again))
    assert {f.tensor for f in validate(twice, None) if f.code == "TV105"} == {"b", "d"}


def test_the_good_twin_is_fine() -> None:
    assert not [f for f in validate(program(GOOD, TensorType((3,))), None) if f.code in ("TV105", "TV106")]
