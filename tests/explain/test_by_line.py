"""Mistakes by the user's line, where it is known with the lines that led there, as of captured code."""

from __future__ import annotations

from dataclasses import replace

import trainverify as tv
from trainverify.explain.cause import Cause
from trainverify.graph.plan import Plan
from trainverify.graph.program import Program, Source


def halves(quarter: bool) -> tuple[Program, Plan]:
    """Half of a sum over dp; ranks also divide by a number of micro-batches, which is 1."""
    b = tv.program("halves")
    b.loss(b.mul(b.sum(b.square(b.input("x", (6, 5)), name="sq"), name="whole"), value=0.5, name="loss"))
    p = tv.plan("halves", tv.Mesh(dp=2))
    with p.ranks() as r:
        own = r.sum(r.square(r.input("x", (3, 5), "(dp b) k"), name="sq"), name="own")
        scaled = r.mul(r.div(own, value=1, name="by_one"), value=0.25 if quarter else 0.5, name="scaled")
        r.loss(r.all_reduce(scaled, group="dp", name="loss"))
    return b.build(), captured(p.build())


def captured(plan: Plan) -> Plan:
    """The same with a line of its own for every op, and the line that led there."""
    (template,) = plan.templates
    step = Source("train.py", 3)
    ops = [replace(op, source=Source("model.py", i, step)) for i, op in enumerate(template.program.ops, 1)]
    return replace(plan, templates=(replace(template, program=replace(template.program, ops=tuple(ops))),))


def test_a_product_with_one_is_not_blamed_for_a_factor() -> None:
    """PROVED with 1/2, REFUTED with 1/4 at its line."""
    assert tv.verify(*halves(quarter=False)).verdict == "PROVED"
    report = tv.verify(*halves(quarter=True))
    assert report.verdict == "REFUTED"
    assert report.place is not None
    assert report.place.op is not None
    assert (report.place.tensor, str(report.place.op.source)) == ("scaled", "model.py:4")
    assert report.place.category is Cause.WRONG_FACTOR


def lookups(own: bool) -> tuple[Program, Plan]:
    """Rows of a table that tp cuts; ranks look up their own rows, or the next rank's."""
    b = tv.program("lookups")
    ids, t = b.input("ids", (5,), dtype="i64", ids=6), b.input("t", (5, 3))
    b.loss(b.sum(b.mul(b.embedding(ids, b.input("table", (6, 3)), name="rows"), t, name="y"), name="loss"))
    p = tv.plan("lookups", tv.Mesh(tp=2))
    with p.ranks() as r:
        ids, t = r.input("ids", (5,), "b", dtype="i64", ids=6), r.input("t", (5, 3), "b k")
        start = r.each(lambda at: 3 * (at["tp"] if own else 1 - at["tp"]))
        part = r.embedding(ids, r.input("table", (3, 3), "(tp v) k"), start=start, name="part")
        rows = r.all_reduce(part, group="tp", name="rows")
        r.loss(r.sum(r.mul(rows, t, name="y"), name="loss"))
    return b.build(), captured(p.build())


def test_rows_of_another_rank() -> None:
    """PROVED with a rank's own rows, REFUTED at the line that looks rows up with those of the next one."""
    assert tv.verify(*lookups(own=True)).verdict == "PROVED"
    place = tv.verify(*lookups(own=False)).place
    assert place is not None
    assert place.op is not None
    assert (place.tensor, place.op.name, place.category) == ("part", "embedding", Cause.WRONG_BLOCK)


def parts(reverse: bool) -> tuple[Program, Plan]:
    """Two parts of a batch, one after the other, with the labels of each or of the other one, which are taken twice."""
    b = tv.program("parts")
    x, t = b.input("x", (4, 3)), b.input("t", (4, 3))
    e = b.exp(x, name="e")
    b.loss(b.sum(b.mul(b.add(e, b.square(e, name="sq"), name="both"), t, name="y"), name="loss"))
    p = tv.plan("parts", tv.Mesh(dp=1))
    with p.ranks() as r:
        x, t = r.input("x", (4, 3), "b k"), r.input("t", (4, 3), "b k")
        losses = []
        for i in range(2):
            at = 2 * (1 - i if reverse else i)
            e = r.exp(r.slice(x, dim=0, start=2 * i, stop=2 * i + 2, name=f"x{i}"), name=f"e{i}")
            for n, part in (("a", e), ("b", r.square(e, name=f"sq{i}"))):
                labels = r.slice(t, dim=0, start=at, stop=at + 2, name=f"labels{i}{n}")
                losses.append(r.sum(r.mul(part, labels, name=f"y{i}{n}"), name=f"loss{i}{n}"))
        r.loss(r.add(r.add(*losses[:2], name="first"), r.add(*losses[2:], name="second"), name="loss"))
    plan = captured(p.build())
    (template,) = plan.templates
    line = Source("model.py", 9, Source("train.py", 3))
    ops = [replace(op, source=line) if op.outputs[0].startswith("labels") else op for op in template.program.ops]
    return b.build(), replace(plan, templates=(replace(template, program=replace(template.program, ops=tuple(ops))),))


def test_labels_of_another_part() -> None:
    """PROVED in order, REFUTED at the line that takes labels with the parts exchanged."""
    assert tv.verify(*parts(reverse=False)).verdict == "PROVED"
    place = tv.verify(*parts(reverse=True)).place
    assert place is not None
    assert place.op is not None
    assert (place.tensor, str(place.op.source)) == ("labels0a", "model.py:9")
    assert place.category is Cause.WRONG_ORDER
