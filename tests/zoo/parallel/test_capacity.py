"""Experts with a capacity: tokens are counted in the order of their sequence, those beyond the last place are dropped. Plans are proved,
and mistakes in counting, placing and dropping are refuted."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from trainverify.build.tape import BuildError
from trainverify.graph.plan import Plan
from trainverify.graph.program import Op, Program
from trainverify.verdicts import verify
from trainverify.zoo.deepseek import PRESETS
from trainverify.zoo.parallel import Degrees, deepseek_plan, deepseek_step
from verdicts.changes import Change, attrs, edited, in_program, inputs, op_of
from zoo.parallel.capacity import FEW
from zoo.parallel.evaluation import evaluated
from zoo.parallel.experts import AT, HOW, turned


@cache
def base() -> tuple[Program, Plan]:
    return deepseek_step(FEW), deepseek_plan(FEW, HOW)


@pytest.mark.parametrize(
    "how", [HOW, replace(HOW, dp=2, sp=True, microbatches=2), replace(HOW, dp=4, tp=1, zero=2)], ids=["tp", "sp", "zero2"]
)
def test_is_proved(how: Degrees) -> None:
    config = replace(FEW, batch=2 * how.dp * how.microbatches)
    report = verify(deepseek_step(config), deepseek_plan(config, how), points=1)
    assert report.verdict == "PROVED", report.notes


@pytest.mark.parametrize("model", ["16b", "671b"])
def test_is_proved_at_real_widths(model: str) -> None:
    """Half as many places as an expert of even load needs."""
    preset = PRESETS[f"deepseek-{model}"]
    config = replace(preset, layers=2, dense_layers=1, batch=8, capacity=preset.sequence * preset.gate.active // preset.gate.experts // 2)
    how = Degrees(dp=4, ep=2, tp=2, pp=2, microbatches=2, normalise="loss")
    report = verify(deepseek_step(config), deepseek_plan(config, how), points=1)
    assert report.verdict == "PROVED", report.notes


def with_last_place(program: Program) -> Program:
    """Beside the places another set of them, in which all tokens without a place share the last one."""
    at, first = op_of(program, AT + "moe.places"), program.tensors[AT + "moe.place.float"]
    made = {
        n: program.tensors[AT + f"moe.{m}"] for n, m in (("low", "before.each"), ("at", "here"), ("at.float", "here"), ("kept", "places"))
    }
    made["at.float"], made["last"] = program.tensors[AT + "moe.here.float"], replace(first, shape=(1,))
    name = {n: AT + f"moe.shared.{n}" for n in made}
    ops = (
        Op("slice", (AT + "moe.place.float",), (name["last"],), (("dim", 0), ("start", 1), ("stop", 2)), "forward"),
        Op("minimum", (AT + "moe.before.each", name["last"]), (name["low"],), (), "forward"),
        Op("eq", (name["low"], AT + "moe.place.float"), (name["at"],), (), "forward"),
        Op("float", (name["at"],), (name["at.float"],), (), "forward"),
        Op("mul", (AT + "moe.wanted.each", name["at.float"]), (name["kept"],), (), "forward"),
    )
    tensors = {**program.tensors, **{name[n]: t for n, t in made.items()}}
    return replace(program, ops=(*program.ops[: at + 1], *ops, *program.ops[at + 1 :]), tensors=tensors)


def overflowing(output: str, *names: str) -> Change:
    """An op that puts tokens without a place into the last one."""

    def apply(plan: Plan) -> Plan:
        return inputs("pp0", AT + output, *(AT + n for n in names))(in_program("pp0", with_last_place)(plan))

    return apply


BUGS: dict[str, tuple[str, Change]] = {
    # bug: (the wrong tensor, the change)
    "tokens without a place overwrite the last one": (
        AT + "moe.shared.at.float",
        overflowing("moe.sent.rows", "moe.shared.kept", "moe.input"),
    ),
    "gradient of dropped tokens kept": (
        AT + "moe.shared.at.float",
        overflowing("moe.input.grad.3", "moe.shared.kept", "moe.input", "moe.sent.rows.grad"),
    ),
    "gradient of dropped weights kept": (
        AT + "moe.shared.at.float",
        overflowing("moe.weights.input.grad", "moe.weights.input", "moe.shared.kept", "moe.down.rows", "moe.routed.part.grad"),
    ),
    "counted along experts": (AT + "moe.count", attrs("pp0", AT + "moe.count", dim=2)),
    "the token itself counted": (AT + "moe.before.each", inputs("pp0", AT + "moe.before.each", AT + "moe.count")),
    "answers brought back in the other order": (AT + "moe.returned", turned(AT + "moe.returned")),
}


@pytest.mark.parametrize("bug", BUGS)
def test_bug_is_found(bug: str) -> None:
    tensor, change = BUGS[bug]
    logical, plan = base()
    report = evaluated(logical, change(plan))
    assert report.verdict == "REFUTED", report.reason
    assert report.place is not None
    assert report.place.tensor == tensor
    assert tensor in edited(plan, change(plan))


@pytest.mark.parametrize("capacity", [None, 3], ids=["nothing dropped", "one place more"])
def test_another_capacity_is_refuted(capacity: int | None) -> None:
    report = verify(deepseek_step(FEW), deepseek_plan(replace(FEW, capacity=capacity), HOW), points=1)
    assert report.verdict == "REFUTED", report.reason


def test_places_for_all_tokens_drop_none() -> None:
    """Never refuted: as many places as positions, or more, are no capacity at all."""
    for places in (6, 7):
        report = evaluated(deepseek_step(replace(FEW, capacity=places)), deepseek_plan(replace(FEW, capacity=None), HOW), points=1)
        assert {o.status for o in report.obligations} == {"agreed"}, report.reason


def test_no_places_are_refused() -> None:
    with pytest.raises(BuildError, match="1 place or more"):
        deepseek_step(replace(FEW, capacity=0))
