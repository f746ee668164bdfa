"""`trainverify bugs`: the corpus of real bugs, run and compared with what is expected."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from trainverify.bugs.cases import CASES
from trainverify.bugs.run import Outcome, counts, run_cases
from trainverify.refusal import Refused
from trainverify.terminal import AsJson, emit, guarded, out, progress

COLUMNS = ("id", "title", "right", "wrong", "cause", "tensor", "line", "reference", "what goes wrong")


@guarded
def command(
    ids: Annotated[list[str] | None, typer.Argument(metavar="[ID…]", help="Some cases, as B06; without it all.")] = None,
    zoo: Annotated[bool, typer.Option("--zoo", help="The same bugs planted in plans of the zoo at real widths.")] = False,
    several: Annotated[bool, typer.Option("--several", help="With --zoo: one mistake at 2, at 5 and at all sites.")] = False,
    as_json: AsJson = False,
) -> int:
    """Real bugs of distributed training, each as a right and a wrong plan: verdicts, and explanations against what is expected."""
    if several and not zoo:
        raise Refused("--several goes with --zoo")
    if zoo:
        return in_zoo(ids or [], several, as_json)
    known = {c.id: c for c in CASES}
    if unknown := [i for i in ids or () if i not in known]:
        raise Refused(f"{unknown[0]}: no such case; they are {CASES[0].id} to {CASES[-1].id}")
    with progress(as_json) as tell:
        outcomes = list(run_cases([known[i] for i in ids] if ids else CASES, tell))
    code = 0 if all(o.verdicts_hold for o in outcomes) else 1
    if as_json:
        return emit("bugs", code, cases=[o.json() for o in outcomes], **counts(outcomes))
    wide = Console(width=None if out.is_terminal else 1000, highlight=False, file=sys.stdout)
    wide.print(table(outcomes))
    out.print("; ".join(f"{name} {number} of {len(outcomes)}" for name, number in counts(outcomes).items()))
    return code


def in_zoo(ids: list[str], several: bool, as_json: bool) -> int:
    from trainverify.bugs.zoo_cases import PLANTED, SYSTEMATIC
    from trainverify.bugs.zoo_run import run_zoo_cases, zoo_counts

    cases = SYSTEMATIC if several else PLANTED
    known = sorted({c.id for c in cases}, key=lambda i: int(i[1:]))
    if unknown := [i for i in ids if i not in known]:
        raise Refused(f"{unknown[0]}: not planted in the zoo; those that are: {', '.join(known)}")
    with progress(as_json) as tell:
        outcomes = list(run_zoo_cases([c for c in cases if not ids or c.id in ids], tell))
    code = 0 if all(o.verdict_holds for o in outcomes) else 1
    counts = zoo_counts(outcomes)
    if as_json:
        return emit("bugs", code, planted=[o.json() for o in outcomes], **counts)
    made = Table("id", "model", "mesh", "sites", "verdict", "cause", "tensor", "named", box=None, pad_edge=False)
    for o in outcomes:
        cause = _compared(o.found.cause and o.found.cause.name, (o.case.cause.name,), o.cause_holds)
        tensor = _compared(o.found.tensor, o.sites[0][:1], o.tensor_holds)
        named = sum(not o.named.isdisjoint(site) for site in o.sites)
        verdict = _verdict(o.verdict, o.verdict_holds)
        made.add_row(o.case.id, o.case.model.name, escape(o.mesh), str(len(o.sites)), verdict, cause, tensor, str(named))
    Console(width=None if out.is_terminal else 1000, highlight=False, file=sys.stdout).print(made)
    out.print("; ".join(f"{name} {number} of {len(outcomes)}" for name, number in counts.items()))
    return code


def table(outcomes: Sequence[Outcome]) -> Table:
    """One row for each case; what is not as expected is followed by what is."""
    from trainverify.bugs.run import shown_line

    made = Table(*COLUMNS, box=None, pad_edge=False)
    for o in outcomes:
        case, found = o.case, o.found
        made.add_row(
            case.id,
            escape(case.title),
            _verdict(o.right, o.right == "PROVED"),
            _verdict(o.wrong, o.wrong in ("REFUTED", "INVALID")),
            _compared(found.cause and found.cause.name, (case.cause.name,), o.cause_holds),
            _compared(found.tensor, case.tensors, o.tensor_holds),
            _compared(found.line and shown_line(found.line), sorted(map(shown_line, case.lines())), o.line_holds),
            escape(case.reference),
            escape(case.mechanism),
        )
    return made


def _verdict(verdict: str, holds: bool) -> str:
    return f"[{'green' if holds else 'bold red'}]{verdict}[/]"


def _compared(found: str | None, expected: Sequence[str], holds: bool) -> str:
    text = escape(found or "-")
    return f"[green]{text}[/]" if holds else f"[yellow]{text}[/], not {escape(' or '.join(expected))}"
