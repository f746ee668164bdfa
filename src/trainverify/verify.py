"""`verify`: validate, then compare the plan with the logical program, obligation by obligation.

PROVED comes from a proof engine only. Random evaluation can refute, and it can agree; agreeing is UNKNOWN.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from trainverify.axes.reduction import NotABoundary
from trainverify.check import validate
from trainverify.check.findings import Finding
from trainverify.domains.numeric import NUMERIC
from trainverify.evaluate.compare import Difference, Suspect, decide, suspects
from trainverify.evaluate.locate import Place, locate
from trainverify.evaluate.run import NotComputed, elements, random_inputs, run_logical, run_plan
from trainverify.evaluate.small import Small, SmallBuilder
from trainverify.graph.communication import Communication, schedule
from trainverify.graph.lineage import Layout, Placements
from trainverify.graph.mesh import Mesh
from trainverify.graph.obligations import Holding, Obligation, obligations
from trainverify.graph.plan import Plan, Template, units
from trainverify.graph.program import Output, Program
from trainverify.ops import OPS
from trainverify.ops.table import OpTable
from trainverify.report import Report, Shown

MAX_ELEMENTS = 40_000_000  # of all tensors of all ranks together, in one evaluation
NO_ENGINE = "no proof engine yet"

Progress = Callable[[str], None]


def _silent(text: str) -> None:
    pass


def single(program: Program) -> Plan:
    """A program as a plan on one device: every source lives there whole."""
    lineage = tuple(Layout(n, n, Placements(())) for n in program.sources)
    return Plan(program.name, Mesh(one=1), (Template(program, (0,)),), {}, lineage)


def verify(
    logical: Program,
    plan: Plan | Program,
    ops: OpTable = OPS,
    points: int = 3,
    seed: int = 0,
    progress: Progress = _silent,
) -> Report:
    """Is the plan's training step the logical program's?"""
    began = time.perf_counter()
    if isinstance(plan, Program):
        plan = single(plan)
    subject = f"{plan.name} on {plan.mesh} against {logical.name}"
    report = replace(_verify(logical, plan, ops, points, seed, progress, subject), assumptions=assumptions(logical, plan))
    return replace(report, seconds=time.perf_counter() - began)


def _verify(logical: Program, plan: Plan, ops: OpTable, points: int, seed: int, progress: Progress, subject: str) -> Report:
    progress("checking the plan")
    findings = tuple(validate(logical, plan, ops))
    errors = [f for f in findings if f.severity == "error"]
    if errors:
        return Report("INVALID", f"{len(errors)} finding{'s' if len(errors) > 1 else ''}: {errors[0].code}", subject, findings)
    unsupported = [f for f in findings if f.severity == "unsupported"]
    if unsupported:
        return Report("UNKNOWN", f"unsupported: {unsupported[0].message}", subject, findings)
    parts = units(plan)
    wanted, missing = obligations(logical, plan, parts)
    if missing or not wanted:
        return Report("INVALID", missing[0].reason if missing else "no obligations", subject, findings)
    wanted += declared(logical, plan, wanted)
    progress("inferring axes")
    talk = Communication(plan, parts, ops)
    order = schedule(talk)
    try:
        small = SmallBuilder(logical, plan, ops, talk, order).build(wanted)
    except NotABoundary as error:
        reason = f"no small sizes keep the structure of the plan: {error}"
        return Report("UNKNOWN", reason, subject, findings, _shown(wanted, "not compared"))
    if elements(small) > MAX_ELEMENTS:
        why = f": {small.clashes[0].text} ({small.clashes[0].where})" if small.clashes else ""
        return Report("UNKNOWN", f"too large to evaluate{why}", subject, findings, _shown(wanted, "not compared"))
    return _evaluate(small, logical, plan, ops, talk, wanted, points, seed, progress, subject, findings)


def _evaluate(
    small: Small,
    logical: Program,
    plan: Plan,
    ops: OpTable,
    talk: Communication,
    wanted: Sequence[Obligation],
    points: int,
    seed: int,
    progress: Progress,
    subject: str,
    findings: tuple[Finding, ...],
) -> Report:
    compared = 0
    rounding: list[Suspect] = []
    undecided: list[Suspect] = []
    for point in range(seed, seed + points):
        progress(f"evaluating point {point - seed + 1} of {points}")
        try:
            wrong, n = compare_at(small, plan, wanted, point)
        except NotComputed as error:
            return Report("UNKNOWN", f"the plan could not be run: {error}", subject, findings, _shown(wanted, "not compared"))
        compared += n
        for suspect in wrong:
            progress(f"deciding {suspect.obligation} on rank {suspect.rank}")
            decision, difference = decide(small, plan.lineage, suspect, random_inputs(small, point), point)
            if decision == "different" and difference is not None:
                return _refuted(small, logical, plan, ops, talk, wanted, wrong, difference, progress, subject, findings)
            if decision == "literal rounding":
                rounding.append(suspect)
            elif decision == "undecided":
                undecided.append(suspect)
        if rounding or undecided:
            break
    if rounding:
        reason = f"literal rounding: {rounding[0].obligation} differs only by what one unit in the last place of a float literal explains"
        return Report("UNKNOWN", reason, subject, findings, _shown(wanted, "agreed", {s.obligation: "literal rounding" for s in rounding}))
    if undecided:
        reason = (
            f"undecided: {undecided[0].obligation} on rank {undecided[0].rank} differs numerically, but no enclosure separates the values"
        )
        return Report("UNKNOWN", reason, subject, findings, _shown(wanted, "agreed", {s.obligation: "undecided" for s in undecided}))
    note = f"{compared} comparisons of {len(wanted)} obligations" + (" at reduced sizes" if small.reduced else " at full size")
    return Report("UNKNOWN", f"{NO_ENGINE}; agreed on {points} random points", subject, findings, _shown(wanted, "agreed"), notes=(note,))


def compare_at(small: Small, plan: Plan, wanted: Sequence[Obligation], point: int) -> tuple[list[Suspect], int]:
    """Both programs on one random point: what is not clearly equal, in the order of the logical program."""
    inputs = random_inputs(small, point)
    return suspects(small, wanted, run_logical(small, inputs, NUMERIC), run_plan(small, plan.lineage, inputs, NUMERIC))


def _refuted(
    small: Small,
    logical: Program,
    plan: Plan,
    ops: OpTable,
    talk: Communication,
    wanted: Sequence[Obligation],
    wrong: list[Suspect],
    difference: Difference,
    progress: Progress,
    subject: str,
    findings: tuple[Finding, ...],
) -> Report:
    if small.reduced:
        progress("trying the other reading of literals")
        other = SmallBuilder(logical, plan, ops, talk, schedule(talk)).build(wanted, scale_literals=True)
        still, _ = compare_at(other, plan, wanted, difference.seed)
        if not still:
            reason = "a difference that depends on how literals shrink with the sizes; no verdict at reduced sizes"
            return Report("UNKNOWN", reason, subject, findings, _shown(wanted, "agreed"))
    progress("locating the first wrong tensor")
    place = find(small, plan, wrong, difference)
    bad = {s.obligation: "different" for s in wrong}
    reason = f"{difference.obligation} differs on rank {difference.rank}; first wrong tensor: {place.tensor} on rank {place.rank}"
    note = f"counterexample: random inputs of seed {difference.seed}" + (", at reduced sizes" if small.reduced else "")
    return Report("REFUTED", reason, subject, findings, _shown(wanted, "agreed", bad), difference, place, notes=(note,))


def find(small: Small, plan: Plan, wrong: Sequence[Suspect], difference: Difference) -> Place:
    inputs = random_inputs(small, difference.seed)
    return locate(small, plan.mesh, wrong, run_logical(small, inputs, NUMERIC), run_plan(small, plan.lineage, inputs, NUMERIC))


def declared(logical: Program, plan: Plan, wanted: Sequence[Obligation]) -> list[Obligation]:
    """Lineage of intermediate tensors is a claim: it becomes an obligation of its own."""
    held = {h.layout for o in wanted for h in o.holdings}
    claims: dict[str, list[Holding]] = {}
    for lay in plan.lineage:
        if lay.logical not in logical.sources and lay not in held:
            claims.setdefault(lay.logical, []).append(Holding(lay, lay.holders(plan.mesh)))
    return [Obligation(Output(name, "declared"), tuple(holdings)) for name, holdings in claims.items()]


def _shown(wanted: Sequence[Obligation], status: str, special: dict[Obligation, str] | None = None) -> tuple[Shown, ...]:
    return tuple(
        Shown(
            str(o),
            o.output.tensor,
            len({r for h in o.holdings for r in h.ranks}),
            (special or {}).get(o, status),
            "evaluation",
            "random points",
        )
        for o in wanted
    )


def assumptions(logical: Program, plan: Plan) -> tuple[str, ...]:
    """What no plan can show: printed with every verdict."""
    found = ["arithmetic is that of real numbers: rounding, kernels and the network are out of scope"]
    replicas = sorted({lay.logical for lay in plan.lineage if lay.logical in (*logical.parameters, *logical.state)})
    if replicas and plan.mesh.size > 1:
        found.append("before the step all copies of a parameter or state element are equal on the ranks that hold it")
    for lay in plan.lineage:
        if lay.logical in logical.inputs and isinstance(plan, Plan) and plan.mesh.size > 1:
            found.append(f"the batch arrives as {lay}")
    found += [f"input {n} holds {d}" for n, d in logical.domains.items()]
    found.append(f"the loss is the logical program's, as {logical.name!r} writes it")
    return tuple(found)
