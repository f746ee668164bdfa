"""Random PyTorch steps: every text is Python, even seeds are right by construction, odd ones have one mistake of a large catalogue."""

from __future__ import annotations

from collections import Counter

from tools.steps.code import One, Planted, Ranks, Site, View, lines
from tools.steps.programs import program

SOME = range(400)


def test_every_program_is_python() -> None:
    for seed in SOME:
        compile(program(seed).source, f"program_{seed}.py", "exec")


def test_a_seed_gives_the_same_program() -> None:
    assert [program(seed).source for seed in range(8)] == [program(seed).source for seed in range(8)]


def test_every_second_program_has_a_mistake() -> None:
    assert [program(seed).planted is not None for seed in SOME] == [bool(seed % 2) for seed in SOME]


def test_the_catalogue_is_large_and_no_mistake_dominates() -> None:
    found = Counter(made.planted.name for made in map(program, SOME) if made.planted is not None)
    assert len(found) >= 40
    assert max(found.values()) < len(SOME) / 2 * 0.15


def test_a_mistake_is_made_by_ranks_only_where_and_when_it_says() -> None:
    site = Site("good()", {"bad": "bad()"}, lone=True)
    planted = Planted("bad", "{n} > 1", "{rank} == 0")
    assert lines(site, View("one"), planted) == ["good()"]
    assert lines(site, View("ranks"), planted) == ["if n > 1 and rank == 0:", "    bad()", "else:", "    good()"]
    assert lines(site, View("both"), planted)[0] == "if world > 1 and n > 1 and rank == 0:"
    assert lines(site, View("both", module=True), planted)[0] == "if self.world > 1 and self.calls > 1 and self.rank == 0:"
    assert lines(site, View("ranks"), None) == ["good()"]


def test_each_side_has_its_own_lines() -> None:
    code = (One("alone()"), Ranks("together()"))
    assert lines(code, View("one"), None) == ["alone()"]
    assert lines(code, View("ranks"), None) == ["together()"]
    assert lines(code, View("both"), None) == ["if world == 1:", "    alone()", "if world > 1:", "    together()"]
