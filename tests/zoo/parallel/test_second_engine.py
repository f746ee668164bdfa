"""Combinations of the zoo by stages and the solver alone, at published widths: plans are proved at reduced sizes, mistakes are refuted."""

from __future__ import annotations

import pytest

from tools.zoo_verdicts import CONFIRMED, checked
from trainverify.graph.program import Ref
from trainverify.verdicts import verify
from verdicts.changes import Change, attrs
from zoo.parallel.mistakes import skipped

ROWS = {r.name: r for r in CONFIRMED}


def test_enough_combinations() -> None:
    assert len(ROWS) == len(CONFIRMED) >= 15
    assert {r.verdict for r in CONFIRMED} == {"PROVED(reduced)"}


@pytest.mark.parametrize("name", ["llama3-8b dp=2 tp=2 loss=sum", "gpt2 dp=2", "deepseek-16b tp=2"])
def test_row_is_proved(name: str) -> None:
    good, text = checked(ROWS[name], "smt")
    assert good, text


BUGS: dict[str, tuple[str, str, Change]] = {
    # bug: (combination, the tensor that is named, the change)
    "a gradient is not added up": ("gpt2 dp=2", "h.0.ln_2.weight.grad.dp", skipped("pp0", "h.0.ln_2.weight.grad.dp")),
    "outputs added up over data-parallel ranks": (
        "llama3-8b dp=2 tp=2 loss=sum",
        "mb0/layers.0.ffn.out",
        attrs("pp0", "mb0/layers.0.ffn.out", group=Ref("group.dp")),
    ),
}


@pytest.mark.parametrize("bug", BUGS)
def test_bug_is_refuted(bug: str) -> None:
    name, tensor, change = BUGS[bug]
    logical, plan = ROWS[name].wish.build()
    report = verify(logical, change(plan), points=1, engine="smt")
    assert report.verdict == "REFUTED", report.reason
    assert report.place is not None
    assert report.place.tensor == tensor
