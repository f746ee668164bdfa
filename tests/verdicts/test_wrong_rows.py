"""Rows that begin within the shard of another rank: refuted at real widths, on classes; rows that end up right are not."""

from __future__ import annotations

import time

import pytest

import trainverify as tv
from trainverify.evaluate.looser import looser
from trainverify.evaluate.sample import ALL
from trainverify.graph.obligations import obligations
from trainverify.graph.plan import units
from trainverify.ops import OPS
from trainverify.verdicts import related, verify
from verdicts.rows import EP, OWN, ROWS, Start, logical, plan, right


def test_proved() -> None:
    assert verify(logical(), plan(right)).verdict == "PROVED"


WRONG: dict[str, Start] = {
    "one row later": lambda at: right(at) + (1 if at["ep"] < EP - 1 else -1),
    "shards that are too short": lambda at: at["ep"] * (OWN - 37),
    "half a shard": lambda at: right(at) // 2,
    "by the other axis": lambda at: at["tp"] * OWN,
    "the other way round": lambda at: (EP - 1 - at["ep"]) * OWN,
}


@pytest.mark.parametrize("start", WRONG.values(), ids=WRONG)
def test_refuted(start: Start) -> None:
    """One row later took 24 s and 4 GB, as an axis that is cut there kept its 4096 positions."""
    began = time.process_time()
    report = verify(logical(), plan(start))
    assert report.verdict == "REFUTED"
    assert report.difference is not None
    assert str(report.difference.obligation) == "loss"
    assert report.place is not None
    assert report.place.tensor == "rows"
    assert "takes other positions than needed: the block of the rank's own ep" in report.place.cause
    assert time.process_time() - began < 30.0  # 0.5 or, on classes of an axis that keeps all its positions, 10


def differs(step: tv.Program, local: tv.Plan) -> bool:
    parts = units(local)
    wanted, _ = obligations(step, local, parts)
    return looser(related(step, local, OPS, parts, wanted), local.lineage, wanted, (), ALL, 0) is not None


@pytest.mark.parametrize("first", [1, 300, 512])
def test_rows_that_end_up_right_are_no_difference(first: int) -> None:
    """Rank ep=1 begins within a shard and then again, so that it has its own shard after all."""

    def begin(at: dict[str, int]) -> int:
        return first if at["ep"] == 1 else min(right(at), ROWS - 2 * OWN)

    assert not differs(logical(), plan(begin, lambda at: right(at) - begin(at)))


def shifted(start: int, local_start: int) -> tuple[tv.Program, tv.Plan]:
    """The logical program itself takes rows that begin within a shard."""
    p = tv.program("shifted")
    x, t, w = p.input("x", (ROWS, 5)), p.input("t", (OWN, 5)), p.input("w", (ROWS, 5))
    some = p.slice(x, dim=0, start=start, stop=start + OWN)
    p.loss(p.add(p.sum(p.mul(some, t)), p.sum(p.mul(p.reshape(x, shape=(EP, OWN, 5)), p.reshape(w, shape=(EP, OWN, 5)))), name="loss"))
    q = tv.plan("shifted", tv.Mesh(one=1))
    with q.ranks() as r:
        x, t, w = r.input("x", (ROWS, 5), "a b"), r.input("t", (OWN, 5), "a b"), r.input("w", (ROWS, 5), "a b")
        some = r.slice(x, dim=0, start=local_start, stop=local_start + OWN)
        both = r.mul(r.reshape(x, shape=(EP, OWN, 5)), r.reshape(w, shape=(EP, OWN, 5)))
        r.loss(r.add(r.sum(r.mul(some, t)), r.sum(both), name="loss"))
    return p.program(), q.build()


@pytest.mark.parametrize(("start", "local"), [(37, 37), (600, 600)])
def test_the_logical_program_may_begin_anywhere(start: int, local: int) -> None:
    assert not differs(*shifted(start, local))


def test_another_beginning_than_that_of_the_logical_program_is_refuted() -> None:
    assert verify(*shifted(37, 38)).verdict == "REFUTED"
