"""One-hots of integers whose range nobody knows keep their size: a buffer must not shrink faster than what goes into it."""

from __future__ import annotations

import trainverify as tv
from trainverify.graph.plan import Plan
from trainverify.graph.program import Program
from trainverify.verdicts import verify


def counted(tokens: int, capacity: int) -> Program:
    b = tv.program("count")
    x = b.input("x", (tokens,))
    place = b.to(b.cumsum(b.float(b.gt(x, value=0)), dim=0), dtype="i64")
    b.metric("count", b.sum(b.float(b.one_hot(place, num_classes=capacity))))
    b.loss(b.sum(x))
    return b.build()


def plan(tokens: int, capacity: int) -> Plan:
    p = tv.plan("count", tv.Mesh(dp=1))
    with p.ranks() as r:
        x = r.input("x", (tokens,), "t")
        place = r.to(r.cumsum(r.float(r.gt(x, value=0)), dim=0), dtype="i64")
        r.metric("count", r.sum(r.float(r.one_hot(place, num_classes=capacity))))
        r.loss(r.sum(x))
    return p.build()


def test_enough_places_are_not_refuted() -> None:
    assert verify(counted(12, 13), plan(12, 14), points=3).verdict == "UNKNOWN"  # equal: there are at most 12
