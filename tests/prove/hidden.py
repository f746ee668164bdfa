"""Plans that are wrong only where something is 0, negative or masked, so that no random point shows it."""

from __future__ import annotations

import math
from collections.abc import Callable

import trainverify as tv
from trainverify.build.program import ProgramBuilder
from trainverify.build.tape import Tensor
from trainverify.graph.program import Program

Body = Callable[[ProgramBuilder, bool], Tensor]


def made(body: Body, right: bool) -> Program:
    """Σ of what a body makes, right or wrong; it may have metrics of its own."""
    b = tv.program("hidden")
    b.loss(b.sum(body(b, right), name="loss"))
    return b.build()


def again(b: ProgramBuilder, w: Tensor, x: Tensor) -> Tensor:
    """w·x/x."""
    return b.div(b.mul(w, x, name="wx"), x, name="again")


def three(b: ProgramBuilder, *names: str) -> list[Tensor]:
    return [b.input(n, (3,)) for n in names]


def zeros(b: ProgramBuilder, n: int = 3) -> Tensor:
    return b.full(shape=(n,), value=0.0, name="zeros")


def divided_in_a_branch(b: ProgramBuilder, right: bool) -> Tensor:
    """The logical program divides by x where it is not 0."""
    x, w = three(b, "x", "w")
    b.output(b.sum(b.where(b.ne(x, value=0.0), b.div(w, x, name="wx0"), zeros(b), name="r"), name="rs"), "metric", "rs")
    return w if right else again(b, w, x)


def divided_and_masked(b: ProgramBuilder, right: bool) -> Tensor:
    """w/x where x is not 0: chosen, or times a mask, which is 0·∞ where x is 0."""
    x, w = three(b, "x", "w")
    c, q = b.ne(x, value=0.0, name="c"), b.div(w, x, name="q")
    return b.where(c, q, zeros(b), name="r") if right else b.mul(b.to(c, dtype="f32", name="m"), q, name="r")


def divided_in_vain(b: ProgramBuilder, right: bool) -> Tensor:
    """The logical program divides by x, and nobody uses the result."""
    x, w = three(b, "x", "w")
    b.div(w, x, name="unused")
    return w if right else again(b, w, x)


def divided_while_kept(b: ProgramBuilder, right: bool) -> Tensor:
    """Nobody uses x^(−3/2) + y·x^(−1/2); written as x^(−1/2)·(1/x + y) it would say that x is not 0."""
    x, y, w = three(b, "x", "y", "w")
    root = b.pow(x, exponent=-0.25, name="root")
    two = b.mul(root, root, name="two")
    three_ = b.mul(two, root, name="three")
    b.identity(b.add(b.mul(three_, three_, name="six"), b.mul(two, y, name="two.y"), name="s"), name="unused")
    return w if right else again(b, w, x)


def divided_elsewhere(b: ProgramBuilder, right: bool) -> Tensor:
    """Of the quotients only the first row is used; the plan needs that the second has no 0."""
    x, w = b.input("x", (2, 3)), b.input("w", (2, 3))
    r = b.select(b.div(w, x, name="r"), dim=0, index=0, name="first")
    return r if right else again(b, r, b.select(x, dim=0, index=1, name="second"))


def divided_for_a_sum_of_nothing(b: ProgramBuilder, right: bool) -> Tensor:
    """Quotients times a sum over no elements: that is 0, whatever they are."""
    x, w, z = three(b, "x", "w", "z")
    none = b.slice(z, dim=0, start=0, stop=0, name="none")
    b.output(b.sum(b.einsum(none, b.div(w, x, name="q"), spec="a,b->b", name="r"), name="rs"), "metric", "rs")
    return w if right else again(b, w, x)


def divided_by_a_choice(b: ProgramBuilder, right: bool) -> Tensor:
    """What is divided by is y or z: y alone may be 0 where z is taken."""
    x, y, z, v, w = three(b, "x", "y", "z", "v", "w")
    b.output(b.sum(b.div(v, b.where(b.gt(x, value=0.0), y, z, name="yz"), name="r"), name="rs"), "metric", "rs")
    return w if right else again(b, w, y)


def divided_by_a_choice_alone(b: ProgramBuilder, right: bool) -> Tensor:
    """w, or w·t/t, where t is y or z."""
    x, y, z, w = three(b, "x", "y", "z", "w")
    t = b.where(b.gt(x, value=0.0), y, z, name="t")
    return w if right else again(b, w, t)


def divided_and_looked_up(b: ProgramBuilder, right: bool) -> Tensor:
    """Of the quotients some are looked up: others may be without a value."""
    x, w = three(b, "x", "w")
    at = b.input("at", (3,), dtype="i64", ids=3)
    found = b.take_along_dim(b.div(w, x, name="q"), at, dim=0, name="found")
    return found if right else again(b, found, x)


def divided_by_a_floor(b: ProgramBuilder, right: bool) -> Tensor:
    """The logical program divides by no less than 1e-9, the plan by a sum of squares."""
    x, v, w = three(b, "x", "v", "w")
    s = b.sum(b.square(x, name="xx"), name="s")
    b.output(b.sum(b.div(v, b.clamp(s, min=1e-9, name="floor"), name="r"), name="rs"), "metric", "rs")
    return w if right else again(b, w, s)


def logarithm_of_a_square(b: ProgramBuilder, right: bool) -> Tensor:
    """log x² has a value where x is negative, log x has none; random x + 1e6 is positive."""
    x = b.add(b.input("x", (3,)), value=1e6, name="large")
    b.output(b.sum(b.log(b.mul(x, x, name="xx"), name="log"), name="logs"), "metric", "logs")
    return x if right else b.exp(b.log(x, name="log.x"), name="again")


def root_of_a_square(b: ProgramBuilder, right: bool) -> Tensor:
    """The same for √x·√x."""
    x = b.add(b.input("x", (3,)), value=1e6, name="large")
    b.output(b.sum(b.log(b.mul(x, x, name="xx"), name="log"), name="logs"), "metric", "logs")
    return x if right else b.mul(b.sqrt(x, name="root"), b.sqrt(x, name="root.too"), name="again")


def root_of_nothing(b: ProgramBuilder, right: bool) -> Tensor:
    """√0 is 0, log 0 is no number."""
    x = b.maximum(b.add(b.input("x", (3,)), value=100.0, name="more"), zeros(b), name="floor")
    b.output(b.sum(b.sqrt(x, name="root"), name="roots"), "metric", "roots")
    return x if right else b.exp(b.log(x, name="log"), name="again")


def root_in_a_divisor(b: ProgramBuilder, right: bool) -> Tensor:
    """√0 is 0, 1/√0 is no number."""
    x = b.maximum(b.add(b.input("x", (3,)), value=100.0, name="more"), zeros(b), name="floor")
    b.output(b.sum(b.sqrt(x, name="root"), name="roots"), "metric", "roots")
    return x if right else b.add(x, b.sub(b.rsqrt(x, name="over"), b.rsqrt(x, name="over.too"), name="nothing"), name="again")


def logarithm_in_a_branch(b: ProgramBuilder, right: bool) -> Tensor:
    """exp of a logarithm that may not be taken says nothing of its sign elsewhere."""
    x, y, w = three(b, "x", "y", "w")
    log = b.where(b.gt(y, value=0.0), b.log(x, name="log"), zeros(b), name="taken")
    b.output(b.sum(b.exp(b.mul(log, value=0.5, name="half"), name="e"), name="es"), "metric", "es")
    return w if right else b.add(w, b.sub(b.log(x, name="l"), b.log(x, name="l.too"), name="nothing"), name="again")


def name_of_a_quotient(b: ProgramBuilder, right: bool) -> Tensor:
    """Nobody uses x/d + y/d: x + y is not 0 where d is."""
    x, y = three(b, "x", "y")
    d = b.input("d", (3,), domain="nonnegative")
    if right:
        b.add(b.div(x, d, name="xd"), b.div(y, d, name="yd"), name="unused")
    s = b.add(x, y, name="s")
    return s if right else b.where(b.gt(d, value=0.0), s, zeros(b), name="chosen")


def sign_of_a_quotient(b: ProgramBuilder, right: bool) -> Tensor:
    """Whether y/x or z is positive, chosen by m, is not whether y or z·x is: x may be 0 where z is taken."""
    x, (y, z, m, w) = b.input("x", (3,), domain="nonnegative"), three(b, "y", "z", "m", "w")
    c = b.gt(m, value=1e6, name="c")
    t = b.where(c, b.div(y, x, name="yx"), z, name="t") if right else b.where(c, y, b.mul(z, x, name="zx"), name="t")
    return b.mul(w, b.to(b.gt(t, value=0.0), dtype="f32"), name="r")


def divided_by_a_quotient(b: ProgramBuilder, right: bool) -> Tensor:
    """v over y/x or z, or v·x over y or z·x, which is 0/0 where x is 0 and z is taken."""
    x, y, z, m, v = three(b, "x", "y", "z", "m", "v")
    c = b.gt(m, value=1e6, name="c")
    if right:
        return b.div(v, b.where(c, b.div(y, x, name="yx"), z, name="t"), name="r")
    return b.div(b.mul(v, x, name="vx"), b.where(c, y, b.mul(z, x, name="zx"), name="t"), name="r")


def root_of_zero_as_a_divisor(b: ProgramBuilder, right: bool) -> Tensor:
    """0, or 1/√0 where m is large, which it never is."""
    x, m, w = three(b, "x", "m", "w")
    hidden = zeros(b) if right else b.rsqrt(b.sub(x, x, name="zero"), name="none")
    return b.where(b.gt(m, value=1e6), hidden, w, name="r")


def no_integer(b: ProgramBuilder, right: bool) -> Tensor:
    """Whether the largest is the first, or at position 1/2."""
    x, y, m = b.input("x", (3, 4)), b.input("y", (3,)), b.input("m", (3,))
    at = b.argmax(x, dim=1, name="at")
    c = b.eq(at, value=0, name="c") if right else b.eq(b.to(at, dtype="f32"), value=0.5, name="c")
    return b.where(b.gt(m, value=1e6), b.where(c, y, zeros(b), name="first"), m, name="r")


def masked(b: ProgramBuilder) -> Tensor:
    """Rows of which everything may be masked."""
    return b.masked_fill(b.input("s", (2, 3)), b.input("m", (2, 3), dtype="bool"), value=-math.inf, name="masked")


def sum_of_masked(b: ProgramBuilder) -> tuple[Tensor, Tensor]:
    """The sum of two rows, each −∞ where masked, and its exponential, which may be 0."""
    rows = masked(b)
    total = b.add(b.select(rows, dim=0, index=0), b.select(rows, dim=0, index=1), name="total")
    e = b.exp(total, name="e")
    b.output(b.sum(e, name="es"), "metric", "es")
    return total, e


def infinity_from_a_sum_of_rows(b: ProgramBuilder, right: bool) -> Tensor:
    w, (total, _) = b.input("w", (3,)), sum_of_masked(b)
    return w if right else b.add(w, b.sub(total, total, name="nothing"), name="again")


def exponential_of_a_sum_of_rows(b: ProgramBuilder, right: bool) -> Tensor:
    w, (_, e) = b.input("w", (3,)), sum_of_masked(b)
    return w if right else again(b, w, e)


def deep(b: ProgramBuilder, t: Tensor, y: Tensor) -> Tensor:
    """Enough to be worked out once for all layers."""
    for _ in range(5):
        t = b.sin(b.mul(t, y))
    return t


def squared(b: ProgramBuilder, right: bool, x: Tensor, y: Tensor, d: Tensor) -> Tensor:
    """(x + y)², or that where d is not 0."""
    s = b.square(b.add(x, y, name="s"), name="ss")
    return s if right else b.where(b.gt(d, value=0.0), s, zeros(b), name="chosen")


def rows(right: bool) -> Program:
    """Layers that divide rows of x and y by their own row of d; what is squared is the last row, which no layer has."""
    b = tv.program("rows")
    total, x, y = b.input("w", (3,)), b.input("x", (5, 3)), b.input("y", (5, 3))
    d = b.input("d", (5, 3), domain="nonnegative")
    own = [[b.select(t, dim=0, index=n) for t in (x, y, d)] for n in range(5)]
    made = [deep(b, b.add(b.div(x, d), b.div(y, d)), y) for x, y, d in own[:4]]
    for t in made:
        total = b.add(total, t)
    b.loss(b.sum(b.add(total, squared(b, right, *own[4])), name="loss"))
    return b.build()


def row_of_a_table(b: ProgramBuilder, right: bool) -> Tensor:
    """Rows of a table that are looked up are finite; the others need not be."""
    row, mask = b.input("s", (4, 3, 40)), b.input("k", (4, 3, 40), dtype="bool")
    top = b.amax(b.masked_fill(row, mask, value=float("-inf"), name="a"), dim=2, name="top")
    w = b.input("w", (4, 3))
    b.output(b.sum(b.embedding(b.input("ids", (2,), dtype="i64", ids=4), top, name="e"), name="es"), "metric", "es")
    return w if right else b.add(w, b.sub(top, top, name="nothing"), name="again")


HIDDEN: list[Body] = [
    row_of_a_table,
    divided_in_a_branch,
    divided_and_masked,
    divided_in_vain,
    divided_while_kept,
    divided_elsewhere,
    divided_for_a_sum_of_nothing,
    divided_by_a_choice,
    divided_by_a_choice_alone,
    divided_and_looked_up,
    divided_by_a_floor,
    logarithm_of_a_square,
    root_of_a_square,
    root_of_nothing,
    root_in_a_divisor,
    logarithm_in_a_branch,
    name_of_a_quotient,
    sign_of_a_quotient,
    divided_by_a_quotient,
    root_of_zero_as_a_divisor,
    no_integer,
    infinity_from_a_sum_of_rows,
    exponential_of_a_sum_of_rows,
]
