"""Shapes of single stages: what a stage does not take apart is one axis to it; what it does keeps the structure of the whole program."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trainverify import cli, files
from trainverify.axes.structure import Axis
from trainverify.prove.staged.own import StageShapes, joined
from trainverify.verdicts import reduction
from verdicts.mlp import logical, plan


def sizes(rows: list[list[Axis]], kept: list[Axis]) -> list[list[int]]:
    found = joined(rows, kept)
    return [[found[id(a)].size for a in row] for row in rows]


def summed(*pieces: Axis) -> Axis:
    a = Axis(sum(p.size for p in pieces))
    a.pieces = list(pieces)
    return a


def test_digits_that_stay_together_are_one() -> None:
    a, b, c = Axis(3), Axis(5), Axis(7)
    assert sizes([[a, b, c], [c]], []) == [[15, 15, 7], [7]]
    assert sizes([[a, b, c], [a, b, c]], []) == [[105] * 3] * 2


@pytest.mark.parametrize("other", ["alone", "exchanged", "followed by another", "kept", "frozen"])
def test_digits_that_are_taken_apart_are_not(other: str) -> None:
    """If they were, a plan that exchanges blocks would look like one that does not."""
    a, b, c = Axis(3), Axis(5), Axis(7)
    rows = {"alone": [[b]], "exchanged": [[b, a]], "followed by another": [[a, c], [b]]}.get(other, [])
    b.frozen = other == "frozen"
    assert sizes([[a, b], *rows], [a] if other == "kept" else [])[0] == [3, 5]


def test_a_sum_is_one_axis_unless_a_piece_occurs() -> None:
    a, b, c = Axis(5), Axis(3), Axis(4)
    whole, other = summed(a, b), summed(b, c)
    assert joined([[whole]], [])[id(whole)].pieces is None
    assert joined([[whole], [a]], [])[id(whole)] is whole
    assert joined([[whole], [other]], [])[id(whole)] is whole  # they share a piece
    assert joined([[whole]], [whole])[id(whole)] is whole


def stages() -> list[StageShapes]:
    return [s for s in reduction(logical(), plan(), staged=True) if isinstance(s, StageShapes)]


def test_a_message_does_not_need_the_shards_of_what_it_carries() -> None:
    """The hidden dimension is sharded over tp elsewhere: 14 is 2 × 7, and 2 × 2 in the whole program."""
    lines = [line for s in stages() for line in s.lines() if s.text.startswith("stage a: a0.whole on rank 2 from a0.whole on rank 0")]
    assert "  a0.whole (rank 2): [5, 14] → [2, 2] (whole program: [2, 4])" in lines
    assert "  a: [20, 14] → [8, 2] (whole program: [8, 4])" in lines  # the rows are those of one of 2 × 2 places: they stay


def test_a_stage_that_sums_shards_keeps_them() -> None:
    (shown,) = [s for s in stages() if s.text.startswith("stage w1.grad: w1.grad.mean")]
    assert {t.tensor: own for t, own in shown.tensors if t.rank is None}["w1.grad"] == (4, 2)


def test_no_stage_is_larger_than_in_the_whole_program() -> None:
    found = stages()
    assert sum(s.alike + 1 for s in found) > 100
    assert all(a <= b <= c for s in found for t, own in s.tensors for a, b, c in zip(own, t.reduced, t.full, strict=True))
    assert all(a >= min(c, 2) for s in found for t, own in s.tensors for a, c in zip(own, t.full, strict=True))


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files.write(tmp_path / "model.json", logical())
    files.write(tmp_path / "plan.json", plan())
    command = ["reduce", str(tmp_path / "plan.json"), "--logical", str(tmp_path / "model.json"), "--stages"]
    assert cli.run(command) == 0
    assert "  a: [20, 14] → [8, 2] (whole program: [8, 4])" in capsys.readouterr().out.splitlines()
    assert cli.run([*command, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert set(shown) == {"command", "exit_code", "subject", "stages"}
    assert {"tensor": "a", "rank": None, "full": [20, 14], "reduced": [8, 4], "own": [8, 2]} in [
        t for s in shown["stages"] for t in s["tensors"]
    ]
