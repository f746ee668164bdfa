"""The table of combinations: every parallelism is in it, and a few of its rows have their verdicts."""

from __future__ import annotations

from dataclasses import fields

import pytest

from tools.zoo_verdicts import ALONE, PRODUCTS, ROWS, checked, main
from trainverify.zoo.parallel.degrees import Degrees


def test_every_parallelism_is_there_and_enough_products() -> None:
    for f in fields(Degrees):
        assert any(getattr(r.wish.how, f.name) != f.default for r in ROWS), f.name
    for kind in ("ring", "zigzag", "ulysses"):
        assert any(r.wish.how.cp > 1 and r.wish.how.cp_kind == kind for r in ALONE)
    for stage in (1, 2, 3):
        assert any(r.wish.how.zero == stage for r in ALONE)
    for shards in ("parameter", "chunk", "flat"):
        assert any(r.wish.how.zero and r.wish.how.shards == shards for r in ALONE)
    several = [r for r in PRODUCTS if sum(getattr(r.wish.how, n) > 1 for n in ("dp", "tp", "pp", "cp", "ep")) + bool(r.wish.how.zero) > 1]
    assert len(several) >= 25
    assert len({r.name for r in ROWS}) == len(ROWS)


@pytest.mark.parametrize("row", [r for r in PRODUCTS if r.wish.how in (Degrees(dp=2, tp=2), Degrees(dp=512, zero=1))], ids=lambda r: r.name)
def test_row(row) -> None:  # type: ignore[no-untyped-def]
    good, text = checked(row)
    assert good, text


def test_rows_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--only", "llama3-8b dp=4 zero=1"]) == 0
    assert capsys.readouterr().out.startswith("ok    llama3-8b dp=4 zero=1 ")
    assert main(["--only", "no such"]) == 2
