"""Constructors of primitives: shapes and kinds that fit, and those that do not."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import pytest

from trainverify.primitives import node as F
from trainverify.primitives.node import Node, ShapeError

X = F.input_(0, (2, 3, 5), "real")
I = F.input_(1, (2, 3, 5), "int")  # noqa: E741
B = F.input_(2, (2, 3, 5), "bool")

REJECTED: dict[str, Callable[[], Node]] = {
    "shapes [2, 3, 5] and [7] do not broadcast": lambda: X + F.input_(3, (7,), "real"),
    "and takes booleans": lambda: X & B,
    "mod takes integers": lambda: F.call("mod", X, 2),
    "add takes 2 arguments, got 1": lambda: F.call("add", X),
    "select needs a boolean condition": lambda: F.select(I, X, X),
    "shapes [2, 3, 5] and [2, 3] do not broadcast": lambda: F.expand(X, (2, 3)),
    "shape [2, 3, 5] does not broadcast to [1, 3, 5]": lambda: F.expand(X, (1, 3, 5)),
    "broadcast of [2, 3, 5] to [2, 3, 7] along (0, 1, 2)": lambda: F.broadcast(X, (2, 3, 7), (0, 1, 2)),
    "contract '... k, k' with 2 operands": lambda: F.contract("... k, k", X, X),
    "contract: sizes 5 and 3 of one label differ": lambda: F.contract("a b k, k -> a b", X, F.input_(3, (3,), "real")),
    "has 3 dimensions, not 2": lambda: F.contract("a b -> a", X),
    "a label may appear once in each operand of contract": lambda: F.contract("a a -> a", F.input_(3, (3, 3), "real")),
    "contract: every result label must come from an operand, once": lambda: F.contract("a b c -> a d", X),
    "no reduction 'sum'": lambda: F.reduce("sum", X, [0]),
    "max over an empty dimension": lambda: F.reduce("max", F.input_(3, (2, 0), "real"), [1]),
    "cannot view [2, 3, 5] as [4, 7]": lambda: F.reshape(X, (4, 7)),
    "cannot view [2, 3, 5] as [-1, -1]": lambda: F.reshape(X, (-1, -1)),
    "cannot view [2, 3, 5] as [-1, 7]": lambda: F.reshape(X, (-1, 7)),
    "(0, 0, 1) is not a permutation of 3 dimensions": lambda: F.transpose(X, (0, 0, 1)),
    "dimension 3 of a tensor with 3 dimensions": lambda: F.take(X, 3, 0, 1),
    "slice 1:4:1 of a dimension of size 3": lambda: F.take(X, 1, 1, 4),
    "concat of nothing": lambda: F.concat([], 0),
    "concat of [2, 3, 5] and [2, 2, 5] along 0": lambda: F.concat([X, F.take(X, 1, 0, 2)], 0),
    "negative padding": lambda: F.pad(X, 0, -1, 0),
    "one_hot needs integers": lambda: F.one_hot(X, 7),
    "gather needs integer ids with as many dimensions as the tensor": lambda: F.gather(X, F.iota(3), 0),
    "differ outside dimension 1": lambda: F.gather(X, F.take(I, 0, 0, 1), 1),
    "argmax over an empty dimension": lambda: F.rowwise("argmax", F.input_(3, (2, 0), "real"), 1),
}


@pytest.mark.parametrize("message", REJECTED)
def test_rejected(message: str) -> None:
    with pytest.raises(ShapeError) as caught:
        REJECTED[message]()
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("node", "shape", "kind"),
    [
        (X + I, (2, 3, 5), "real"),
        (I / 2, (2, 3, 5), "real"),
        (I + B, (2, 3, 5), "int"),
        (X < 1, (2, 3, 5), "bool"),
        (F.contract("... k, o k -> ... o", X, F.input_(3, (7, 5), "real")), (2, 3, 7), "real"),
        (F.contract("a b c -> c", B), (5,), "int"),
        (F.total(X, [-1], keepdim=True), (2, 3, 1), "real"),
        (F.reduce("max", I, [0, 2]), (3,), "int"),
        (F.take(X, 2, 4, -1, -2), (2, 3, 3), "real"),
        (F.pad(I, 1, 2, 0, -100), (2, 5, 5), "int"),
        (F.one_hot(I, 7), (2, 3, 5, 7), "real"),
        (F.rowwise("argsort", X, 1), (2, 3, 5), "int"),
        (F.rowwise("argmin", X, 1), (2, 5), "int"),
        (F.rowwise("cumsum", B, 1), (2, 3, 5), "int"),
        (F.move(X, 0, 2), (3, 5, 2), "real"),
        (F.power(F.const(2), Fraction(1, 2)), (), "real"),
        (F.power(I, -1), (2, 3, 5), "real"),
        (F.power(I, 2), (2, 3, 5), "int"),
        (F.call("pi"), (), "real"),
    ],
    ids=str,
)
def test_shape_and_kind(node: Node, shape: tuple[int, ...], kind: str) -> None:
    assert (node.shape, node.kind) == (shape, kind)


@pytest.mark.parametrize(
    "node",
    [F.reshape(X, (2, 3, 5)), F.transpose(X, (0, 1, 2)), F.take(X, 1, 0, 3), F.pad(X, 0, 0, 0), F.concat([X], 1), F.power(X, 1)],
)
def test_what_does_nothing_makes_no_node(node: Node) -> None:
    assert node is X


def test_rebuild_shares_equal_nodes_and_tells_literals_apart() -> None:
    a, b = F.rebuild([X + 1, X + 1])
    assert a is b
    a, b = F.rebuild([F.const(1), F.const(Fraction(1))])
    assert a is not b


def test_a_size_is_never_a_literal() -> None:
    """A mean over 5 divides by 5 through a literal; positions come from iota."""
    literals = [n.attrs[0] for n in F.topological([F.total(X, [2]) * Fraction(1, 5)]) if n.prim == "const"]
    assert literals == [Fraction(1, 5)]
    assert F.iota(5, 2, 3).attrs == (2, 3)
