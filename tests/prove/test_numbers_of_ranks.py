"""Literals that are another number on every rank: positions as real numbers, and where a block of a dropout begins."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import trainverify as tv
from trainverify.graph.plan import Plan
from trainverify.graph.program import Program


def turned(ranks: int, chunk: int, begins: Callable[[int], float]) -> tuple[Program, Plan]:
    """Rows times the cosine of their positions; ranks add where they begin to a range of their own."""
    b = tv.program("turned")
    x = b.input("x", (ranks * chunk, 2))
    at = b.to(b.arange(stop=ranks * chunk), dtype="f32")
    b.loss(b.sum(b.mul(x, b.unsqueeze(b.cos(b.mul(at, value=0.3)), dim=1)), name="loss"))
    p = tv.plan("turned", tv.Mesh((("cp", ranks),)))
    with p.ranks() as r:
        x = r.input("x", (chunk, 2), "(cp s) k")
        at = r.add(r.to(r.arange(stop=chunk), dtype="f32"), value=r.each_rank(begins))
        r.loss(r.all_reduce(r.sum(r.mul(x, r.unsqueeze(r.cos(r.mul(at, value=0.3)), dim=1))), group="cp", name="loss"))
    return b.build(), p.build()


def dropped(ranks: int, chunk: int, begins: Callable[[int], int]) -> tuple[Program, Plan]:
    b = tv.program("dropped")
    b.loss(b.mean(b.dropout(b.input("x", (ranks * chunk, 2)), p=0.25, key=77), name="loss"))
    p = tv.plan("dropped", tv.Mesh((("dp", ranks),)))
    with p.ranks() as r:
        x = r.input("x", (chunk, 2), "(dp b) k")
        kept = r.dropout(x, p=0.25, key=77, origin=r.each_rank(lambda i: (begins(i), 0)), logical_shape=(ranks * chunk, 2))
        r.loss(r.div(r.all_reduce(r.sum(kept), group="dp"), value=ranks * chunk * 2, name="loss"))
    return b.build(), p.build()


@pytest.mark.parametrize(("ranks", "chunk"), [(3, 4001), (8, 4000), (65, 3), (72, 1000)])
@pytest.mark.parametrize("kind", [int, float])
def test_positions_that_begin_elsewhere_are_proved(ranks: int, chunk: int, kind: type) -> None:
    assert tv.verify(*turned(ranks, chunk, lambda i: kind(i * chunk))).verdict == "PROVED"


@pytest.mark.parametrize(("ranks", "chunk"), [(3, 4001), (65, 3)])
@pytest.mark.parametrize("wrong", ["one more", "half", "one rank"])
def test_positions_that_begin_wrongly_are_refuted(ranks: int, chunk: int, wrong: str) -> None:
    begins: dict[str, Callable[[int], float]] = {
        "one more": lambda i: i * chunk + 1.0,
        "half": lambda i: i * chunk * 0.5,
        "one rank": lambda i: float(i * chunk + (i == ranks - 2)),
    }
    assert tv.verify(*turned(ranks, chunk, begins[wrong])).verdict == "REFUTED"


@pytest.mark.parametrize(("ranks", "chunk"), [(8, 4000), (72, 2), pytest.param(128, 234, marks=pytest.mark.long)])
def test_blocks_of_a_dropout(ranks: int, chunk: int) -> None:
    assert tv.verify(*dropped(ranks, chunk, lambda i: i * chunk)).verdict == "PROVED"
    assert tv.verify(*dropped(ranks, chunk, lambda i: (i + 1) % ranks * chunk)).verdict == "REFUTED"
    assert tv.verify(*dropped(ranks, chunk, lambda i: i // 2 * chunk)).verdict == "REFUTED"


@pytest.mark.parametrize("shares", [(1.0, 0.0), (0.5, 0.5), (1.0, 1.0), (0.75, 0.5), (1.0, 0.5, 0.0)])
def test_shares_of_a_bias(shares: tuple[float, ...]) -> None:
    """Also shares that happen to lie on a line: right if they sum up to one."""
    n = len(shares)
    b = tv.program("bias")
    x, bias = b.input("x", (5, 7 * n)), b.input("b", (3,))
    w = b.input("w", (7 * n, 3))
    b.loss(b.sum(b.square(b.add(b.matmul(x, w), bias)), name="loss"))
    p = tv.plan("bias", tv.Mesh((("tp", n),)))
    with p.ranks() as r:
        x, w, bias = r.input("x", (5, 7), "b (tp k)"), r.input("w", (7, 3), "(tp k) o"), r.input("b", (3,), "o")
        own = r.mul(bias, value=r.each_rank(lambda i: shares[i]))
        r.loss(r.sum(r.square(r.all_reduce(r.add(r.matmul(x, w), own), group="tp")), name="loss"))
    assert tv.verify(b.build(), p.build()).verdict == ("PROVED" if sum(shares) == 1 else "REFUTED")
