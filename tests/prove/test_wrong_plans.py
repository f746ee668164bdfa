"""None of the false obligations of plans that are wrong is proved, evaluation aside."""

from __future__ import annotations

import pytest

import trainverify as tv
from prove.meaning import check_program
from prove.showing import attempt
from prove.wrong_plans import CASES
from trainverify.graph.program import Program


@pytest.mark.parametrize("name", CASES)
def test_not_proved(name: str) -> None:
    proof = attempt(*CASES[name]())
    assert proof.proved == [], name
    assert proof.failed


def test_axes_that_clash_have_no_form() -> None:
    """x is frozen as 2 + 4, y is cut otherwise: the sum of both must not pair pieces of different sizes."""
    b = tv.program("l")
    x, y = b.input("x", (6,)), b.input("y", (6,))
    parts = [b.slice(x, dim=0, start=0, stop=2), b.slice(x, dim=0, start=0, stop=6, step=4), b.slice(y, dim=0, start=0, stop=4)]
    total = b.sum(b.add(x, y, name="z"))
    for t in parts:
        total = b.add(total, b.sum(t))
    b.loss(total)
    found = check_program(b.build(), 0)
    assert not found.wrong
    assert any(w.startswith("z:") and "aligned" in w for w in found.without)


@pytest.mark.parametrize("bad", [True, False])
def test_an_input_named_like_a_block(bad: bool) -> None:
    """x is cut into unequal pieces, whose names must not be those of other inputs."""

    def make(other: bool) -> Program:
        b = tv.program("l")
        x, y, z = b.input("x", (5,)), b.input("x#0", (2,)), b.input("z", (2,))
        first, rest = b.slice(x, dim=0, start=0, stop=2), b.slice(x, dim=0, start=2, stop=5)
        b.loss(b.add(b.sum(b.mul(y if other else first, z)), b.sum(rest), name="loss"))
        return b.build()

    assert bool(attempt(make(False), make(bad)).proved) == (not bad)
