"""Positions and ids that are compared or rounded behind a literal fall otherwise at reduced sizes: a right plan is not refuted by that.

All plans have more than four million elements, but for those that are run as they are to see that they are right.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import trainverify as tv
from trainverify.graph.plan import Plan
from trainverify.graph.program import Program
from trainverify.report import Report

Builder = Any
Tensor = Any


# -- documents of one length, packed into rows that ranks share ----------------------------------------------------------


def attention(b: Builder, rows: int, length: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Every position sees its own document: those whose position has the same quotient by the length."""
    at = b.to(b.arange(stop=rows, name="at"), dtype="f32", name="at.real")
    document = b.floor(b.div(at, value=length, name="at.documents"), name="document")
    across, down = (b.expand(b.unsqueeze(document, dim=d), shape=(rows, rows)) for d in (0, 1))
    scores = b.matmul(q, b.permute(k, dims=(1, 0)), name="scores")
    a = b.softmax(b.apply_mask(scores, b.eq(down, across, name="same"), name="masked"), dim=1, name="a")
    return b.matmul(a, v, name="y")


def packed(rows: int, length: int, wrong: bool = False) -> tuple[Program, Plan]:
    """Ranks attend within their own half. That is right if documents end there. A second metric is wrong on demand."""
    b = tv.program("packed")
    q, k, v = (b.input(n, (rows, 16)) for n in "qkv")
    b.metric("norm", b.sum(b.square(q), name="norm"))
    b.loss(b.sum(b.square(attention(b, rows, length, q, k, v)), name="loss"))
    p = tv.plan("packed", tv.Mesh(cp=2))
    with p.ranks() as r:
        q, k, v = (r.input(n, (rows // 2, 16), "(cp s) d") for n in "qkv")
        own = r.sum(r.square(q), name="norm.own")
        r.metric("norm", own if wrong else r.all_reduce(own, group="cp", name="norm"))
        y = attention(r, rows // 2, length, q, k, v)
        r.loss(r.all_reduce(r.sum(r.square(y), name="loss.own"), group="cp", name="loss"))
    return b.build(), p.build()


def test_documents_that_end_where_ranks_do() -> None:
    """Expected: UNKNOWN. At reduced sizes all positions are in one document, and ranks would have to see each other's."""
    report = tv.verify(*packed(8192, 128), points=1)
    assert report.verdict == "UNKNOWN", report.reason
    assert "differs at reduced sizes" in report.reason


def test_the_same_at_a_size_that_is_run() -> None:
    """Expected: not REFUTED where documents end where ranks do, REFUTED where they do not."""
    assert tv.verify(*packed(16, 4), points=1).verdict != "REFUTED"
    report = tv.verify(*packed(16, 6), points=1)
    assert report.verdict == "REFUTED"
    assert "at full size" in report.notes[0]


def test_what_no_such_position_reaches_is_refuted() -> None:
    """Expected: REFUTED, for the metric: no position goes into it."""
    report = tv.verify(*packed(8192, 128, wrong=True), points=1)
    assert report.verdict == "REFUTED"
    assert report.reason.startswith("metric norm differs")


# -- a mask of the first positions, in several wordings ------------------------------------------------------------------

ROWS, LAST = 524288, 3000
Mask = Callable[[Builder, Tensor, Tensor], Tensor]  # of positions, as integers and as real numbers
MASKS: dict[str, Mask] = {
    "real": lambda b, at, x: b.to(b.lt(x, value=float(LAST)), dtype="f32"),
    "scaled": lambda b, at, x: b.to(b.lt(b.mul(x, value=1 / LAST), value=1.0), dtype="f32"),
    "moved": lambda b, at, x: b.to(b.lt(b.add(x, value=-float(LAST)), value=0.0), dtype="f32"),
    "doubled": lambda b, at, x: b.to(b.lt(b.mul(at, value=2), value=2 * LAST), dtype="f32"),
    "squared": lambda b, at, x: b.to(b.lt(b.mul(at, at), value=LAST * LAST), dtype="f32"),
    "between integers": lambda b, at, x: b.to(b.lt(at, value=LAST - 0.5), dtype="f32"),
    "sign": lambda b, at, x: b.sign(b.relu(b.sub(b.full(shape=x.shape, value=float(LAST)), x))),
    "clamped": lambda b, at, x: b.clamp(b.sub(b.full(shape=x.shape, value=float(LAST)), x), min=0.0, max=1.0),
}


def masked(mask: Mask, wrong: bool = False) -> tuple[Program, Plan]:
    """The sum of the squares of the first rows. Those of the second rank are none of them."""

    def squares(b: Builder, x: Tensor) -> Tensor:
        at = b.arange(stop=x.shape[0], name="at")
        m = mask(b, at, b.to(at, dtype="f32", name="at.real"))
        return b.sum(b.mul(b.expand(b.unsqueeze(m, dim=1), shape=x.shape), b.square(x)), name="part")

    b = tv.program("first")
    b.loss(squares(b, b.input("x", (ROWS, 16))))
    p = tv.plan("first", tv.Mesh(cp=2))
    for rank in (0, 1):
        with p.ranks(cp=rank) as r:
            x = r.input("x", (ROWS // 2, 16), "(cp s) d")
            part = squares(r, x) if rank == 0 or wrong else r.full(shape=(), value=0.0, name="part")
            r.loss(r.all_reduce(part, group="cp", name="loss"))
    return b.build(), p.build()


@pytest.mark.parametrize("how", MASKS)
def test_a_mask_of_the_first_positions(how: str) -> None:
    """Expected: UNKNOWN. At reduced sizes all positions are among the first."""
    at = np.arange(ROWS)
    assert not (at[ROWS // 2 :] < LAST).any()
    report = tv.verify(*masked(MASKS[how]), points=1)
    assert report.verdict == "UNKNOWN", report.reason


# -- positions that inputs are put to -------------------------------------------------------------------------------------

FAR = 987654321.0
INPUTS: dict[str, Callable[[Builder, Tensor, Tensor, Tensor], Tensor]] = {
    "chosen": lambda b, at, keep, x: b.lt(b.where(keep, at, b.full(shape=at.shape, value=FAR)), value=float(LAST)),
    "added": lambda b, at, keep, x: b.lt(b.add(at, b.to(keep, dtype="f32")), value=float(LAST)),
}


def with_inputs(put: Callable[[Builder, Tensor, Tensor, Tensor], Tensor], rows: int = ROWS) -> tuple[Program, Plan]:
    """The same, where a boolean input (or a real one) goes into what is compared."""

    def squares(b: Builder, x: Tensor, keep: Tensor) -> Tensor:
        at = b.to(b.arange(stop=x.shape[0], name="at"), dtype="f32", name="at.real")
        m = b.to(put(b, at, keep, b.sum(x, dim=1)), dtype="f32")
        return b.sum(b.mul(b.expand(b.unsqueeze(m, dim=1), shape=x.shape), b.square(x)), name="part")

    b = tv.program("first")
    b.loss(squares(b, b.input("x", (rows, 16)), b.input("keep", (rows,), "bool")))
    p = tv.plan("first", tv.Mesh(cp=2))
    for rank in (0, 1):
        with p.ranks(cp=rank) as r:
            x, keep = r.input("x", (rows // 2, 16), "(cp s) d"), r.input("keep", (rows // 2,), "(cp s)", dtype="bool")
            part = squares(r, x, keep) if rank == 0 else r.full(shape=(), value=0.0, name="part")
            r.loss(r.all_reduce(part, group="cp", name="loss"))
    return b.build(), p.build()


@pytest.mark.parametrize("how", INPUTS)
def test_booleans_that_positions_are_put_to(how: str) -> None:
    """Expected: UNKNOWN. Right: whatever the inputs are, no position of the second rank is among the first."""
    report = tv.verify(*with_inputs(INPUTS[how]), points=1)
    assert report.verdict == "UNKNOWN", report.reason


def test_real_numbers_that_positions_are_put_to() -> None:
    """Expected: REFUTED at a size that is run: with numbers small enough the second rank has some of the first positions. UNKNOWN where
    that takes larger numbers than are tried."""

    def put(last: int) -> Callable[[Builder, Tensor, Tensor, Tensor], Tensor]:
        return lambda b, at, keep, x: b.lt(b.add(at, x), value=float(last))

    assert tv.verify(*with_inputs(put(LAST)), points=1).verdict == "UNKNOWN"
    assert tv.verify(*with_inputs(put(6), rows=16), points=1).verdict == "REFUTED"


def counted(b: Builder, at: Tensor, x: Tensor) -> Tensor:
    """Positions as running sums of ones."""
    return b.to(b.le(b.cumsum(b.full(shape=x.shape, value=1.0), dim=0), value=float(LAST)), dtype="f32")


MASKS["counted"] = counted


def test_a_sum_of_ones() -> None:
    """Expected: PROVED, and no internal error, though half of the rows would be too few at reduced sizes."""
    b = tv.program("many")
    x = b.input("x", (ROWS, 16))
    many = b.ge(b.sum(b.full(shape=(ROWS,), value=1.0), name="rows"), value=float(LAST), name="many")
    b.loss(b.mul(b.sum(x, name="s"), b.to(many, dtype="f32"), name="loss"))
    plain = tv.program("many")
    plain.loss(plain.sum(plain.input("x", (ROWS, 16)), name="loss"))
    assert tv.verify(b.build(), plain.build(), points=1).verdict == "PROVED"


def direct(b: Builder, at: Tensor, x: Tensor) -> Tensor:
    return b.to(b.lt(at, value=LAST), dtype="f32")


def test_a_mask_of_integers_as_they_are() -> None:
    """Expected: REFUTED if the second rank counts from 0 too: the axis is cut at the literal, so that reduced sizes have both sides."""
    assert tv.verify(*masked(direct), points=1).verdict != "REFUTED"
    assert tv.verify(*masked(direct, wrong=True), points=1).verdict == "REFUTED"


# -- ids, of which there are fewer too ---------------------------------------------------------------------------------------

IDS, FIRST = 32000, 10
Kept = Callable[[Builder, Tensor], Tensor]
KEPT: dict[str, Kept] = {
    "real": lambda b, ids: b.ge(b.to(ids, dtype="f32"), value=float(FIRST)),
    "doubled": lambda b, ids: b.ge(b.mul(ids, value=2), value=2 * FIRST),
    "rounded": lambda b, ids: b.gt(b.floor(b.div(b.to(ids, dtype="f32"), value=FIRST)), value=0.0),
}


def embedded(kept: Kept, wrong: bool = False) -> tuple[Program, Plan]:
    """The first ten ids embed as 0. The rows of the second rank are none of theirs, so that it need not look."""

    def masked(b: Builder, ids: Tensor, e: Tensor) -> Tensor:
        return b.mul(e, b.expand(b.unsqueeze(b.to(kept(b, ids), dtype="f32"), dim=1), shape=e.shape))

    b = tv.program("embedded")
    ids, w, x = b.input("ids", (64,), dtype="i64", ids=IDS), b.input("w", (IDS, 128)), b.input("x", (64, 128))
    b.loss(b.sum(b.mul(masked(b, ids, b.embedding(ids, w)), x), name="loss"))
    p = tv.plan("embedded", tv.Mesh(tp=2))
    for rank in (0, 1):
        with p.ranks(tp=rank) as r:
            ids, x = r.input("ids", (64,), "t", dtype="i64", ids=IDS), r.input("x", (64, 128), "t d")
            e = r.embedding(ids, r.input("w", (IDS // 2, 128), "(tp v) d"), start=rank * IDS // 2)
            e = e if rank or wrong else masked(r, ids, e)
            r.loss(r.all_reduce(r.sum(r.mul(e, x), name="part"), group="tp", name="loss"))
    return b.build(), p.build()


@pytest.mark.parametrize("how", KEPT)
def test_the_first_ids(how: str) -> None:
    """Expected: UNKNOWN. At reduced sizes all ids are among the first ten."""
    assert FIRST < IDS // 2
    assert tv.verify(*embedded(KEPT[how]), points=1).verdict == "UNKNOWN"


def test_ids_as_they_are() -> None:
    """Expected: REFUTED if no rank looks; not REFUTED if the one looks that has to."""

    def kept(b: Builder, ids: Tensor) -> Tensor:
        return b.ge(ids, value=FIRST)

    assert tv.verify(*embedded(kept), points=1).verdict != "REFUTED"
    assert tv.verify(*embedded(kept, wrong=True), points=1).verdict == "REFUTED"


# -- models of the solver --------------------------------------------------------------------------------------------------


def hidden(value: Callable[[Builder, Tensor, Tensor], Tensor], rows: int = 4096, width: int = 2048) -> Program:
    """w, or what is made of x, where m² is 7: no random point has that, but the solver does."""
    b = tv.program("hidden")
    x, m, w = b.input("x", (rows, width)), b.input("m", (1,)), b.input("w", (1,))
    d = b.sub(b.square(m), value=7.0, name="d")
    made = b.reshape(value(b, x, b.sum(x, name="s")), shape=(1,))
    b.loss(b.sum(b.where(b.lt(b.mul(d, d), value=1e-12, name="c"), made, w), name="loss"))
    return b.build()


def by_ones(b: Builder, x: Tensor, s: Tensor) -> Tensor:
    """The count is a sum of ones."""
    return b.div(s, b.sum(b.full(shape=x.shape, value=1.0, name="ones"), name="n"))


RIGHT: dict[str, Callable[[Builder, Tensor, Tensor], Tensor]] = {
    "a literal": lambda b, x, s: b.div(s, value=4096 * 2048),
    "a mean": lambda b, x, s: b.mean(x),
}


@pytest.mark.parametrize("how", RIGHT)
def test_models_at_reduced_sizes_do_not_see_counts(how: str) -> None:
    """Expected: PROVED by the algebra; UNKNOWN by stages, whose model has other counts than the plan."""
    assert tv.verify(hidden(RIGHT[how]), hidden(by_ones), points=1).verdict == "PROVED"
    report = tv.verify(hidden(RIGHT[how]), hidden(by_ones), points=1, engine="smt")
    assert report.verdict == "UNKNOWN", report.reason


def test_models_at_sizes_that_the_solver_has() -> None:
    """Expected: REFUTED by the solver's model, twice the sum; UNKNOWN where the solver has fewer positions."""

    def verified(rows: int, width: int) -> Report:
        one, two = (hidden(value, rows, width) for value in (lambda b, x, s: s, lambda b, x, s: b.add(s, s)))
        return tv.verify(one, two, points=1, engine="smt")

    report = verified(2, 1)
    assert report.verdict == "REFUTED", report.reason
    assert "the solver's model" in report.notes[0]
    assert verified(4096, 2048).verdict == "UNKNOWN"
