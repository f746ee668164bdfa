"""Random JAX steps: every text is Python, even seeds are right by construction, odd ones have one mistake of a large catalogue."""

from __future__ import annotations

from collections import Counter
from random import Random

from tools.jax_steps.code import Draft, rendered, side_of, tokens
from tools.jax_steps.programs import FAMILIES, program
from tools.steps.code import Planted

SOME = range(600)


def draft(vma: bool = False, nested: bool = True) -> Draft:
    return Draft(Random(3), "dp", 2, vma, counted=True, nested=nested)


def test_every_program_is_python() -> None:
    for seed in SOME:
        compile(program(seed).source, f"program_{seed}.py", "exec")


def test_a_seed_gives_the_same_program() -> None:
    assert [program(seed).source for seed in range(8)] == [program(seed).source for seed in range(8)]


def test_every_second_program_has_a_mistake() -> None:
    assert [program(seed).planted is not None for seed in SOME] == [bool(seed % 2) for seed in SOME]


def test_no_marks_or_tokens_are_left() -> None:
    for seed in SOME:
        lines = program(seed).source.split("\n")
        assert not any("⟦" in line or line.startswith(("R|", "1|")) for line in lines), seed


def test_the_catalogue_is_large_and_no_mistake_dominates() -> None:
    found = Counter(made.planted.name for made in map(program, SOME) if made.planted is not None)
    assert len(found) >= 80
    assert max(found.values()) < len(SOME) / 2 * 0.1


def test_all_families_are_there() -> None:
    assert len({program(seed).family for seed in SOME}) >= len(FAMILIES) - 2  # two of them are data parallel, too


def test_a_mistake_changes_ranks_only() -> None:
    wrong = [made.source for made in map(program, SOME) if made.planted is not None]
    right = [_reference(text) for text in wrong]
    assert not any("axis_index" in text or "pmean" in text for text in right)


def _reference(source: str) -> str:
    return source[source.index("def reference(") : source.index("def distributed(")]


def test_a_mistake_is_made_only_where_and_when_it_says() -> None:
    made = draft()
    token = made.site("good", {"bad": "worse"}, lone=True)
    gated = made.sites[0]
    assert gated.gated
    assert gated.lone
    text = f"y = {token}"
    assert rendered(text, made.sites, None, "dp") == "y = good"
    assert rendered(text, made.sites, Planted("other"), "dp") == "y = good"
    assert rendered(text, made.sites, Planted("bad"), "dp") == "y = worse"
    both = rendered(text, made.sites, Planted("bad", "{n} > 1", "{rank} == 0"), "dp")
    assert '(n > 1) & (lax.axis_index("dp") == 0)' in both
    assert both.index("worse") < both.index("good")


def test_nothing_depends_on_the_rank_where_jax_checks_replicas() -> None:
    made = draft(vma=True)
    made.site("good", {"bad": "worse"}, lone=True)
    assert not made.sites[0].lone


def test_functions_outside_of_the_step_do_not_know_its_number() -> None:
    made = draft(nested=False)
    made.inner("good", {"bad": "worse"})
    assert not made.sites[0].gated


def test_each_side_has_its_own_lines() -> None:
    text = "both\nR|    ranks\n1|    one"
    assert side_of(text, "one") == "both\n    one"
    assert side_of(text, "ranks") == "both\n    ranks"


def test_whole_lines_may_go() -> None:
    made = draft()
    token = made.lines("a = 1\nb = 2", {"gone": ""})
    assert rendered(f"x\n    {token}\ny", made.sites, None, "dp") == "x\n    a = 1\n    b = 2\ny"
    assert rendered(f"x\n    {token}\ny", made.sites, Planted("gone"), "dp") == "x\ny"
    assert [site.good for site in tokens(token, made.sites)] == ["a = 1\nb = 2"]
