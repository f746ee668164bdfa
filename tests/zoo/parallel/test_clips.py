"""Gradients that are not clipped, in all language models of the zoo: refuted, and the product that is missing is named.

At many random points the norm is below its bound, and what is clipped equals what is not.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from operator import itemgetter
from typing import Any

import pytest

from trainverify.graph.plan import Plan
from trainverify.graph.program import Op, Program
from trainverify.verdicts import verify
from trainverify.zoo import gpt, llama
from trainverify.zoo.parallel import Degrees, gpt_plan, gpt_step, llama_plan, llama_step
from trainverify.zoo.recipes import NAMES, Wish
from trainverify.zoo.tiny import rebuilt

CLIPPED = ".clipped"
HOW = {
    "Llama": Degrees(dp=2),
    "GPT": Degrees(dp=2, pp=2, microbatches=2),
    "DeepSeek": Degrees(dp=2, ep=2),
}
MODELS = [name for name, family in NAMES.items() if family.title in HOW]
LAYERS = {"deepseek-671b": 4}  # three are dense


def wish(model: str) -> Wish:
    return Wish(model, HOW[NAMES[model].title], layers=LAYERS.get(model, 2))


@cache
def base(model: str) -> tuple[Program, Plan]:
    return wish(model).build()


def without(program: Program, of: Callable[[str], bool]) -> Program:
    """Gradients of some parameters are passed on as they are."""

    def change(op: Op) -> Op:
        name = op.outputs[0] if op.outputs else ""
        return replace(op, name="identity", inputs=op.inputs[:1]) if name.endswith(CLIPPED) and of(name.removesuffix(CLIPPED)) else op

    return replace(program, ops=tuple(map(change, program.ops)))


def unclipped(plan: Plan, of: Callable[[str], bool]) -> Plan:
    changed = replace(plan, templates=tuple(replace(t, program=without(t.program, of)) for t in plan.templates))
    assert changed != plan
    return changed


@cache
def kinds(model: str) -> list[str]:
    """One parameter of each kind: names that differ in numbers only are one."""
    names = [o.removesuffix(CLIPPED) for t in base(model)[1].templates for op in t.program.ops for o in op.outputs if o.endswith(CLIPPED)]
    return list({re.sub(r"\d+", "#", n): n for n in reversed(names)}.values())


def shared() -> list[tuple[str, str]]:
    """Every kind of every family, each in one of its models."""
    found: list[tuple[str, str]] = []
    for title in HOW:
        models = [m for m in MODELS if NAMES[m].title == title]
        every = sorted({re.sub(r"\d+", "#", n) for m in models for n in kinds(m)})
        for i, kind in enumerate(every):
            order = models[i % len(models) :] + models[: i % len(models)]
            found.append(next((m, n) for m in order for n in kinds(m) if re.sub(r"\d+", "#", n) == kind))
    return found


def some(cases: Sequence[Any], first: Callable[[Any], str], most: int) -> list[Any]:
    """So many cases of each family in the suite, the others among the long tests."""
    seen: Counter[str] = Counter()
    found = []
    for case in cases:
        seen[title := NAMES[first(case)].title] += 1
        found.append(case if seen[title] <= most else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.long))
    return found


@pytest.mark.parametrize("model", some(MODELS, str, 1))
def test_no_gradient_is_clipped(model: str) -> None:
    """Expected: REFUTED, naming the first product that is missing, and how many others are."""
    logical, plan = base(model)
    report = verify(logical, unclipped(plan, lambda name: True), also=rebuilt(wish(model), lambda p: unclipped(p, lambda name: True)))
    assert report.verdict == "REFUTED", (report.reason, report.notes)
    assert report.place is not None
    assert report.place.tensor.endswith(CLIPPED), report.place
    assert report.place.cause.startswith("identity where a product with clip_factor is needed, as in "), report.place.cause


@pytest.mark.parametrize(("model", "parameter"), some(shared(), itemgetter(0), 2))
def test_one_gradient_is_not_clipped(model: str, parameter: str) -> None:
    """Expected: REFUTED, naming the product that is missing."""
    logical, plan = base(model)

    def change(right: Plan) -> Plan:
        return unclipped(right, lambda name: name == parameter)

    report = verify(logical, change(plan), also=rebuilt(wish(model), change))
    assert report.verdict == "REFUTED", (report.reason, report.notes)
    assert report.place is not None
    assert report.place.tensor == parameter + CLIPPED, report.place


# -- at small sizes, as they are: norms are below 1 at all random points ---------------------------------------------------

LLAMA = llama.Config(layers=1, hidden=12, heads=6, kv_heads=2, ffn=10, vocabulary=14, sequence=5, batch=4)
GPT = gpt.Config(layers=2, hidden=12, heads=6, ffn=10, vocabulary=14, sequence=5, batch=4)
SMALL: dict[str, tuple[Program, Plan]] = {
    "llama": (llama_step(LLAMA, clip=100.0), llama_plan(LLAMA, Degrees(dp=2), clip=100.0)),
    "gpt": (gpt_step(GPT, clip=100.0), gpt_plan(GPT, Degrees(dp=2, pp=2, microbatches=2), clip=100.0)),
}


@pytest.mark.parametrize("name", list(SMALL))
def test_clips_that_no_random_point_reaches(name: str) -> None:
    """Expected: the right plan PROVED on both sides of the clip; a plan that clips nothing, and one that clips where the logical program
    does not, REFUTED."""
    logical, plan = SMALL[name]
    right = verify(logical, plan)
    assert right.verdict == "PROVED", right.reason
    assert not [n for n in right.notes if n.startswith("never")]
    missing = verify(logical, unclipped(plan, lambda name: True))
    assert missing.verdict == "REFUTED", missing.reason
    assert missing.place is not None
    assert missing.place.tensor.endswith(CLIPPED)
    assert "clip_factor" in missing.place.cause
    extra = verify(without(logical, lambda name: True), plan)
    assert extra.verdict == "REFUTED", extra.reason
    assert extra.place is not None
    assert extra.place.tensor.endswith(CLIPPED)
    assert "product with clip_factor" in extra.place.cause
    for report in (missing, extra):
        assert any(n.startswith("counterexample: random inputs of seed 0, ") for n in report.notes)
