"""Bugs planted at random in a plan of the zoo: `python -m tools.planted_bugs llama3-70b --dp 16 --tp 8 --pp 4 --count 20 [--layers 4]`.

Prints what was planted and what the report says, and counts in how many the tensor, the ranks and the cause are the planted ones, and in
how many a healthy tensor is named: one that the changed op does not reach. `--tiny` takes tiny widths in place of the published ones.
Every change is one that matters: an op between inputs and outputs, changed on all ranks of its program, or a local op on one rank.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Final

from trainverify.bugs import plant
from trainverify.bugs.run import explanation
from trainverify.explain.cause import Cause
from trainverify.graph.plan import Edit, Plan, Template
from trainverify.graph.program import Op
from trainverify.verdicts import verify
from trainverify.zoo.parallel.degrees import Degrees
from trainverify.zoo.recipes import Wish
from trainverify.zoo.tiny import rebuilt, tiny


@dataclass(frozen=True)
class Kind:
    cause: Cause
    change: plant.Change
    fits: Callable[[Op], bool]
    alone: bool = False  # also on one rank


def _sums(op: Op) -> bool:
    return op.name == "all_reduce" and op.get("op", "sum") == "sum"


def _values(op: Op) -> bool:
    return op.name in ("linear", "rms_norm", "mul", "silu") or (op.name == "div" and op.phase == "optimizer")


def _gradients(op: Op) -> bool:
    return op.name == "add" and op.phase == "backward"


KINDS: Final = (
    Kind(Cause.MISSING_REDUCTION, plant.left_out, _sums),
    Kind(Cause.EXTRA_REDUCTION, plant.twice, _sums),
    Kind(Cause.WRONG_REDUCTION, plant.with_attrs(op="avg"), _sums),
    Kind(Cause.WRONG_FACTOR, plant.scaled(Fraction(1, 2)), _values, alone=True),
    Kind(Cause.WRONG_FACTOR, plant.scaled(2), _values, alone=True),
    Kind(Cause.LOST_CONTRIBUTION, plant.only(1), _gradients, alone=True),
    Kind(Cause.COUNTED_TWICE, plant.once_more(0), _gradients, alone=True),
    Kind(Cause.MISSING_UPDATE, plant.stays, lambda op: op.name == "adamw", alone=True),
    Kind(Cause.OPTIMIZER_SETTING, plant.with_attrs(step=7), lambda op: op.name == "adamw", alone=True),
)


@dataclass(frozen=True)
class Planted:
    plan: Plan
    cause: Cause
    site: plant.Site
    ranks: tuple[int, ...]
    reached: frozenset[str]  # tensors that may be wrong, by name
    text: str


def planted(plan: Plan, rng: random.Random, outputs_only: bool = False) -> Planted:
    """One change of one op; of `outputs_only` one that a single output is made by."""
    while True:
        kind, template = rng.choice(KINDS), rng.choice(plan.templates)
        able = [i for i, op in enumerate(template.program.ops) if kind.fits(op)]
        if outputs_only:
            able = [i for i in able if template.program.ops[i].name == "adamw"]
        if not able:
            continue
        index = rng.choice(able)
        op = template.program.ops[index]
        made = kind.change(plant.Spot(plan, template, op, 0))
        rank = rng.choice(template.ranks) if kind.alone and rng.random() < 0.5 else None
        site = (op.outputs[0], *made.tensors, *made.also)
        reached = _after(plan, {op.outputs[0]})
        where = "all ranks" if rank is None else f"rank {rank}"
        text = f"{template.program.name}, {where}: {op.outputs[0]} = {op.name}: {kind.cause.name}"
        changed = _on_one(plan, template, index, made, rank) if rank is not None else _on_all(plan, template, index, made)
        return Planted(changed, kind.cause, site, template.ranks if rank is None else (rank,), frozenset({*site, *reached}), text)


def _on_all(plan: Plan, template: Template, index: int, made: plant.Changed) -> Plan:
    program = template.program
    ops = (*program.ops[:index], *made.ops, *program.ops[index + 1 :])
    program = replace(program, ops=ops, tensors={**program.tensors, **made.tensors})
    new = replace(template, program=program, bindings={**template.bindings, **made.columns})
    return replace(plan, templates=tuple(new if t is template else t for t in plan.templates), groups={**plan.groups, **made.groups})


def _on_one(plan: Plan, template: Template, index: int, made: plant.Changed, rank: int) -> Plan:
    return replace(plan, edits=(*plan.edits, Edit(rank, (index,), made.ops, made.tensors)))


def _after(plan: Plan, names: set[str]) -> set[str]:
    """Tensors of any program that may depend on these; whatever is received may."""
    found = set(names)
    sent = False
    for _ in range(2):
        for t in plan.templates:
            for op in t.program.ops:
                if any(i in found for i in op.inputs) or (sent and op.name == "recv"):
                    found.update(op.outputs)
                    sent |= op.name == "send"
    return found


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    for name, least in (("dp", 1), ("tp", 1), ("pp", 1), ("microbatches", 1), ("count", 20), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=least)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--outputs", action="store_true", help="only changes that make one output wrong")
    a = parser.parse_args(given)
    wish = Wish(a.model, Degrees(dp=a.dp, tp=a.tp, pp=a.pp, microbatches=a.microbatches), layers=a.layers)
    small = tiny(wish) if a.tiny else None
    logical, right = wish.build() if small is None else (small.logical, small.plan)
    counts = dict.fromkeys(("found", "tensor", "ranks", "cause", "healthy"), 0)
    for n in range(a.seed, a.seed + a.count):
        began = time.perf_counter()
        bug = planted(right, random.Random(n), a.outputs)
        also = rebuilt(wish, lambda other, n=n: planted(other, random.Random(n), a.outputs).plan)  # type: ignore[misc]
        report = verify(logical, bug.plan, also=also)
        found = explanation(report)
        rank = None if report.place is None else report.place.rank
        held = {
            "found": report.verdict in ("REFUTED", "INVALID"),
            "tensor": found.tensor in bug.site,
            "ranks": rank in bug.ranks,
            "cause": found.cause is bug.cause,
            "healthy": found.tensor is not None and found.tensor not in bug.reached,
        }
        counts = {k: v + held[k] for k, v in counts.items()}
        marks = "".join(k[0] if h else "-" for k, h in held.items())
        cause = found.cause.name if found.cause else None
        said = f"{report.verdict}: {found.tensor} on rank {rank}, {cause}"
        print(f"{n} {marks} {bug.text}  →  {said} ({time.perf_counter() - began:.1f} s)", flush=True)
        if marks[:4] != "ftrc":
            print(f"    {found.text}", flush=True)
    print("; ".join(f"{k} {v} of {a.count}" for k, v in counts.items()))
    return 0 if counts["found"] == a.count and not counts["healthy"] else 1


if __name__ == "__main__":
    sys.exit(main())
