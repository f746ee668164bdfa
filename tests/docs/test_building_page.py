"""The page on building plans holds: its Python runs, and it has every method of the builder."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from trainverify.build.plan import PlanBuilder, RankBuilder
from trainverify.build.program import ProgramBuilder

PAGE = (Path(__file__).parents[2] / "docs" / "building-plans.md").read_text("utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
INNER = {"bindings", "block", "constant", "declare", "emit", "fresh", "group_of", "members", "mesh_group", "position", "program"}


def test_blocks_run() -> None:
    space: dict[str, Any] = {}
    for block in BLOCKS:
        exec(compile(block, "building-plans.md", "exec"), space)


def test_at_least_a_third_of_the_verdicts_are_rejections() -> None:
    verdicts = re.findall(r'\.verdict == "(\w+)"', PAGE)
    assert len(verdicts) >= 16
    assert verdicts.count("REFUTED") * 3 >= len(verdicts)


def test_every_method_is_on_the_page() -> None:
    for kind in (ProgramBuilder, PlanBuilder, RankBuilder):
        for name in {n for c in kind.__mro__[:-1] for n in vars(c) if not n.startswith("_")} - INNER:
            assert re.search(rf"\b{name}\b", PAGE), name
