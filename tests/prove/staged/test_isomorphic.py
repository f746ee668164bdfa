"""Elements that are looked at once: those of a stage that differ in names only, and nothing else. Terms of whole tensors, made at once, are
those of their elements."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from prove.staged.cutting import cut_once, experts, llama, random_pair
from trainverify.domains.arrays import Array
from trainverify.graph.plan import Plan
from trainverify.graph.program import Program
from trainverify.prove.propose.search import Search
from trainverify.prove.staged import isomorphic
from trainverify.prove.staged.execute import Limits, check
from trainverify.prove.staged.graphs import NOTHING
from trainverify.prove.staged.isomorphic import _first_of_each
from trainverify.prove.staged.placed import SEVERAL, distinct
from trainverify.prove.staged.records import Stage
from trainverify.prove.staged.stages import Cutter, NoStage, _Walk
from trainverify.prove.staged.terms import Terms

Programs = Callable[[], tuple[Program, Plan]]
BEFORE: dict[str, Any] = {"tasks": (), "short": {}, "identical": 0, "partial": False, "foreign": False, "in_parts": False}
QUICK = Limits(seconds=2.0, solver_seconds=0.1)
PROGRAMS = [llama, experts, *map(random_pair, (3, 9))]


@pytest.fixture(autouse=True)
def small_ones_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isomorphic, "FEWEST", 2)
    monkeypatch.setattr(isomorphic, "ELEMENTS", 1)


def different(engine: Search, stages: list[Stage]) -> list[Stage]:
    """One stage of each form."""
    return list({engine.ledger.cutter._canonical.form(s): s for s in stages}.values())


@pytest.fixture(scope="module")
def of_llama() -> tuple[Search, list[Stage]]:
    engine, stages = cut_once(llama)
    return engine, different(engine, stages)


def keys(engine: Search, stage: Stage, classes: Array) -> Iterator[tuple[Any, Any]]:
    """What elements have to show, and what the ones that stand for them have."""
    own = {n: _Walk(engine.ledger.cutter, stage).key(n) for n in range(len(stage.goal.ids))}
    return ((own[n], own[int(first)]) for n, first in enumerate(classes.tolist()))


@pytest.mark.parametrize("programs", PROGRAMS)
def test_elements_that_are_looked_at_once_have_the_same_to_show(programs: Programs) -> None:
    engine, stages = cut_once(programs)
    fewer = 0
    for stage in different(engine, stages):
        classes = engine.ledger.cutter._isomorphic.classes(stage)
        if classes is not None:
            assert (classes <= np.arange(len(classes))).all()
            assert all(own == first for own, first in keys(engine, stage, classes))
            fewer += len(np.unique(classes)) < len(classes)
    assert fewer >= 10


def changed(stage: Stage, how: str) -> Stage | None:
    """With one element of the first leaf, or of the goal, that is another one: its neighbour, or nothing."""
    place, (ids, factor) = next(iter(stage.plan.leaves.items()))
    if "goal" in how:
        ids = stage.goal.ids
    ids, at = ids.copy(), len(ids) // 2
    ids[at] = NOTHING if "nothing" in how else ids[at - 1]
    if "goal" in how:
        return None if (ids == stage.goal.ids).all() else replace(stage, goal=replace(stage.goal, ids=ids))
    plan = replace(stage.plan, leaves={**stage.plan.leaves, place: (ids, factor)})
    return None if (ids == stage.plan.leaves[place][0]).all() else replace(stage, plan=plan)


@pytest.mark.parametrize("how", ["leaf, neighbour", "leaf, nothing", "goal, neighbour", "goal, nothing"])
def test_one_that_is_wrong_among_many_is_looked_at(monkeypatch: pytest.MonkeyPatch, how: str, of_llama: tuple[Search, list[Stage]]) -> None:
    """Expected: what is shown of the others is not said of it. A stage is shown only if it is shown element by element."""
    engine, stages = of_llama
    seen = [0, 0]
    for stage in stages[::2]:
        wrong = changed(replace(stage, **BEFORE), how) if stage.plan.leaves and len(stage.goal.ids) > 1 else None
        if wrong is None or (classes := engine.ledger.cutter._isomorphic.classes(wrong)) is None:
            continue
        assert all(own == first for own, first in keys(engine, wrong, classes))
        one_by_one = replace(wrong)
        shown = all_shown(engine, wrong)
        if shown:
            with monkeypatch.context() as m:
                m.setattr(isomorphic, "FEWEST", 1_000_000)
                assert all_shown(engine, one_by_one)
        seen[shown] += 1
    assert seen[False] >= 20


def all_shown(engine: Search, stage: Stage) -> bool:
    try:
        Cutter(engine.ledger.elements, engine.ledger.claims)._number(stage)
    except NoStage:
        return False
    return all(check(stage, n, engine.ledger.elements, QUICK).proved for _, n in stage.tasks)


def test_equal_and_different_symbols_are_told_apart() -> None:
    rows = np.array([[5, 7, 5, 5], [8, 2, 8, 8], [5, 5, 7, 5], [1, 2, 3, 1]])
    assert _first_of_each(rows).tolist() == [[0, 1, 0, 0], [0, 1, 0, 0], [0, 0, 2, 0], [0, 1, 2, 0]]
    assert _first_of_each(rows[:, :0]).shape == (4, 0)


def test_different_rows() -> None:
    rows = np.random.default_rng(0).integers(0, 3, (200, 3))
    first, which = distinct(rows)
    assert len(first) == 27 > SEVERAL
    assert (rows[np.array(first)[which]] == rows).all()


@pytest.mark.parametrize("programs", PROGRAMS)
def test_terms_of_whole_tensors_are_those_of_their_elements(programs: Programs) -> None:
    """The same terms, and the same numbers and leaves."""
    engine, _ = cut_once(programs)
    graph, terms = engine.ledger.elements.graph, Terms()
    signatures = {c.signature: c for c in graph.makers.values() if c.nodes is not None}
    read = 0
    for call in signatures.values():
        assert call.nodes is not None
        made = terms.elements(call.nodes, graph._shapes(call))
        one_by_one = [[terms._placed(t) for t in output] for output in made]
        placed = terms.placed(call.nodes, graph._shapes(call))
        for whole, row, places in zip(placed or [], made, one_by_one, strict=placed is not None):
            numbers = whole["number"].tolist()
            begins = [tuple([(i, begin[i]) for i in terms.inputs(n)]) for n, begin in zip(numbers, whole["begin"].tolist(), strict=True)]
            assert list(zip(numbers, begins, strict=True)) == places
            assert all(terms.there(n, b) is t for n, b, t in zip(numbers, begins, row, strict=True))
            leaves = [terms.relative(t)[1] for t in row]
            assert (terms.leaves(whole) == np.concatenate([np.empty((0, 2), dtype=np.int64), *leaves])).all()
            read += 1
    assert read >= 10
