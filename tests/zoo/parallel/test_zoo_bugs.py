"""Bugs of ZeRO, interleaved pipelines, losses and packed rows, planted into plans of Llama and GPT: refuted, or invalid."""

from __future__ import annotations

import pytest

from trainverify.verdicts import verify
from verdicts.changes import edited
from zoo.parallel.bugs import BUGS, base


@pytest.mark.parametrize("name", BUGS)
def test_planted_bug(name: str) -> None:
    where, verdict, named, change = BUGS[name]
    logical, correct = base(where)
    report = verify(logical, change(correct), points=3 if where == "packed" else 1)
    assert report.verdict == verdict, (report.reason, report.findings)
    if verdict == "INVALID":
        assert named in {f.code for f in report.findings}, report.findings
        return
    assert report.place is not None
    assert report.place.tensor == named
    assert named in edited(correct, change(correct))
