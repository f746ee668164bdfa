"""Nothing keeps a program after its verdict: sweeps and campaigns verify thousands in one process."""

from __future__ import annotations

import gc
import weakref

import pytest

from trainverify.prove.attempt import Engine
from trainverify.verdicts import verify
from verdicts.changes import attrs
from verdicts.mlp import logical, plan


@pytest.mark.parametrize("engine", ["algebra", "smt"])
@pytest.mark.parametrize("right", [True, False])
def test_programs_are_let_go(engine: Engine, right: bool) -> None:
    one, many = logical(), plan()
    many = many if right else attrs("pp1", "y0", op="avg")(many)
    report = verify(one, many, engine=engine)
    assert report.verdict in (("PROVED", "PROVED(reduced)") if right else ("REFUTED",))
    alive = [weakref.ref(x) for x in (one, many, *[t.program for t in many.templates])]
    del one, many, report
    gc.collect()
    assert not [x() for x in alive if x() is not None]
