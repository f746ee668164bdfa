"""Large plans: stages look at some ranks of every sort. Mistakes of any rank must be among them, or nothing is shown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction

import pytest

from tools.campaign.agree import staged
from trainverify.graph.lineage import Pattern
from trainverify.graph.plan import Plan, units
from trainverify.graph.program import Op, Program, Ref
from trainverify.ops import OPS
from trainverify.prove import scope
from trainverify.prove.propose.search import DIFFERS
from trainverify.prove.staged.reduce import with_fewer
from trainverify.verdicts import related, verify
from trainverify.zoo.llama import Config
from trainverify.zoo.parallel import Degrees, llama_plan, llama_step
from verdicts.changes import Change, in_program, on_rank, op_of, replaced

CONFIG = Config(layers=1, hidden=24, heads=6, kv_heads=2, ffn=12, vocabulary=18, sequence=4, batch=6)
HOW = Degrees(dp=6, zero=1)
LOGICAL, PLAN = llama_step(CONFIG), llama_plan(CONFIG, HOW)
SUMS = llama_plan(CONFIG, replace(HOW, zero=0))  # with sums over groups, whatever the size of those
PROGRAM = PLAN.templates[0].program.name


def ranks(plan: Plan) -> set[int]:
    """Those that are looked at."""
    small = with_fewer(related(LOGICAL, plan, OPS, units(plan), []), 2)
    assert small is not None
    return set(small.places)


def test_512_ranks_are_proved() -> None:
    """Expected: PROVED(reduced), and the report says that not all ranks were looked at."""
    config = Config(layers=1, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocabulary=128256, sequence=8192, batch=512)
    report = verify(llama_step(config), llama_plan(config, Degrees(dp=512, zero=1)), engine="smt", points=1)
    assert report.verdict == "PROVED(reduced)", report.notes
    assert any("reduced to 2 ranks, some of every sort" in n for n in report.notes)


def test_a_small_plan_is_looked_at_as_it_is() -> None:
    config = replace(CONFIG, batch=2)
    proof = staged(llama_step(config), llama_plan(config, replace(HOW, dp=2)))
    assert not proof.fewer
    assert "reduced to" not in proof.summary()


def bound(name: str, change: Callable[[tuple[int, ...]], dict[int, int]]) -> Change:
    """Other integers of some ranks."""

    def apply(plan: Plan) -> Plan:
        (template,) = plan.templates
        column = list(template.bindings[name])
        for rank, value in change(tuple(column)).items():
            column[rank] = value
        return replace(plan, templates=(replace(template, bindings={**template.bindings, name: tuple(column)}),))

    return apply


def both_ends(output: str, change: Callable[[tuple[int, ...]], dict[int, int]]) -> Change:
    """Other ranges of a slice."""

    def apply(plan: Plan) -> Plan:
        op = next(op for op in plan.templates[0].program.ops if output in op.outputs)
        for end in ("start", "stop"):
            ref = op.get(end)
            assert isinstance(ref, Ref)
            plan = bound(ref.name, change)(plan)
        return plan

    return apply


def groups(split: Callable[[tuple[int, ...]], list[tuple[int, ...]]]) -> Change:
    """The groups along dp in parts."""

    def apply(plan: Plan) -> Plan:
        (template,) = plan.templates
        made = {n: g for n, g in plan.groups.items() if not n.startswith("dp.")}
        of: dict[int, str] = {}
        for name, members in plan.groups.items():
            for n, part in enumerate(split(members) if name.startswith("dp.") else []):
                made[f"{name}.{n}"] = part
                of |= dict.fromkeys(part, f"{name}.{n}")
        column = tuple(of[r] for r in range(len(of)))
        return replace(plan, groups=made, templates=(replace(template, bindings={**template.bindings, "group.dp": column}),))

    return apply


def turned(values: tuple[int, ...]) -> dict[int, int]:
    """Every rank along dp has what the next one should have."""
    return {r: values[(r + 1) % len(values)] for r in range(len(values))}


def reversed_(values: tuple[int, ...]) -> dict[int, int]:
    """Along dp the other way round."""
    return {r: values[len(values) - 1 - r] for r in range(len(values))}


def three(values: tuple[int, ...]) -> dict[int, int]:
    """Three ranks have what the first one has."""
    return dict.fromkeys((2, 3, 4), values[0])


def around(members: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Those at both ends, and those between."""
    return [members[:2] + members[-1:], members[2:-1]]


def halves(members: tuple[int, ...]) -> list[tuple[int, ...]]:
    return [members[:3], members[3:]]


def often(times: Fraction) -> Change:
    """The loss, which all ranks along dp have, is added up over them once more, and multiplied."""

    def apply(program: Program) -> Program:
        i = op_of(program, "loss.total")
        op, kind = program.ops[i], program.tensors["loss.total"]
        ops = (
            replace(op, outputs=("loss.once",)),
            replace(op, inputs=("loss.once",), outputs=("loss.often",)),
            Op("mul", ("loss.often",), ("loss.total",), (("value", times),), op.phase),
        )
        more = {"loss.once": kind, "loss.often": kind}
        return replace(program, ops=(*program.ops[:i], *ops, *program.ops[i + 1 :]), tensors={**program.tensors, **more})

    return in_program(PROGRAM, apply)


def one_by_one(rows: Sequence[int]) -> Change:
    """How the batch arrives is said for every rank by itself: which rows it has."""

    def apply(plan: Plan) -> Plan:
        found = []
        for lay in plan.lineage:
            if lay.logical in ("tokens", "labels"):
                forms = [Pattern("(d b) s", (("d", row, 6),)) for row in rows]
                found += [replace(lay, form=form, where=(("dp", c),)) for c, form in enumerate(forms)]
            else:
                found.append(lay)
        return replace(plan, lineage=tuple(found))

    return apply


WRONG: dict[str, tuple[Change, set[int]]] = {
    "an edit of one rank": (on_rank(4, "mb0/layers.0.attention.normed", lambda op: op.with_attrs(eps=1e-3)), {4}),
    "a slice of one rank": (both_ends("lm_head.shard", lambda v: {4: v[1]}), {4}),
    "slices of three ranks": (both_ends("lm_head.shard", three), {2, 3, 4}),
    "all slices turned": (both_ends("lm_head.shard", turned), {5}),
    "all slices the other way round": (both_ends("lm_head.shard", reversed_), set()),
    "no synchronisation between halves": (groups(halves), set(range(6))),
    "both ends together, those between apart": (groups(around), set(range(6))),
    "a mean where a sum should be": (replaced(PROGRAM, "loss.total", lambda op: op.with_attrs(op="avg")), set()),
    "a maximum where a sum should be": (replaced(PROGRAM, "tokens", lambda op: op.with_attrs(op="max")), set()),
    "too often, by the number of ranks that are looked at": (often(Fraction(1, 2)), set()),
    "too often, by the number of others": (often(Fraction(1, 3)), set()),
    "the rows of another rank": (one_by_one((0, 1, 2, 3, 3, 5)), {4}),
    "a sum that is left out": (replaced(PROGRAM, "loss.total", lambda op: replace(op, name="identity", attrs=())), set()),
    "the mask of one rank": (on_rank(4, "mb0/layers.0.attention.mixed", lambda op: op.with_attrs(is_causal=False)), {4}),
}


@pytest.mark.parametrize("name", WRONG)
def test_mistakes_of_any_rank_are_not_shown(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Expected: the rank is among those that are looked at, and not everything is shown."""
    monkeypatch.setattr(scope, "MANY", 0)
    change, there = WRONG[name]
    wrong = change(SUMS if "between" in name else PLAN)
    assert there <= ranks(wrong)
    assert DIFFERS in staged(LOGICAL, wrong).failed.values()


def test_a_number_may_count_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Expected: shown with all ranks; with fewer, a sixth would not be right."""
    monkeypatch.setattr(scope, "MANY", 0)
    proof = staged(LOGICAL, often(Fraction(1, 6))(PLAN))
    assert not proof.failed
    assert not proof.fewer


def test_what_is_said_rank_by_rank_keeps_all_ranks() -> None:
    assert ranks(one_by_one(range(6))(PLAN)) == set(range(6))


def test_the_plan_is_shown_with_few_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scope, "MANY", 0)
    proof = staged(LOGICAL, PLAN)
    assert not proof.failed
    assert proof.fewer
    assert proof.reduced
    assert ranks(PLAN) == {0, 3}
