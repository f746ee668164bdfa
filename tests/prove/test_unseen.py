"""What nobody sees has no value or another: a plan that differs there is wrong, and no engine shows it."""

from __future__ import annotations

import numpy as np
import pytest

from prove.infinite import made
from prove.meaning import numbers_of
from prove.showing import shown
from prove.staged.showing import shown as shown_by_stages
from prove.unseen import LARGE, UNSEEN, Wrong, sign_of_an_exponential
from trainverify.prove.attempt import Engine
from trainverify.prove.staged import expressions
from trainverify.verdicts import verify

each = pytest.mark.parametrize("wrong", [pytest.param(w, id=w.name) for w in UNSEEN])


@pytest.mark.parametrize("wrong", [pytest.param(w, id=w.name) for w in (*UNSEEN, LARGE)])
def test_they_differ(wrong: Wrong) -> None:
    """Expected: the logical loss is finite where the plan's is no number, or another."""
    logical, plan = made(wrong.body, True), made(wrong.body, False)
    assert set(logical.sources) >= set(plan.sources)
    inputs = wrong.inputs(logical)
    assert set(inputs) >= set(wrong.at)
    want, got = (numbers_of(p, {n: inputs[n] for n in p.sources})["loss"] for p in (logical, plan))
    assert np.isfinite(want)
    assert not np.isclose(want, got)


@each
def test_the_algebra_shows_none(wrong: Wrong) -> None:
    """Expected: the wrong plan's loss is not shown."""
    assert "loss" not in shown(made(wrong.body, True), made(wrong.body, False))


@pytest.mark.parametrize("engine", ["algebra", "auto"])
@each
def test_none_is_proved(wrong: Wrong, engine: Engine) -> None:
    """Expected: no PROVED, at reduced sizes neither."""
    assert not verify(made(wrong.body, True), made(wrong.body, False), points=1, engine=engine).verdict.startswith("PROVED")


@pytest.mark.parametrize(("few", "large"), [(0, 0), (0, expressions.LARGE), (expressions.SMALL_STAGE, expressions.LARGE)])
@each
def test_stages_show_none(wrong: Wrong, few: int, large: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Expected: not by stages either; nor with common parts as symbols, nor part by part."""
    monkeypatch.setattr(expressions, "SMALL_STAGE", few)
    monkeypatch.setattr(expressions, "LARGE", large)
    assert "loss" not in shown_by_stages(made(wrong.body, True), made(wrong.body, False))


@pytest.mark.long
def test_a_large_one_is_not_proved() -> None:
    """Expected: no PROVED, of elements that are taken apart as they are large."""
    assert not verify(made(LARGE.body, True), made(LARGE.body, False), points=1, engine="auto").verdict.startswith("PROVED")


@pytest.mark.parametrize("engine", ["algebra", "auto"])
def test_what_is_always_so_is_no_error(engine: Engine) -> None:
    """Expected: PROVED, as both programs are the same; a comparison of which nothing is left is no error."""
    program = made(sign_of_an_exponential, True)
    assert verify(program, program, points=1, engine=engine).verdict.startswith("PROVED")
