"""Findings of the validator as text or JSON, and the exit code that they call for."""

from __future__ import annotations

from collections.abc import Sequence

from rich.markup import escape

from trainverify.check import Finding
from trainverify.report import finding_json
from trainverify.terminal import emit, out


def show_findings(findings: list[Finding], as_json: bool, subject: str, notes: Sequence[str] = ()) -> int:
    """Print findings; the exit code they call for."""
    code = 1 if any(f.severity == "error" for f in findings) else 3 if any(f.severity == "unsupported" for f in findings) else 0
    verdict, colour = {0: ("VALID", "green"), 1: ("INVALID", "red"), 3: ("UNSUPPORTED", "yellow")}[code]
    if as_json:
        return emit("validate", code, verdict=verdict, subject=subject, findings=[finding_json(f) for f in findings], notes=list(notes))
    out.print(f"[bold {colour}]{verdict}[/] {escape(subject)}")
    for f in findings:
        out.print("  " + str(f).replace("\n", "\n  "), markup=False)
    for n in notes:
        out.print(n, markup=False, style="dim")
    return code
