"""A wrong transpose is refuted in about the time in which the right exchange is proved, at any number of positions."""

from __future__ import annotations

import time

import numpy as np
import pytest

import trainverify as tv
from trainverify.evaluate.looser import in_a_row, looser, related_by_size
from trainverify.evaluate.sample import ALL
from trainverify.graph.obligations import obligations
from trainverify.graph.plan import units
from trainverify.ops import OPS
from trainverify.verdicts import related, verify
from verdicts.exchange import Mistake, logical, plan

SIZES = (64, 66, 1024, 4096)  # 66 positions as [2, 33] and as [33, 2] do not align


@pytest.mark.parametrize("positions", SIZES)
def test_proved(positions: int) -> None:
    assert verify(logical(positions), plan(positions)).verdict == "PROVED"


@pytest.mark.parametrize("mistake", ["there", "back"])
@pytest.mark.parametrize("positions", SIZES)
def test_refuted(positions: int, mistake: Mistake) -> None:
    """Without an answer in minutes at 1024, and out of memory at 4096, while all positions were evaluated."""
    began = time.process_time()
    report = verify(logical(positions), plan(positions, mistake))
    assert report.verdict == "REFUTED"
    assert report.difference is not None
    assert str(report.difference.obligation) == "loss"
    assert report.place is not None
    assert report.place.cause.startswith("linear.1 holds positions [0, 2] of linear.1 where 0…1 are needed")
    assert time.process_time() - began < 4.0  # about 0.4


def mixed(positions: int, times: int) -> tuple[tv.Program, tv.Plan]:
    """Positions are exchanged with those of the other half, several times, before they attend to each other."""
    width = 3
    p = tv.program("attention")
    x, t = p.input("x", (positions, width)), p.input("t", (positions, width))
    scores = p.softmax(p.matmul(x, p.transpose(x, dim0=0, dim1=1)), dim=1)
    p.loss(p.sum(p.mul(p.matmul(scores, x), t), name="loss"))
    q = tv.plan("shuffled", tv.Mesh(one=1))
    with q.ranks() as r:
        x, t = (r.input(n, (positions, width), "s k") for n in ("x", "t"))
        y = x
        for _ in range(times):
            y = r.reshape(r.transpose(r.reshape(y, shape=(2, positions // 2, width)), dim0=0, dim1=1), shape=(positions, width))
        scores = r.softmax(r.matmul(y, r.transpose(y, dim0=0, dim1=1)), dim=1)
        r.loss(r.sum(r.mul(r.matmul(scores, y), t), name="loss"))
    return p.program(), q.build()


@pytest.mark.parametrize(
    ("positions", "times", "differs"),
    [
        (1802, 25, False),  # 2²⁵ = 1 modulo 1801: so many shuffles are none, but at 4, 6 and 8 positions they are some
        (1802, 23, True),
        (9018, 35, False),  # 2³⁵ = 1 modulo 9017, and 9018² scores are too many to look at
        (9018, 7, False),  # wrong, but a chain like that one
        (9018, 1, True),
    ],
)
def test_an_order_that_is_restored_is_no_difference(positions: int, times: int, differs: bool) -> None:
    step, local = mixed(positions, times)
    parts = units(local)
    wanted, _ = obligations(step, local, parts)
    system = related(step, local, OPS, parts, wanted)
    loose = looser(system, local.lineage, wanted, (), ALL, 0)
    assert (loose is not None) == differs
    assert in_a_row(related_by_size(system)) == times


def test_restored_orders() -> None:
    """What the cases above say about numbers."""
    for positions, times in ((1802, 25), (9018, 35)):
        order = np.arange(positions)
        for _ in range(times):
            order = order.reshape(2, -1).T.reshape(-1)
        assert (order == np.arange(positions)).all()
