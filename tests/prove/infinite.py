"""Programs of which parts may be infinite where the outputs are not, each with a plan that may have no value there, or another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import trainverify as tv
from trainverify.build.program import ProgramBuilder
from trainverify.build.tape import Tensor
from trainverify.graph.program import Program

Body = Callable[[ProgramBuilder, bool], Tensor]


def made(body: Body, right: bool) -> Program:
    """Σ of what a body makes, right or wrong; it may have metrics of its own."""
    b = tv.program("infinite")
    b.loss(b.sum(body(b, right), name="loss"))
    return b.build()


def three(b: ProgramBuilder, *names: str) -> list[Tensor]:
    return [b.input(n, (3,)) for n in names]


def weight(b: ProgramBuilder) -> Tensor:
    """Positive, or 0."""
    return b.input("m", (3,), domain="nonnegative")


def again(b: ProgramBuilder, w: Tensor, x: Tensor) -> Tensor:
    """w·x/x."""
    return b.div(b.mul(w, x, name="wx"), x, name="again")


def by_roots(b: ProgramBuilder, w: Tensor, x: Tensor) -> Tensor:
    """w·√x·√x."""
    root = b.sqrt(x, name="root")
    return b.mul(b.mul(w, root, name="wr"), root, name="wx")


def of_a_logarithm(b: ProgramBuilder, right: bool) -> Tensor:
    """exp(s + log m) is 0 where m is."""
    s, w = three(b, "s", "w")
    m = weight(b)
    r = b.exp(b.add(s, b.log(m, name="logm"), name="a"), name="e")
    return b.add(r, w if right else again(b, w, m), name="sum")


def weighted(b: ProgramBuilder, right: bool) -> Tensor:
    """exp(s + log m) is exp(s)·m, not exp(s)·m·m/m."""
    (s,) = three(b, "s")
    m = weight(b)
    if right:
        return b.exp(b.add(s, b.log(m, name="logm"), name="a"), name="e")
    return again(b, b.mul(b.exp(s, name="es"), m, name="e"), m)


def there_and_back(b: ProgramBuilder, right: bool) -> Tensor:
    """−∞ − (−∞) is no number."""
    m = weight(b)
    t = b.log(m, name="t")
    return b.exp(t if right else b.sub(b.add(t, t, name="tt"), t, name="ttt"), name="e")


def beside_a_finite_one(b: ProgramBuilder, right: bool) -> Tensor:
    """The same of two logarithms, of which one must be finite: that says nothing of the other."""
    n = b.input("n", (3,), domain="nonnegative")
    one, two = b.log(n, name="one"), b.log(weight(b), name="two")
    if not right:
        one, two = [b.sub(b.add(t, t, name=f"{k}.t2"), t, name=f"{k}.t3") for k, t in (("one", one), ("two", two))]
    return b.add(one, b.exp(two, name="e"), name="sum")


def in_a_tanh(b: ProgramBuilder, right: bool) -> Tensor:
    """tanh is 1 at ∞."""
    v, w, x = three(b, "v", "w", "x")
    r = b.tanh(b.div(v, x, name="q"), name="r")
    return b.add(r, w if right else again(b, w, x), name="sum")


def in_a_maximum(b: ProgramBuilder, right: bool) -> Tensor:
    """max(log m, v) is v where m is 0."""
    v, w = three(b, "v", "w")
    m = weight(b)
    r = b.maximum(b.log(m, name="logm"), v, name="r")
    return b.add(r, w if right else again(b, w, m), name="sum")


def in_a_row(b: ProgramBuilder, right: bool) -> Tensor:
    """The largest of a row is finite if one is."""
    (w,) = three(b, "w")
    m = weight(b)
    r = b.expand(b.amax(b.log(m, name="logm"), dim=0, keepdim=True, name="top"), shape=(3,), name="r")
    return b.add(r, w if right else again(b, w, m), name="sum")


def divided_by(b: ProgramBuilder, right: bool) -> Tensor:
    """v/log m is 0 where m is."""
    v, w = three(b, "v", "w")
    m = weight(b)
    r = b.div(v, b.log(m, name="logm"), name="r")
    return b.add(r, w if right else again(b, w, m), name="sum")


def of_a_power(b: ProgramBuilder, right: bool) -> Tensor:
    """(1/x²)⁻² is 0 where x is."""
    w, x = three(b, "w", "x")
    r = b.pow(b.pow(x, exponent=-2, name="p"), exponent=-2, name="r")
    return b.add(r, w if right else again(b, w, x), name="sum")


def inside_a_divisor(b: ProgramBuilder, right: bool) -> Tensor:
    """v/(y + tanh(1/x)) has a value where x is 0."""
    v, w, x, y = three(b, "v", "w", "x", "y")
    bounded = b.tanh(b.pow(x, exponent=-1, name="q"), name="t")
    r = b.div(v, b.add(y, bounded, name="d"), name="r")
    return b.add(r, w if right else again(b, w, x), name="sum")


def branch_of_a_divisor(b: ProgramBuilder, right: bool) -> Tensor:
    """v/(y or 1/x) has a value where x is 0, whichever it is."""
    v, w, x, y = three(b, "v", "w", "x", "y")
    d = b.where(b.gt(y, value=1e6, name="c"), b.pow(x, exponent=-1, name="q"), y, name="d")
    return b.add(b.div(v, d, name="r"), w if right else again(b, w, x), name="sum")


def looked_up(b: ProgramBuilder, right: bool) -> Tensor:
    """Rows of v/x that are looked up have values; the others need not."""
    v, w, x = (b.input(n, (5, 3)) for n in "vwx")
    rows = b.embedding(b.input("ids", (4,), dtype="i64", ids=5), b.div(v, x, name="q"), name="rows")
    return b.add(b.sum(rows, name="r"), b.sum(w if right else again(b, w, x), name="s"), name="sum")


def outside(b: ProgramBuilder, right: bool) -> Tensor:
    """What is looked up in a table of positive numbers is positive, but 0 outside of it."""
    v, p = b.input("v", (3,)), b.input("p", (5,), domain="positive")
    w = b.take_along_dim(p, b.input("ids", (3,), dtype="i64", ids=7), dim=0, name="there")
    return b.add(w, v if right else again(b, v, w), name="sum")


def largest(b: ProgramBuilder, right: bool, of: int) -> Tensor:
    """What is looked up among five positive numbers by the positions of the largest elements of a row."""
    v, p = b.input("v", (3,)), b.input("p", (5,), domain="positive")
    w = b.take_along_dim(p, b.topk(b.input("x", (of,)), k=3, dim=0, name=("top", "ids"))[1], dim=0, name="there")
    return b.add(w, v if right else again(b, v, w), name="sum")


def place_in_another_row(b: ProgramBuilder, right: bool) -> Tensor:
    """A position among seven elements need not be one among five."""
    return largest(b, right, 7)


def labelled(b: ProgramBuilder, right: bool) -> Tensor:
    """The score of a label has a value; those of other classes need not, where they are −∞."""
    s, w = b.input("s", (2, 3)), b.input("w", (2, 3))
    m = b.input("m", (2, 3), domain="nonnegative")
    loss = b.cross_entropy(b.add(s, b.log(m, name="logm"), name="a"), b.input("ids", (2,), dtype="i64", ids=3), name="r")
    return b.add(loss, b.sum(w if right else again(b, w, m), name="s1"), name="sum")


def compared(b: ProgramBuilder, right: bool) -> Tensor:
    """Whether v/x is positive can be said where x is 0."""
    v, w, x, y = three(b, "v", "w", "x", "y")
    r = b.where(b.gt(b.div(v, x, name="q"), value=0.0, name="c"), w, y, name="r")
    return b.add(r, w if right else again(b, w, x), name="sum")


def compared_otherwise(b: ProgramBuilder, right: bool) -> Tensor:
    """1/x ≤ 0 is not so where x is 0; x ≤ 0 is."""
    w, x, y = three(b, "w", "x", "y")
    return b.where(b.le(b.pow(x, exponent=-1, name="q") if right else x, value=0.0, name="c"), w, y, name="r")


def root_of_a_quotient(b: ProgramBuilder, right: bool) -> Tensor:
    """v/(1 + √(1/m)) is 0 where m is."""
    v, w = three(b, "v", "w")
    m = weight(b)
    root = b.sqrt(b.pow(m, exponent=-1, name="q"), name="root")
    r = b.div(v, b.add(root, value=1.0, name="d"), name="r")
    return b.add(r, w if right else again(b, w, m), name="sum")


def compared_root(b: ProgramBuilder, right: bool) -> Tensor:
    """√x > 1 is not so where x is negative, and that is all it says."""
    v, w, x = three(b, "v", "w", "x")
    r = b.where(b.gt(b.sqrt(x, name="root0"), value=1.0, name="c"), v, w, name="r")
    return b.add(r, b.mul(w, x, name="wx") if right else by_roots(b, w, x), name="sum")


def to_the_power_of_nothing(b: ProgramBuilder, right: bool) -> Tensor:
    """Anything to the power of 0 is 1, also what is no number."""
    w, x = three(b, "w", "x")
    r = b.pow(b.sqrt(x, name="root0"), exponent=0, name="r")
    return b.add(r, b.mul(w, x, name="wx") if right else by_roots(b, w, x), name="sum")


INFINITE: Final[list[Body]] = [
    of_a_logarithm,
    weighted,
    there_and_back,
    beside_a_finite_one,
    in_a_tanh,
    in_a_maximum,
    in_a_row,
    divided_by,
    of_a_power,
    inside_a_divisor,
    branch_of_a_divisor,
    looked_up,
    outside,
    place_in_another_row,
    labelled,
    compared,
    compared_otherwise,
    root_of_a_quotient,
    compared_root,
    to_the_power_of_nothing,
]


def demanded(b: ProgramBuilder, right: bool) -> Tensor:
    """Nothing makes a number of the sine of ∞."""
    v, w, x = three(b, "v", "w", "x")
    r = b.sin(b.div(v, x, name="q"), name="r")
    return b.add(r, w if right else again(b, w, x), name="sum")


def root_in_a_divisor(b: ProgramBuilder, right: bool) -> Tensor:
    """v/(√x + 1) has a value nowhere but where x is not negative."""
    v, w, x = three(b, "v", "w", "x")
    r = b.div(v, b.add(b.sqrt(x, name="root0"), value=1.0, name="d"), name="r")
    return b.add(r, b.mul(w, x, name="wx") if right else by_roots(b, w, x), name="sum")


FINITE: Final[list[Body]] = [demanded, root_in_a_divisor]  # the second is right, as the program has no value elsewhere


def place_in_the_row(b: ProgramBuilder, right: bool) -> Tensor:
    """A position among five elements is one."""
    return largest(b, right, 5)
