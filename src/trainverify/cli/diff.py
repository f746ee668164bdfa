"""`trainverify diff`: what changed between two plans, programs or reports."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from trainverify import files
from trainverify.graph.plan import Plan, PlanError
from trainverify.graph.program import Program
from trainverify.refusal import Refused
from trainverify.report.difference.change import Change
from trainverify.report.difference.plans import plan_changes, program_changes
from trainverify.report.difference.reports import is_report, report_changes
from trainverify.terminal import AsJson, emit, guarded, out

_SIGNS = {"added": ("+", "green"), "removed": ("-", "red"), "changed": ("~", "yellow")}


@guarded
def command(
    old: Annotated[Path, typer.Argument(metavar="OLD", help="A plan, a program, or a report of --json; - is standard input.")],
    new: Annotated[Path, typer.Argument(metavar="NEW", help="The same kind of file, as it is now.")],
    as_json: AsJson = False,
) -> int:
    """What changed between two plans, programs or reports: exit code 0 if nothing, 1 if something."""
    if str(old) == str(new) == "-":
        raise Refused("standard input can be one of the two files")
    kind, changes = compared(*((p, files.read_any(p, is_report)) for p in (old, new)))
    code = 1 if changes else 0
    if as_json:
        return emit("diff", code, kind=kind, changes=[c.json() for c in changes])
    show(changes)
    if not changes:
        out.print(f"no difference between these two {kind}s", markup=False)
    return code


def compared(old: tuple[Path, Any], new: tuple[Path, Any]) -> tuple[str, list[Change]]:
    a, b = old[1], new[1]
    try:
        if isinstance(a, Plan) and isinstance(b, Plan):
            return "plan", plan_changes(a, b)
        if isinstance(a, Program) and isinstance(b, Program):
            return "program", program_changes(a, b)
    except PlanError as error:
        raise Refused(f"{new[0]}: {error}") from error
    if isinstance(a, dict) and isinstance(b, dict):
        return "report", report_changes(a, b)
    raise Refused(f"{old[0]} is a {_kind(a)}, {new[0]} is a {_kind(b)}")


def _kind(content: Any) -> str:
    return "plan" if isinstance(content, Plan) else "program" if isinstance(content, Program) else "report"


def show(changes: Sequence[Change]) -> None:
    """By place; of something that changed the old text and the new one below each other, of several that differ in numbers the first."""
    alike: dict[tuple[str, ...], list[Change]] = {}
    for c in changes:
        alike.setdefault((c.where, c.what, _pattern(c.old), _pattern(c.new)), []).append(c)
    for where in dict.fromkeys(c.where for c in changes):
        out.print(f"[bold]{escape(where)}[/]")
        for same in (same for same in alike.values() if same[0].where == where):
            c = same[0]
            sign, colour = _SIGNS[c.kind]
            more = f"  [dim](and {len(same) - 1} more like it)[/]" if len(same) > 1 else ""
            out.print(f"  [{colour}]{sign}[/] {c.what} {escape(str(c.new if c.old is None else c.old))}{more}")
            if c.old is not None and c.new is not None:
                out.print(f"    {' ' * len(c.what)} {escape(c.new)}")


def _pattern(text: str | None) -> str:
    """Text without its numbers, and lists of numbers without their length."""
    return "-" if text is None else re.sub(r"(#, )+#", "#", re.sub(r"\d+", "#", text))
