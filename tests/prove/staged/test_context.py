"""Attention over ranks, by stages alone: pieces of a gradient that one rank has whole and another one does not."""

from __future__ import annotations

from dataclasses import replace

from prove.staged.cutting import cut
from tools.campaign.agree import staged
from trainverify.prove.staged.execute import Limits, check
from trainverify.zoo.llama import Config
from trainverify.zoo.parallel import Degrees, llama_plan, llama_step

CONFIG = Config(layers=1, hidden=8, heads=4, kv_heads=2, ffn=6, vocabulary=14, sequence=8, batch=2)
HOW = Degrees(cp=2, cp_kind="zigzag", microbatches=2)
GRADIENT = "layers.0.attention.v.heads.grad"


def test_zigzag_is_proved() -> None:
    """Expected: all of it. Late keys are seen by late queries only, so one rank's share of some gradients is all of them."""
    proof = staged(llama_step(CONFIG), llama_plan(CONFIG, HOW))
    assert not proof.failed, proof.failed


def test_a_tensor_with_some_of_the_wanted_elements_is_no_leaf() -> None:
    """Expected: the others are defined, by the whole of both sides. A tensor that has all of them is a leaf still."""
    engine, stages = cut(llama_step(CONFIG), llama_plan(CONFIG, HOW))
    a = engine.ledger.elements
    summed = [s for s in stages if s.goal.terms[0].place[2] == f"mb0/{GRADIENT}"]
    assert len(summed) == 2
    for stage in summed:
        assert stage.logical.calls
        assert not stage.foreign
        wanted = set(stage.goal.ids.tolist())
        for ids, _ in stage.plan.leaves.values():
            owners = {a.owner[i] for i in ids.tolist() if 0 <= i < a.count}
            assert GRADIENT not in owners
        assert wanted <= set(a.ids[GRADIENT].reshape(-1).tolist())
    held = [
        p
        for p, c in engine.ledger.claims.tensors.items()
        if GRADIENT in {a.owner[i] for i in c.ids.tolist() if 0 <= i < a.count} and "gathered" in p[2]
    ]
    assert held  # shares that are all of some elements
    moved = [s for s in stages if s.goal.name == GRADIENT and not s.logical.calls]
    assert moved  # from a tensor that has all of them


def test_another_rank_s_share_is_not_enough() -> None:
    """Expected: without the share of the other rank it is not shown."""
    engine, stages = cut(llama_step(CONFIG), llama_plan(CONFIG, HOW))
    stage = next(s for s in stages if s.goal.terms[0].place[2] == f"mb0/{GRADIENT}")
    term = replace(stage.goal.terms[0], place=(*stage.goal.terms[0].place[:2], "mb0/layers.0.attention.v.gathered.grad"))
    other = engine.ledger.cutter.stage(replace(stage.goal, terms=(replace(term, elements=term.elements),)))
    assert all(check(stage, n, engine.ledger.elements).proved for _, n in stage.tasks)
    quick = Limits(seconds=2.0, solver_seconds=0.5)
    assert not all(check(other, n, engine.ledger.elements, quick).proved for _, n in other.tasks)
