"""What may be infinite says nothing: exp(log m) has a value where m is 0, and m/m has none."""

from __future__ import annotations

import pytest

from prove.infinite import FINITE, INFINITE, Body, made, place_in_the_row
from prove.showing import shown
from prove.staged.showing import shown as shown_by_stages
from trainverify.prove.staged import expressions
from trainverify.verdicts import verify


@pytest.mark.parametrize("body", INFINITE)
def test_the_algebra_shows_none(body: Body) -> None:
    """Expected: the wrong plan's loss is not shown, and it is no PROVED."""
    logical, wrong = made(body, True), made(body, False)
    assert set(logical.sources) >= set(wrong.sources)
    assert "loss" not in shown(logical, wrong)
    assert verify(logical, wrong, points=1).verdict != "PROVED"


@pytest.mark.parametrize("few", [0, expressions.SMALL_STAGE])
@pytest.mark.parametrize("body", INFINITE)
def test_stages_show_none(body: Body, few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Expected: not by stages either; nor with common parts as symbols."""
    monkeypatch.setattr(expressions, "SMALL_STAGE", few)
    assert "loss" not in shown_by_stages(made(body, True), made(body, False))


@pytest.mark.parametrize("body", FINITE)
def test_what_must_be_finite_is_granted(body: Body) -> None:
    """Expected: shown by both, as the logical program has no value where the other may have none."""
    logical, plan = made(body, True), made(body, False)
    assert shown(logical, plan) >= {"loss"}
    assert shown_by_stages(logical, plan) >= {"loss"}
    assert verify(logical, plan, points=1).verdict == "PROVED"


def test_what_is_looked_up_where_it_is() -> None:
    """Expected: shown by stages, as a position in a row is inside of one as long."""
    assert shown_by_stages(made(place_in_the_row, True), made(place_in_the_row, False)) >= {"loss"}
