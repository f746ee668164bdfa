"""Stages of one form have the same elements to show, with the same keys; stages that differ in more than names have different forms."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from prove.staged.cutting import cut, cut_once, experts, llama, random_pair, shown
from trainverify.graph.plan import Plan
from trainverify.graph.program import Program
from trainverify.prove.staged.records import Factor, Stage
from trainverify.prove.staged.stages import Cutter


@pytest.mark.parametrize("programs", [llama, experts, *map(random_pair, (3, 9))])
def test_forms_change_nothing(programs: Callable[[], tuple[Program, Plan]]) -> None:
    """Each stage numbered by itself, element by element, has what the first stage of its form has."""
    engine, stages = cut(*programs())  # afresh: other tests number the stages of `cut_once` under other limits
    forms = {engine.ledger.cutter._canonical.form(s) for s in stages}
    assert len(forms) < len(stages)
    alone = Cutter(engine.ledger.elements, engine.ledger.claims)
    for stage in stages:
        alone._numbered.clear()
        alone._by_elements.clear()
        again = replace(stage, tasks=(), short={}, identical=0, partial=False, foreign=False)
        alone._number(again)
        assert shown(again) == shown(stage), stage.described(engine.ledger.elements.graph)


def test_ranks_and_microbatches_of_experts_have_one_form() -> None:
    """Expected: one form by elements of what both ranks make of their tokens in either micro-batch, whoever computes it; several forms by
    tensors, as the tensors of all ranks are in each stage."""
    engine, stages = cut_once(experts)
    of = [s for s in stages if s.goal.terms[0].place[2].endswith("moe.combined") and s.plan.calls]
    canonical = engine.ledger.cutter._canonical
    assert len(of) == 4
    assert len({canonical.form(s) for s in of}) > 1
    assert len({canonical.by_elements(s) for s in of}) == 1


def test_what_differs_in_more_than_names_has_another_form() -> None:
    engine, stages = cut_once(llama)
    form = engine.ledger.cutter._canonical.form
    stage = next(s for s in stages if s.goal.name == "layers.0.ffn.gate" and len(s.plan.leaves) == 2)
    (first, (ids, factor)), (second, other) = stage.plan.leaves.items()
    assert form(stage) == form(replace(stage))

    def leaf(new: object) -> Stage:
        return replace(stage, plan=replace(stage.plan, leaves={first: new, second: other}))

    swapped = np.concatenate([ids[1:2], ids[:1], ids[2:]])
    changes = {
        "two elements exchanged": leaf((swapped, factor)),
        "an element that is 0": leaf((np.concatenate([[-1], ids[1:]]), factor)),
        "an element of another kind": leaf((np.concatenate([engine.ledger.elements.ids["labels"].reshape(-1)[:1], ids[1:]]), factor)),
        "the same element twice": leaf((np.concatenate([ids[1:2], ids[1:]]), factor)),
        "a factor": leaf((ids, Factor(2))),
        "a scalar as a factor": leaf((ids, Factor(1, int(engine.ledger.elements.ids["loss.valid"].reshape(-1)[0])))),
        "other elements wanted": replace(stage, goal=replace(stage.goal, ids=stage.goal.ids[::-1])),
        "another number": replace(stage, goal=replace(stage.goal, terms=(replace(stage.goal.terms[0], number=2), *stage.goal.terms[1:]))),
        "not zero is the goal": replace(stage, kind="nonzero"),
        "a call less": replace(stage, logical=replace(stage.logical, calls=[])),
        "another op": replace(stage, plan=replace(stage.plan, calls=[replace(stage.plan.calls[0], signature=10**6)])),
        "inputs exchanged": replace(stage, plan=replace(stage.plan, calls=[replace(c, inputs=c.inputs[::-1]) for c in stage.plan.calls])),
    }
    forms = {name: form(s) for name, s in changes.items()}
    assert form(stage) not in forms.values(), [n for n, f in forms.items() if f == form(stage)]
    assert len(set(forms.values())) == len(forms)
    by_elements = engine.ledger.cutter._canonical.by_elements
    fine = {name: by_elements(s) for name, s in changes.items() if name not in ("another op", "inputs exchanged")}
    assert by_elements(stage) == by_elements(replace(stage))
    assert by_elements(stage) not in fine.values(), [n for n, f in fine.items() if f == by_elements(stage)]
    assert len(set(fine.values())) == len(fine)
