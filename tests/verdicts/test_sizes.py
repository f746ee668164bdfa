"""Numbers that depend on sizes in ways that nobody can read off them: right plans are never refuted, wrong twins never proved."""

from __future__ import annotations

from typing import Any

import pytest

import trainverify as tv
from trainverify.evaluate.slices import Slices
from trainverify.graph.plan import Plan
from trainverify.graph.program import Program
from trainverify.graph.rebuilt import Rebuilt

Builder = Any
Pair = tuple[Program, Plan]


def pairs_seen(positions: int, count: int) -> Pair:
    """The mean score under a causal mask; the plan divides by a literal, S·(S + 1)/2 if it is right."""

    def summed(b: Builder, q: Any, k: Any, first: Any) -> tuple[Any, Any]:
        seen = b.to(b.create_mask(queries=q.shape[0], keys=k.shape[0], query_offset=first), dtype="f32")
        return b.sum(b.mul(b.matmul(q, b.transpose(k)), seen)), b.sum(seen)

    b = tv.program("pairs")
    total, n = summed(b, b.input("q", (positions, 3)), b.input("k", (positions, 3)), 0)
    b.loss(b.div(total, n, name="loss"))
    p = tv.plan("pairs", tv.Mesh(dp=2))
    with p.ranks() as r:
        q, k = r.input("q", (positions // 2, 3), "(dp s) h"), r.input("k", (positions, 3), "s h")
        own, _ = summed(r, q, k, r.each_rank(lambda i: i * positions // 2))
        r.loss(r.div(r.all_reduce(own, group="dp"), value=count, name="loss"))
    return b.build(), p.build()


@pytest.mark.parametrize("positions", [14, 1000, 9000])
def test_pairs_under_a_causal_mask(positions: int) -> None:
    """Expected: never REFUTED; REFUTED with S·(S − 1)/2 where it is evaluated at full size, else UNKNOWN."""
    assert tv.verify(*pairs_seen(positions, positions * (positions + 1) // 2), points=1).verdict in ("UNKNOWN", "PROVED")
    wrong = tv.verify(*pairs_seen(positions, positions * (positions - 1) // 2), points=1)
    assert wrong.verdict == ("REFUTED" if positions <= 1000 else "UNKNOWN"), wrong.reason


def standardised(positions: int, middle: float, width: int = 3) -> Pair:
    """Positions less their mean, over their variance; the plan has both as literals, (S − 1)/2 and (S² − 1)/12 if it is right."""
    b = tv.program("standardised")
    at = b.to(b.arange(stop=positions), dtype="f32")
    centred = b.sub(at, b.mean(at, dim=0))
    z = b.div(centred, b.mean(b.square(centred)))
    b.loss(b.sum(b.mul(b.input("x", (positions, width)), b.unsqueeze(z, dim=1)), name="loss"))
    p = tv.plan("standardised", tv.Mesh(cp=2))
    with p.ranks() as r:
        x = r.input("x", (positions // 2, width), "(cp s) k")
        at = r.add(r.to(r.arange(stop=positions // 2), dtype="f32"), value=r.each_rank(lambda i: float(i * positions // 2)))
        z = r.div(r.sub(at, value=middle), value=(positions**2 - 1) / 12)
        r.loss(r.all_reduce(r.sum(r.mul(x, r.unsqueeze(z, dim=1))), group="cp", name="loss"))
    return b.build(), p.build()


@pytest.mark.parametrize("positions", [14, 1 << 19, 1 << 25])
def test_standardised_positions(positions: int) -> None:
    """Expected: never REFUTED; REFUTED with S/2 where it is evaluated at full size, else UNKNOWN."""
    assert tv.verify(*standardised(positions, (positions - 1) / 2), points=1).verdict in ("UNKNOWN", "PROVED")
    wrong = tv.verify(*standardised(positions, positions / 2), points=1)
    assert wrong.verdict == ("REFUTED" if positions < 1 << 25 else "UNKNOWN"), wrong.reason


def spread(rows: int, width: int, less: int) -> tuple[Program, Program]:
    """A variance with correction 3, and the same by hand with a count that is a sum of ones. Running sums have no value on classes."""
    b = tv.program("variance")
    x = b.cumsum(b.input("x", (rows, width)), dim=1)
    b.loss(b.sum(b.mul(b.var(x, dim=0, correction=3), b.input("v", (width,))), name="loss"))
    q = tv.program("variance")
    x = q.cumsum(q.input("x", (rows, width)), dim=1)
    squares = q.sum(q.square(q.sub(x, q.mean(x, dim=0))), dim=0)
    n = q.sub(q.sum(q.full(shape=(rows,), value=1.0)), value=less)
    q.loss(q.sum(q.mul(q.div(squares, n), q.input("v", (width,))), name="loss"))
    return b.build(), q.build()


@pytest.mark.parametrize(("rows", "width"), [(17, 5), (65536, 17), (1 << 20, 400)])
def test_a_variance_over_three_less(rows: int, width: int) -> None:
    """Expected: PROVED by the algebra, with no internal error, and not REFUTED by stages; never PROVED with another correction."""
    right, wrong = spread(rows, width, 3), spread(rows, width, 2)
    assert tv.verify(*right, points=1).verdict == "PROVED"
    assert tv.verify(*right, points=1, engine="smt").verdict != "REFUTED"
    found = tv.verify(*wrong, points=1).verdict
    assert found == ("REFUTED" if rows < 1 << 20 else "UNKNOWN")


def axes_of_one_size(other: int) -> tuple[Program, Program]:
    """Σ (x + y) over two axes of 512 each, and each summand over an axis of its own. More than four million elements."""
    b = tv.program("sums")
    total = b.sum(b.add(b.input("x", (512, 1)), b.input("y", (1, 512))))
    b.loss(b.mul(total, b.mean(b.sum(b.cumsum(b.input("more", (1 << 12, 1 << 10)), dim=1), dim=1)), name="loss"))
    q = tv.program("sums")
    x, y = q.input("x", (512, 1)), q.input("y", (1, 512))
    total = q.add(q.sum(q.expand(x, shape=(512, other))), q.sum(q.expand(y, shape=(512, 512))))
    q.loss(q.mul(total, q.mean(q.sum(q.cumsum(q.input("more", (1 << 12, 1 << 10)), dim=1), dim=1)), name="loss"))
    return b.build(), q.build()


def test_axes_of_one_size() -> None:
    """Expected: no REFUTED, and no internal error, though no literal is there that could count; REFUTED with an axis of another size."""
    assert tv.verify(*axes_of_one_size(512), points=1).verdict in ("PROVED", "UNKNOWN")
    assert tv.verify(*axes_of_one_size(511), points=1).verdict == "REFUTED"


def test_a_proof_that_nothing_confirms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Expected: UNKNOWN: the algebra proves it, but a literal does not shrink as operators' own counts do, and full size is too large."""
    monkeypatch.setattr(Slices, "of", lambda *_: None)
    b = tv.program("rows")
    x = b.cumsum(b.input("x", (65536, 100)), dim=1)
    b.loss(b.mul(b.sum(x), b.sum(b.full(shape=(65536,), value=1.0)), name="loss"))
    q = tv.program("rows")
    q.loss(q.mul(q.sum(q.cumsum(q.input("x", (65536, 100)), dim=1)), value=65536.0, name="loss"))
    report = tv.verify(b.build(), q.build(), points=1)
    assert report.verdict == "UNKNOWN"
    assert report.reason.startswith("loss is proved, but differs at reduced sizes, where 65536.0 in mul")


def test_other_sizes_of_a_right_plan() -> None:
    """Expected: UNKNOWN: both programs built at 14 positions agree, so nothing is refuted; REFUTED where the twin is wrong there."""

    def built(positions: int, off: int) -> Pair:
        return pairs_seen(positions, positions * (positions + 1) // 2 - off)

    large = built(9000, 0)
    assert tv.verify(*large, points=1, also=[Rebuilt("positions=14", lambda: built(14, 0))]).verdict == "UNKNOWN"
    report = tv.verify(*built(9000, 5), points=1, also=[Rebuilt("positions=14", lambda: built(14, 5))])
    assert report.verdict == "REFUTED"
    assert report.reason.startswith("at positions=14: loss differs on rank 0")
    assert report.notes[0].startswith("both programs were built at positions=14; at their own sizes there is no verdict")
