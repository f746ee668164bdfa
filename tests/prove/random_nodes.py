"""Random nodes of a few rows, and numbers of which 0 has no sign."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from fractions import Fraction

import numpy as np

from trainverify.domains.arrays import Array
from trainverify.domains.numeric import Numeric
from trainverify.primitives import node as F
from trainverify.primitives.node import Node
from trainverify.primitives.plain import plain
from trainverify.primitives.windows import OVERLAP, WINDOW, Windows, overlap, window
from trainverify.prove.definedness import Sign

SHAPE = (2, 3)
VALUES = (-2.0, -1.0, -0.5, 0.0, 0.0, 0.5, 1.0, 2.0)
POWERS = (Fraction(-1, 2), Fraction(1, 2), -1, -2, 0, 1, 2, 3)
UNARY = ("neg", "exp", "log", "tanh", "abs", "sign", "floor", "sin", "erf")
BINARY = ("add", "sub", "mul", "div", "max", "min")
Make = Callable[[random.Random, Callable[[], Node]], Node]


def position(rng: random.Random, x: Callable[[], Node]) -> Node:
    """Integers that are no longer than a row."""
    return F.rowwise("argsort", x(), 1, rng.random() < 0.5)


def mask(rng: random.Random, x: Callable[[], Node]) -> Node:
    return F.call(rng.choice(["lt", "le", "eq"]), x(), x())


def halves(rng: random.Random, x: Callable[[], Node]) -> Node:
    """Some columns of one tensor beside some of another one."""
    at = rng.choice([1, 2])
    return F.concat([F.take(x(), 1, 0, at), F.take(x(), 1, at, 3)], 1)


def every_other(rng: random.Random, x: Callable[[], Node]) -> Node:
    """Of two tensors side by side every other column."""
    start = rng.choice([0, 1])
    return F.take(F.concat([x(), x()], 1), 1, start, start + 5, 2)


WINDOWS = (  # three of each, in rows of three
    {"kernel": 2, "low": 1},
    {"kernel": 3, "low": 1, "high": 1},
    {"kernel": 2, "dilation": 2, "low": 1, "high": 1},
    {"kernel": 2, "stride": 2, "low": 2, "high": 2},
    {"kernel": 1, "stride": 2, "low": 1, "high": 1},
    {"kernel": 1, "stride": 3, "low": 3, "high": 3},
)


def pooled(rng: random.Random, x: Callable[[], Node]) -> Node:
    """The largest element, or the sum, of windows, or windows added up again where they came from."""
    how, end = rng.choice(WINDOWS), rng.choice(["max", "sum", "back"])
    there = Windows(3, filler=float("-inf") if end == "max" else 0, **how)
    made = window(x(), 1, there)
    if end == "back":
        return overlap(F.call(rng.choice(UNARY), made), 1, there)
    return F.reduce("max", made, [2]) if end == "max" else F.total(made, [2])


MAKES: Sequence[Make] = (
    *[lambda rng, x: F.call(rng.choice(UNARY), x())] * 3,
    *[lambda rng, x: F.call(rng.choice(BINARY), x(), x())] * 4,
    lambda rng, x: F.power(x(), rng.choice(POWERS)),
    lambda rng, x: F.as_node(x()) * rng.choice([0, 1, -1]),
    lambda rng, x: x() + F.call("log", F.cast(mask(rng, x), "real")),
    lambda rng, x: F.select(mask(rng, x), x(), x()),
    lambda rng, x: F.cast(mask(rng, x), "real"),
    halves,
    every_other,
    pooled,
    lambda rng, x: F.gather(x(), position(rng, x), 1),
    lambda rng, x: F.expand(F.total(x(), [1], keepdim=True), SHAPE),
    lambda rng, x: F.expand(F.reduce(rng.choice(["max", "prod"]), x(), [1], keepdim=True), SHAPE),
    lambda rng, x: F.contract("a b, c b, c d -> a d", x(), x(), x()),
    lambda rng, x: F.rowwise("cumsum", x(), 1),
    lambda rng, x: F.take(F.pad(x(), 1, 1, 0, rng.choice([0, 1])), 1, 0, 3),
    lambda rng, x: F.reshape(F.transpose(x(), (1, 0)), SHAPE),
)


class OneZero(Numeric):
    """Numbers of which 0 has no sign: real numbers have one zero."""

    def _node(self, node: Node, args: list[Array], inputs: Sequence[Array], lead: tuple[int, ...]) -> Array:
        if node.prim in (WINDOW, OVERLAP):
            alone = Node(node.prim, (F.input_(0, node.args[0].shape, "real"),), node.attrs, node.shape, node.kind)
            return self.run(plain([alone]), args)[0]
        made = super()._node(node, args, inputs, lead)
        return made + 0.0 if made.dtype.kind == "f" else made


def right_sign(x: Array, sign: Sign) -> bool:
    """Of what is a number, or infinite."""
    x = x[~np.isnan(x)]
    return bool((x > 0).all() if sign == "positive" else (x >= 0).all() if sign else True)
