"""The smallest example of a refutation: sizes, inputs, and the outputs that differ."""

from __future__ import annotations

from collections.abc import Iterator

from trainverify.axes.reduction import NotABoundary
from trainverify.axes.system import System
from trainverify.evaluate.compare import needed_for
from trainverify.evaluate.counting import counting
from trainverify.evaluate.example import Example, simplest
from trainverify.evaluate.moved import PointName
from trainverify.evaluate.rank_values import told_apart
from trainverify.evaluate.run import elements, random_inputs
from trainverify.evaluate.sample import ALL, RANKS, sampled
from trainverify.evaluate.small import Small, TooMuch, shrink_system
from trainverify.graph.moves import without_moves
from trainverify.graph.obligations import Obligation, obligations
from trainverify.refusal import Refused
from trainverify.report import Compared, Report
from trainverify.report.exported.pytest_file import Earlier
from trainverify.report.html import Entry
from trainverify.verdicts import budgets
from trainverify.verdicts.prepared import declared, related

MOST = 300_000  # elements of all tensors of all ranks, up to which an example is written out
SEARCHED = 5_000  # ops of both programs, up to which an example is looked for without being asked for
WHOLE = 20_000  # at the sizes of the plan


def smallest(report: Report) -> Example:
    """An example in which the obligation of a refuted plan's report differs; Refused if there is none of readable size."""
    if report.compared is None or report.difference is None:
        raise Refused(f"{report.verdict}: there is no counterexample to export")
    system, wanted = prepared(report.compared)
    target = next((o for o in wanted if str(o) == str(report.difference.obligation)), None)
    lineage = system.plan.lineage
    for small in sizes(system):
        for point in points(report.difference.seed):
            found = simplest(small, lineage, wanted, target, random_inputs(small, point))
            if found is not None:
                return found
    raise Refused("the difference does not show in an example small enough to be written out")


def entry_of(report: Report, name: str = "") -> Entry:
    """A report for a page, with an example if the plan is small enough to look for one."""
    found: Example | None = None
    about = report.compared
    if report.verdict == "REFUTED" and about is not None and about.plan.size <= RANKS and _ops(about) <= SEARCHED:
        try:
            found = smallest(report)
        except Refused:
            found = None
    return Entry(report, name, found)


def _ops(about: Compared) -> int:
    return len(about.logical.ops) + sum(len(t.program.ops) for t in about.plan.templates)


def of_earlier(compared: Compared, given: Earlier) -> Example:
    """The same outputs of another plan on the same inputs; Refused if its sizes are others."""
    system, wanted = prepared(compared)
    some = [o for o in wanted if str(o) in given.obligations]
    if not some:
        raise Refused(f"the plan has none of the outputs of that test: {', '.join(given.obligations)}")
    shapes = {n: v.shape for n, v in given.inputs.items()}
    for small in sizes(system, every=True):
        if all(shapes.get(n) == small.shapes[n] for n in small.logical.sources):
            kinds = {n: small.logical.tensors[n].kind for n in small.logical.sources}
            values = {n: v.astype({"real": float, "int": int, "bool": bool}[kinds[n]]) for n, v in given.inputs.items() if n in kinds}
            return Example(needed_for(small, some), system.plan.lineage, tuple(some), values)
    raise Refused("the inputs of that test have other sizes than this plan and its logical program; export one without --counterexample")


def prepared(compared: Compared) -> tuple[System, list[Obligation]]:
    """Both programs together, and what is to be compared."""
    plan = without_moves(compared.plan, compared.ops)
    parts = told_apart(plan, compared.ops)
    wanted, _ = obligations(compared.logical, plan, parts)
    wanted += declared(compared.logical, plan, parts, wanted)
    return related(compared.logical, plan, compared.ops, parts, wanted), wanted


def points(first: PointName) -> list[PointName]:
    """The point of the report (unless it is the solver's), then some random ones."""
    return ([] if isinstance(first, int) and first < 0 else [first]) + [n for n in range(3) if n != first]


def sizes(system: System, every: bool = False) -> Iterator[Small]:
    """From small to large: reduced, where no literal counts what was reduced (or wherever, with `every`), then as they are."""
    kept = ALL if system.plan.size <= RANKS else sampled(system, above=0)
    for base, alternate in ((2, False), (2, True), (3, True)):
        try:
            small = shrink_system(system, base, alternate, kept, MOST)
        except (NotABoundary, TooMuch):
            continue
        if every or not (small.reduced or kept) or counting(system, small) is None:
            yield small
    try:
        small = shrink_system(system, base=budgets.FULL, most=WHOLE)
    except (NotABoundary, TooMuch):
        return
    if elements(small) <= WHOLE:
        yield small
