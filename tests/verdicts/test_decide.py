"""What looks different is decided on more than one rank: noise on the first says nothing about the others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cli.models import model, plan
from trainverify.evaluate.compare import Decision, Difference, Suspect, compare, decide
from trainverify.verdicts import verify


def test_the_rank_that_is_furthest_off_is_decided_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Expected: not agreed. Enclosures are made to call every rank equal but the worst of an obligation."""
    seen: dict[str, list[Suspect]] = {}
    off: dict[str, list[Suspect]] = {}

    def fooled(small: Any, lineage: Any, suspect: Suspect, inputs: Any, seed: int) -> tuple[Decision, Difference | None]:
        seen.setdefault(str(suspect.obligation), []).append(suspect)
        mine = off[str(suspect.obligation)]
        if suspect.distance == max(s.distance for s in mine):
            return decide(small, lineage, suspect, inputs, seed)
        return "equal", None

    def noted(*args: Any) -> Any:
        """The last rank of an obligation is off by most."""
        found = []
        for suspects, count in compare(*args):
            last = {s.obligation: s.rank for s in suspects}
            made = [replace(s, distance=1.0 if s.rank == last[s.obligation] else 0.01) for s in suspects]
            for s in made:
                off.setdefault(str(s.obligation), []).append(s)
            found.append((made, count))
        return found

    monkeypatch.setattr("trainverify.verdicts.decision.decide", fooled)
    monkeypatch.setattr("trainverify.verdicts.evaluation.compare", noted)
    assert verify(model(), plan("sum"), points=1).verdict == "REFUTED"
    assert any(mine[0].distance < max(s.distance for s in off[name]) for name, mine in seen.items()), "no rank before the worst"
