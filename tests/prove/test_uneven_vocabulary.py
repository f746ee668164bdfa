"""A vocabulary that ranks cut into unequal pieces: lookups, and the loss of labels, some of which are ignored."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

import trainverify as tv
from prove.meaning import check_plan
from trainverify.graph.lineage import Part, Parts, Run
from trainverify.graph.plan import Plan
from trainverify.graph.program import Program
from trainverify.verdicts import verify

ROWS, WIDTH, IGNORE = 6, 4, -100


def model(classes: int, width: int = WIDTH) -> Program:
    """Also a sum in which every label that counts is one, whatever class it is."""
    b = tv.program("odd")
    ids, labels = b.input("ids", (ROWS,), "i64", ids=classes), b.input("labels", (ROWS,), "i64", ids=classes, ignore=IGNORE)
    w = b.input("w", (classes, width))
    x = b.tanh(b.embedding(ids, w, name="rows"), name="x")
    b.loss(b.nll_loss(b.linear(x, w, name="scores"), labels, reduction="sum", name="loss"))
    counted = b.to(b.ne(labels, value=IGNORE), dtype="f32")
    b.metric("counted", b.sum(b.mul(counted, b.sum(x, dim=1)), name="counted"))
    hot = b.float(b.one_hot(labels, num_classes=classes), name="hot")
    b.metric("product", b.sum(b.mul(b.einsum(hot, x, spec="rv,rh->vh"), w), name="product"))
    rows = b.index_select(w, ids, dim=0, name="again")
    b.metric("picked", b.sum(b.take_along_dim(b.linear(rows, w), b.reshape(ids, shape=(ROWS, 1)), dim=1), name="picked"))
    return b.build()


def plan(pieces: Sequence[int], width: int = WIDTH, shift: int = 0, last: int = 0, missing: int = 0) -> Plan:
    """Rank t has the classes of piece t. Its ids may start elsewhere, the labels of the last rank too; a class may not be counted."""
    p = tv.plan("odd", tv.Mesh(tp=len(pieces)))
    classes = sum(pieces)
    for t, size in enumerate(pieces):
        with p.ranks(tp=t) as r:
            ids = r.input("ids", (ROWS,), "r", dtype="i64", ids=classes)
            labels = r.input("labels", (ROWS,), "r", dtype="i64", ids=classes, ignore=IGNORE)
            start = sum(pieces[:t])
            w = r.input("w", (size, width), Parts(((t, (Part((0, 0), (Run(start, size), Run(0, width))),)),)))
            rows = r.embedding(ids, w, start=start + shift * (t > 0), name="part")
            x = r.tanh(r.all_reduce(rows, group="tp", name="rows"), name="x")
            hot = r.float(r.one_hot(labels, num_classes=size, start=start - last * (t == len(pieces) - 1)), name="hot")
            found = r.all_reduce(r.einsum(r.linear(x, w, name="scores"), hot, spec="rv,rv->r"), group="tp", name="found")
            r.loss(r.neg(r.sum(found), name="loss"))
            counted = hot if not missing or t else r.slice(hot, dim=1, start=missing, stop=size)
            counts = r.all_reduce(r.sum(counted, dim=1, name="counts"), group="tp", name="count")
            r.metric("counted", r.sum(r.mul(counts, r.sum(x, dim=1)), name="counted"))
            products = r.sum(r.mul(r.einsum(hot, x, spec="rv,rh->vh"), w), name="products")
            r.metric("product", r.all_reduce(products, group="tp"))
            again = r.all_reduce(r.embedding(ids, w, start=start), group="tp")
            mine = r.float(r.one_hot(ids, num_classes=size, start=start))
            r.metric("picked", r.all_reduce(r.sum(r.mul(mine, r.linear(again, w))), group="tp", name="picked"))
    return p.build()


@pytest.mark.parametrize("pieces", [(16, 15), (7, 1), (3, 5, 2)])
def test_proved(pieces: tuple[int, ...]) -> None:
    """PROVED, by the algebra alone."""
    report = verify(model(sum(pieces)), plan(pieces), engine="algebra")
    assert report.verdict == "PROVED", report.notes


@pytest.mark.parametrize("pieces", [(16001, 16000), (64129, 64128)])
def test_proved_at_real_sizes(pieces: tuple[int, ...]) -> None:
    """PROVED: 32,001 and 128,257 classes, as wide as Llama's."""
    report = verify(model(sum(pieces), 4096), plan(pieces, 4096), engine="algebra")
    assert report.verdict == "PROVED", report.notes


@pytest.mark.parametrize("wrong", [{"shift": 1}, {"shift": -1}, {"last": 1}, {"missing": 1}])
def test_refuted(wrong: dict[str, int]) -> None:
    """REFUTED: ids or labels that are one class off, a class that is not counted; and the algebra does not prove them."""
    report = verify(model(8), plan((5, 3), **wrong), engine="algebra")
    assert report.verdict == "REFUTED"
    assert any(s.status == "different" for s in report.obligations)


def test_forms_mean_what_they_say() -> None:
    """Of both programs, at every piece."""
    for seed in range(3):
        found = check_plan(model(8), plan((5, 3)), seed)
        assert not found.wrong
        assert not found.without
