"""One wrong plan for each rule about branches; the right twin of each is PROVED."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pytest

import trainverify as tv
from trainverify.graph.plan import Plan
from trainverify.graph.program import Program
from trainverify.verdicts import verify

ROWS, WIDTH = 6, 5


def zero(b: Any) -> Any:
    return b.full(shape=(), value=0.0)


def inputs(b: Any, on: Callable[[str], tuple[int, str]] | None = None) -> tuple[Any, Any, Any]:
    """Numbers, what they are divided by, and a mask."""
    if on is None:
        return b.input("x", (ROWS, WIDTH)), b.input("n", (ROWS, WIDTH)), b.input("m", (ROWS, WIDTH), dtype="bool")
    made = []
    for name in "xnm":
        rows, layout = on(name)
        made.append(b.input(name, (rows, WIDTH), layout, **({"dtype": "bool"} if name == "m" else {})))
    return made[0], made[1], made[2]


def product_for_a_branch(b: Any, x: Any, n: Any, m: Any, wrong: bool) -> Any:
    """mask·(x/n) has no value where n is 0 and the mask is."""
    return b.mul(b.to(m, dtype="f32"), b.div(x, n)) if wrong else b.where(m, b.div(x, n), zero(b))


def other_order(b: Any, x: Any, n: Any, m: Any, wrong: bool) -> Any:
    q = b.div(x, n)
    return b.where(m, zero(b), q) if wrong else b.where(m, q, zero(b))


def fully_masked(b: Any, x: Any, n: Any, m: Any, wrong: bool) -> Any:
    """A row of which all are masked has no softmax; the right program leaves it out."""
    p = b.softmax(b.masked_fill(x, m, value=float("-inf")), dim=-1)
    open_ = b.gt(b.sum(b.to(b.logical_not(m), dtype="f32"), dim=-1, keepdim=True), value=0.0)
    return b.mul(p, b.to(b.expand(open_, shape=p.shape), dtype="f32")) if wrong else b.where(b.expand(open_, shape=p.shape), p, zero(b))


def compared(b: Any, x: Any, n: Any, m: Any, wrong: bool) -> Any:
    """x/n > 1 is false where n is 0, whatever x > n is."""
    c = b.gt(x, n) if wrong else b.gt(b.div(x, b.square(n)), b.div(n, b.square(n)))
    return b.where(c, x, b.mul(x, value=2.0))


def second_layer(b: Any, x: Any, n: Any, m: Any, wrong: bool) -> Any:
    """Both layers divide in a branch; the second of the wrong plan divides before."""
    for layer in range(2):
        q = b.where(m, b.div(x, n), x)
        if wrong and layer == 1:
            q = b.add(q, b.sub(b.div(x, n), b.div(x, n)))
        for _ in range(4):
            q = b.sin(b.mul(q, q))
        x = b.add(q, x)
    return x


BODIES: Final = [product_for_a_branch, other_order, fully_masked, compared, second_layer]


def logical(body: Callable[..., Any]) -> Program:
    b = tv.program("branches")
    b.loss(b.sum(body(b, *inputs(b), False), name="loss"))
    return b.build()


def on_two(body: Callable[..., Any], wrong: Callable[[int], bool]) -> Plan:
    """Each rank has half of the rows."""
    p = tv.plan("branches", tv.Mesh(dp=2))
    for rank in range(2):
        with p.ranks(dp=rank) as r:
            made = body(r, *inputs(r, lambda _: (ROWS // 2, "(dp r) w")), wrong(rank))
            r.loss(r.all_reduce(r.sum(made), group="dp", name="loss"))
    return p.build()


@pytest.mark.parametrize("engine", ["algebra", "auto"])
@pytest.mark.parametrize("body", BODIES)
def test_wrong_twins(body: Callable[..., Any], engine: Any) -> None:
    """Expected: PROVED on two ranks; not if both are wrong, nor if only the second is."""
    assert verify(logical(body), on_two(body, lambda _: False), points=1, engine=engine).verdict == "PROVED"
    assert not verify(logical(body), on_two(body, lambda _: True), points=1, engine=engine).verdict.startswith("PROVED")
    assert not verify(logical(body), on_two(body, lambda rank: rank == 1), points=1, engine=engine).verdict.startswith("PROVED")


@pytest.mark.parametrize("body", BODIES)
def test_stages_show_no_wrong_twin(body: Callable[..., Any]) -> None:
    """Expected: not PROVED by the second engine."""
    assert not verify(logical(body), on_two(body, lambda rank: rank == 1), points=1, engine="smt").verdict.startswith("PROVED")
