"""Outputs that agree say something of a tensor only if they feel it."""

from __future__ import annotations

import trainverify as tv
from trainverify.domains.numeric import NUMERIC
from trainverify.evaluate.run import random_inputs, run_logical
from trainverify.evaluate.small import shrink_system
from trainverify.explain.felt import after, felt
from trainverify.graph.obligations import obligations
from trainverify.graph.plan import Plan, units
from trainverify.graph.program import Program
from trainverify.ops import OPS
from trainverify.verdicts import related, verify


def logical() -> Program:
    """y = x w; its softmax over a dimension of one element is 1, whatever y is; z has nothing to do with it. The loss takes y and x² w."""
    b = tv.program("felt")
    x, w, v = b.input("x", (6, 4)), b.input("w", (1, 4)), b.input("v", (3,))
    y = b.linear(x, w, name="y")
    more = b.linear(b.mul(x, x, name="xx"), w, name="more")
    b.loss(b.sum(b.mul(b.tanh(y, name="t"), b.sin(more, name="s"), name="ts"), name="total"))
    b.metric("dull", b.softmax(y, dim=1, name="dull"))
    b.metric("z", b.tanh(v, name="z"))
    return b.build()


def plan(summed: bool) -> Plan:
    p = tv.plan("felt", tv.Mesh(tp=2))
    with p.ranks() as r:
        x, w, v = r.input("x", (6, 2), "a (tp k)"), r.input("w", (1, 2), "o (tp k)"), r.input("v", (3,), "k")
        share = r.linear(x, w, name="share")
        second = r.linear(r.mul(x, x, name="xx"), w, name="more.share")
        y, more = (r.all_reduce(s, group="tp", name=n) if summed else s for s, n in ((share, "y"), (second, "more")))
        r.loss(r.sum(r.mul(r.tanh(y, name="t"), r.sin(more, name="s"), name="ts"), name="total"))
        r.metric("dull", r.softmax(y, dim=1, name="dull"))
        r.metric("z", r.tanh(v, name="z"))
    return p.build()


def test_only_what_changes_counts() -> None:
    made = plan(True)
    wanted, _ = obligations(logical(), made, units(made))
    small = shrink_system(related(logical(), made, OPS, units(made), wanted))
    values = run_logical(small, random_inputs(small, 1), NUMERIC)
    assert after(small, "y") == {"y", "t", "ts", "total", "dull"}
    assert felt(small, values, "y", {"total", "dull", "z"}) == {"total"}


def test_a_dull_output_excuses_nothing() -> None:
    """Expected: PROVED; without its two sums REFUTED, and the first share is named although an output that is made of it agrees."""
    assert verify(logical(), plan(True)).verdict == "PROVED"
    report = verify(logical(), plan(False))
    assert report.verdict == "REFUTED"
    assert report.place is not None
    assert report.place.tensor == "share"
    assert report.place.cause.startswith("a partial sum")
