"""Classes of ranks that behave alike, and the order of rendezvous."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from check.large import large
from check.plans import index_of, op, small_plan, two_ranks, types
from trainverify.graph.communication import Communication, schedule
from trainverify.graph.plan import Edit, Plan, expand, fold, units
from trainverify.ops import OPS

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import mlp


def talk(plan: Plan) -> Communication:
    return Communication(plan, units(plan), OPS)


def apart(plan: Plan) -> Plan:
    """The same plan with one template per rank."""
    return replace(
        plan,
        templates=tuple(
            replace(u, ranks=(r,), bindings={n: (c[i],) for n, c in u.bindings.items()}) for u in units(plan) for i, r in enumerate(u.ranks)
        ),
        edits=(),
    )


def met(plan: Plan) -> set[tuple[tuple[int, int], ...]]:
    """Every rendezvous, by running ranks one by one: (rank, event index) that meet."""
    found = schedule(talk(apart(plan)))
    assert not found.stuck
    assert all(len(c.ranks) == 1 for c in found.classes)
    return {tuple(sorted((found.classes[c].ranks[0], e) for c, e in step)) for step in found.steps}


def test_classes_of_the_example() -> None:
    classes = talk(mlp.plan()).classes()
    assert sorted(c.ranks for c in classes) == [(0, 1, 4, 5), (2, 3, 6, 7)]


def test_an_edit_splits_the_ranks_that_meet_it() -> None:
    plan = small_plan()
    i = index_of(plan.templates[0].program, "w.grad.synced")
    same = Edit(3, (i,), (plan.templates[0].program.ops[i],))
    classes = talk(replace(plan, edits=(same,))).classes()
    assert sorted(c.ranks for c in classes) == [(0, 2, 4), (1, 5), (3,)]


@pytest.mark.parametrize("sizes", [(2, 3, 2, 1, 4), (3, 2, 1, 2, 3), (1, 4, 2, 1, 6)])
def test_the_run_over_classes_is_the_run_over_ranks(sizes: tuple[int, int, int, int, int]) -> None:
    """Folded and rank by rank, the same events meet."""
    _, plan = large(*sizes)
    folded = talk(plan)
    result = schedule(folded)
    assert not result.stuck
    assert len(result.classes) == sizes[1]
    assert sum(len(step) for step in result.steps) <= sum(len(folded.events[c.unit]) for c in result.classes)
    done = {(c, e) for step in result.steps for c, e in step}
    assert done == {(i, e.index) for i, c in enumerate(result.classes) for e in folded.events[c.unit]}
    class_of = {r: i for i, c in enumerate(result.classes) for r in c.ranks}
    steps = {frozenset(step) for step in result.steps}
    assert {frozenset((class_of[r], e) for r, e in meeting) for meeting in met(plan)} == steps


def test_folding_per_rank_programs_gives_the_same_classes() -> None:
    plan = mlp.plan()
    folded = fold(plan.name, plan.mesh, [expand(plan, r) for r in range(plan.size)], plan.groups)
    assert sorted(c.ranks for c in talk(folded).classes()) == sorted(c.ranks for c in talk(plan).classes())


def test_events_of_calls_come_in_order() -> None:
    _, plan = large(2, 2, 2, 2, 3)
    names = [e.op.name for e in talk(plan).events[0]]
    assert names[:5] == ["all_reduce"] * 4 + ["send"]
    assert all(e.op.get("group") is not None or e.op.get("peer") is not None for e in talk(plan).events[0])


def test_messages_on_one_channel_do_not_overtake_each_other() -> None:
    first = [op("send", ("x",), (), peer=1, batch="b"), op("send", ("w",), (), peer=1, batch="b")]
    second = [
        op("recv", (), ("y",), peer=0, shape=(2, 3), batch="c"),
        op("recv", (), ("v",), peer=0, shape=(4, 3), batch="c"),
    ]
    plan = two_ranks(first, second, types(x=(2, 3), w=(4, 3), y=(2, 3), v=(4, 3)), ("x", "w"))
    assert schedule(talk(plan)).steps == (((0, 0), (1, 0)), ((0, 1), (1, 1)))


def test_tags_are_channels_of_their_own() -> None:
    first = [op("send", ("x",), (), peer=1, batch="b", tag=3), op("send", ("w",), (), peer=1, batch="b", tag=5)]
    second = [
        op("recv", (), ("v",), peer=0, shape=(4, 3), tag=5, batch="c"),
        op("recv", (), ("y",), peer=0, shape=(2, 3), tag=3, batch="c"),
    ]
    plan = two_ranks(first, second, types(x=(2, 3), w=(4, 3), y=(2, 3), v=(4, 3)), ("x", "w"))
    assert {frozenset(s) for s in schedule(talk(plan)).steps} == {frozenset({(0, 0), (1, 1)}), frozenset({(0, 1), (1, 0)})}


def test_a_deadlock_names_the_ranks_that_wait_for_each_other() -> None:
    first = [op("send", ("x",), (), peer=1), op("recv", (), ("y",), peer=1, shape=(2, 3))]
    second = [op("send", ("x",), (), peer=0), op("recv", (), ("y",), peer=0, shape=(2, 3))]
    result = schedule(talk(two_ranks(first, second, types(x=(2, 3), y=(2, 3)))))
    assert [(w.rank, w.event.index, w.waits_for) for w in result.cycle] == [(0, 0, 1), (1, 0, 0)]
    assert len(result.stuck) == 2


def test_waiting_for_a_rank_that_has_finished() -> None:
    plan = two_ranks([op("recv", (), ("y",), peer=1, shape=(2, 3))], [], types(x=(2, 3), y=(2, 3)))
    result = schedule(talk(plan))
    assert [(w.rank, w.waits_for) for w in result.cycle] == [(0, 1)]
