"""Sorted rows in a sample of ranks: 256 experts become 6, and what goes wrong with them is still seen."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from trainverify.axes.structure import Axis
from trainverify.axes.system import System
from trainverify.evaluate.choices import Row, grown, rows
from trainverify.evaluate.compare import calm, compare
from trainverify.evaluate.sample import sampled
from trainverify.evaluate.small import Small, shrink_system
from trainverify.graph.obligations import obligations
from trainverify.graph.plan import Plan, units
from trainverify.graph.program import Program, Ref
from trainverify.ops import OPS
from trainverify.prove.algebra.engine import Proof, prove
from trainverify.verdicts import Disagreement, related, verify
from trainverify.zoo.deepseek import PRESETS
from trainverify.zoo.parallel import Degrees, deepseek_plan, deepseek_step
from trainverify.zoo.recipes import Wish
from verdicts.changes import Change, attrs, inputs, on_rank
from zoo.parallel.experts import turned

V2 = replace(PRESETS["deepseek-236b"], layers=2, batch=32)
V3 = replace(PRESETS["deepseek-671b"], layers=2, dense_layers=1, batch=32)
HOW = Degrees(dp=16, ep=8, tp=8, zero=1, microbatches=2, normalise="loss")  # edp 2, ep 8, tp 8
AT, MLP = "mb1/layers.1.", "layers.1.mlp."
RANK = 64 + 5 * 8 + 3  # edp 1, ep 5, tp 3


@cache
def base(name: str = "V3") -> tuple[Program, Plan]:
    config = V2 if name == "V2" else V3
    return deepseek_step(config), deepseek_plan(config, HOW)


def system_of(logical: Program, plan: Plan) -> System:
    wanted, _ = obligations(logical, plan, units(plan))
    return related(logical, plan, OPS, units(plan), wanted)


def off(logical: Program, plan: Plan) -> tuple[set[str], Small]:
    """Obligations that are clearly off at small sizes."""
    system = system_of(logical, plan)
    small = shrink_system(system, kept=sampled(system))
    wrong = set()
    for seed, (found, count) in enumerate(compare(small, plan.lineage, system.obligations, range(3))):
        assert count
        left = calm(small, plan.lineage, found, seed) if found else []
        wrong |= {s.obligation.output.tensor for s in left if s.distance > 1e-6}
        if wrong:
            break
    return wrong, small


@pytest.mark.parametrize(("name", "experts", "chosen"), [("V2", (160, 6), (8, 3)), ("V3", (256, 8), (8, 4))])
def test_the_plan_agrees_with_few_experts_on_few_ranks(name: str, experts: tuple[int, int], chosen: tuple[int, int]) -> None:
    logical, plan = base(name)
    system = system_of(logical, plan)
    cuts = {row.size: row.cuts for row in rows(system)}
    assert cuts[experts[0]] == (experts[1],)
    assert cuts[chosen[0]] == (chosen[1],)
    wrong, small = off(logical, plan)
    assert not wrong
    assert len({plan.mesh.coordinates(r)["ep"] for r in small.places}) == 2
    assert len(small.places) == 2 * 2 * 2
    number, hidden = small.shapes[MLP + "gate.weight"]
    assert number == 2 * 3  # two groups, of which one is chosen; two of its three experts are
    assert hidden == 2 * 2 * 2


def starts(rank: int, output: str) -> Change:
    """One rank takes the shard of rank 0."""

    def apply(plan: Plan) -> Plan:
        t, *others = plan.templates
        op = next(op for op in t.program.ops if output in op.outputs)
        columns = {}
        for ref in (op.get("start"), op.get("stop")):
            assert isinstance(ref, Ref)
            column = t.bindings[ref.name]
            columns[ref.name] = tuple(column[0] if r == rank else v for r, v in zip(t.ranks, column, strict=True))
        return replace(plan, templates=(replace(t, bindings={**t.bindings, **columns}), *others))

    return apply


WEIGHTS, UP, GATE = AT + "moe.weights", MLP + "experts.up_proj", MLP + "gate.weight"
BUGS: dict[str, tuple[Change, str]] = {  # bug: the change, an obligation that must be off
    "one expert fewer": (attrs("pp0", WEIGHTS, top_k=7), "loss"),
    "one expert more": (attrs("pp0", WEIGHTS, top_k=9), "loss"),
    "one group fewer": (attrs("pp0", WEIGHTS, top_groups=3), "loss"),
    "one group more": (attrs("pp0", WEIGHTS, top_groups=5), "loss"),
    "all groups": (attrs("pp0", WEIGHTS, top_groups=8), "loss"),
    "four groups of 64": (attrs("pp0", WEIGHTS, groups=4), "loss"),
    "a group counts as its best expert": (attrs("pp0", WEIGHTS, group_score="max"), "loss"),
    "weights that do not add up": (attrs("pp0", WEIGHTS, normalize=False), "loss"),
    "choice without the bias": (inputs("pp0", WEIGHTS, AT + "moe.logits"), "loss"),
    "answers brought back in the other order": (turned(AT + "moe.returned"), "loss"),
    "first micro-batch twice": (inputs("pp0", UP + ".grad.2", UP + ".grad", UP + ".grad"), UP + ".new"),
    "gate updated with the gradient of one edp and ep rank": (attrs("pp0", GATE + ".grad.shard", op="avg"), GATE + ".new"),
    "norm counts experts of one rank": (attrs("pp0", "squares.edp+ep+tp", group=Ref("group.tp")), GATE + ".new"),
    "one rank computes with another weight": (
        on_rank(RANK, AT + "moe.up", lambda op: replace(op, inputs=(op.inputs[0], MLP + "experts.gate_proj"))),
        "loss",
    ),
    "one rank chooses one expert fewer": (on_rank(RANK, WEIGHTS, lambda op: op.with_attrs(top_k=7)), "loss"),
    "one rank forgets the bias": (on_rank(RANK, WEIGHTS, lambda op: replace(op, inputs=op.inputs[:1])), "loss"),
    "one rank counts its first micro-batch twice": (
        on_rank(RANK, UP + ".grad.2", lambda op: replace(op, inputs=op.inputs[:1] * 2)),
        UP + ".new",
    ),
    "one rank updates the shard of another": (starts(RANK, GATE + ".shard"), GATE + ".new"),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_is_seen(bug: str) -> None:
    change, output = BUGS[bug]
    logical, plan = base()
    wrong, small = off(logical, change(plan))
    assert output in wrong
    if bug.startswith("one rank"):
        assert RANK in small.places
        assert RANK not in sampled(system_of(logical, plan)).ranks(system_of(logical, plan))


@pytest.mark.long
def test_a_rank_among_128_is_named() -> None:
    logical, plan = base()
    report = verify(logical, BUGS["one rank forgets the bias"][0](plan))
    assert report.verdict == "REFUTED", report.reason
    assert report.place is not None
    assert (report.place.rank, report.place.tensor) == (RANK, WEIGHTS)


def test_a_wrong_proof_of_a_large_plan_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Too large for enclosures: what is as far off in extended precision as in float64 is enough."""
    monkeypatch.setattr("trainverify.verdicts.budgets.ENCLOSED", 0)
    monkeypatch.setattr("trainverify.verdicts.judge.prove", lambda system, wanted: Proof(proved=list(wanted)))
    logical, plan = Wish("llama3-8b", Degrees(dp=2, tp=4, zero=1), layers=1).build()
    assert verify(logical, plan, points=1).verdict == "PROVED"
    with pytest.raises(Disagreement, match="was proved by algebra"):
        verify(logical, on_rank(3, "mb0/layers.0.attention.normed", lambda op: op.with_attrs(eps=0.5))(plan), points=1)


def row(digits: tuple[int, ...], *cuts: int) -> Row:
    return Row(tuple(Axis(n) for n in digits), (), cuts)


def test_different_cuts_stay_different() -> None:
    assert row((8, 20), 5, 6, 9).places(7) == {0: 0, 5: 2, 6: 3, 9: 5, 160: 7}
    assert row((8, 20), 5, 6, 9).needed == 6
    assert row((8,), 7).needed == 3
    assert row((8,), 7).places(5) == {0: 0, 7: 4, 8: 5}  # at most one is not chosen
    assert row((8, 20)).places(9) == {0: 0, 160: 9}


def test_rows_grow_where_no_ranks_are_added() -> None:
    groups, own = Axis(8), Axis(20)
    experts, choice = Row((groups, own), (), (5, 6, 9)), Row((groups,), (), (3,))
    assert grown([experts], {id(groups): 2}, {id(own): 2}) == {id(groups): 2, id(own): 3}
    assert grown([experts, choice], {id(groups): 2}, {id(own): 2})[id(groups)] == 3
    assert grown([choice], {id(groups): 8}, {}) == {id(groups): 8}


@pytest.mark.parametrize("wrong", [False, True])
def test_slices_of_a_rank_with_an_edit_are_equal_ones(wrong: bool) -> None:
    """The axes of its slices are those of the others' slices; which one it takes is still looked at."""
    config = replace(V3, layers=2, dense_layers=0, batch=4)
    logical, plan = deepseek_step(config), deepseek_plan(config, Degrees(dp=4, ep=2, pp=2, zero=1, normalise="loss"))
    plan = on_rank(2, "mb0/layers.0.moe.up", lambda op: op)(plan)  # nothing changes, but it has a program of its own
    system = system_of(logical, starts(2, "layers.0.mlp.gate.weight.shard")(plan) if wrong else plan)
    assert not system.inference.axes.clashes
    failed = {o.output.tensor for o in prove(system, system.obligations).failed}
    assert ("layers.0.mlp.gate.weight.new" in failed) == wrong
    assert bool(failed) == wrong


@pytest.mark.long
def test_few_ranks_with_many_experts_are_sampled_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """160 experts on 16 ranks: with all of them there are too many elements."""
    config = replace(V2, layers=1, dense_layers=0, batch=8)
    logical, plan = deepseek_step(config), deepseek_plan(config, Degrees(dp=8, ep=8, tp=2, normalise="loss"))
    monkeypatch.setattr("trainverify.verdicts.budgets.EVALUATED", 100_000)
    report = verify(logical, plan)
    assert report.verdict == "PROVED", report.reason
    assert any("on 4 of 16 ranks" in n for n in report.notes)
    wrong = attrs("pp0", "mb0/layers.0.moe.weights", top_k=5)(plan)
    assert verify(logical, wrong).verdict == "REFUTED"
    monkeypatch.setattr("trainverify.verdicts.budgets.EVALUATED", 1_000)
    monkeypatch.setattr("trainverify.verdicts.budgets.MAX_ELEMENTS", 1_000)
    report = verify(logical, plan)
    assert (report.verdict, report.reason[:21]) == ("UNKNOWN", "too large to evaluate")
