"""An explanation that takes too long is given up, wherever the search is; the verdict stands."""

from __future__ import annotations

import math
import time

import pytest

from trainverify.explain.watch import STOPPED, Stopped, Watch
from trainverify.verdicts import verify
from verdicts.exchange import logical, plan


@pytest.mark.parametrize("looks", [0, 3, 40, 400])
def test_stopped(monkeypatch: pytest.MonkeyPatch, looks: int) -> None:
    """REFUTED, at the first, a later and a late look at the watch."""
    left = [looks]

    def look(self: Watch) -> None:
        if math.isfinite(self.until):
            left[0] -= 1
            if left[0] < 0:
                raise Stopped

    monkeypatch.setattr(Watch, "look", look)
    report = verify(logical(70), plan(70, "there"))
    assert left[0] < 0
    assert report.verdict == "REFUTED"
    assert report.difference is not None
    assert str(report.difference.obligation) == "loss"
    assert report.place is not None
    assert report.place.cause.endswith(STOPPED)


def test_time_is_over() -> None:
    """Processor time counts: 40 s by default."""
    with pytest.raises(Stopped):
        Watch.started(-0.001).look()
    Watch.started().look()
    assert 39 < Watch.started().until - time.process_time() < 41
