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
    as_json: AsJson = False,
) -> int:
    """Real bugs of distributed training, each as a right and a wrong plan: verdicts, and explanations against what is expected."""
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
