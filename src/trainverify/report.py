"""Verdicts and reports: what was shown, what was not, under which assumptions; as text and as JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from trainverify.check.findings import CODES, Finding
from trainverify.evaluate.compare import Difference
from trainverify.evaluate.locate import Place
from trainverify.graph.program import Op

Verdict = Literal["PROVED", "PROVED(reduced)", "REFUTED", "INVALID", "UNKNOWN"]
EXIT: Final[dict[str, int]] = {"PROVED": 0, "REFUTED": 1, "INVALID": 1, "UNKNOWN": 3, "PROVED(reduced)": 3}
_COLOURS: Final = {"PROVED": "green", "PROVED(reduced)": "green", "REFUTED": "red", "INVALID": "red", "UNKNOWN": "yellow"}


@dataclass(frozen=True)
class Shown:
    """The state of one obligation."""

    name: str
    tensor: str
    holders: int
    status: str  # "agreed", "different", "proved", "not reached", …
    engine: str
    scope: str


@dataclass(frozen=True)
class Report:
    verdict: Verdict
    reason: str
    subject: str
    findings: tuple[Finding, ...] = ()
    obligations: tuple[Shown, ...] = ()
    difference: Difference | None = None
    place: Place | None = None
    assumptions: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def exit_code(self) -> int:
        return EXIT[self.verdict]

    def json(self) -> dict[str, Any]:
        return {
            "verdict": self.verdict,
            "reason": self.reason,
            "subject": self.subject,
            "exit_code": self.exit_code,
            "findings": [finding_json(f) for f in self.findings],
            "obligations": [vars(o) for o in self.obligations],
            "difference": None if self.difference is None else _difference_json(self.difference),
            "first_wrong": None if self.place is None else _place_json(self.place),
            "assumptions": list(self.assumptions),
            "notes": list(self.notes),
            "seconds": round(self.seconds, 3),
        }

    def print(self, console: Console) -> None:
        colour = _COLOURS[self.verdict]
        console.print(f"[bold {colour}]{self.verdict}[/] {escape(self.subject)}: {escape(self.reason)}")
        for f in self.findings:
            console.print(f"  [{'yellow' if f.severity == 'warning' else 'red'}]{escape(str(f))}[/]", highlight=False)
        if self.difference is not None:
            self._print_difference(console, self.difference)
        if self.obligations:
            console.print(_table(self.obligations))
        if self.assumptions:
            console.print("[bold]Assumed[/], and not shown by this verdict:")
            for a in self.assumptions:
                console.print(f"  - {escape(a)}", highlight=False)
        for n in self.notes:
            console.print(f"[dim]{escape(n)}[/]", highlight=False)

    def _print_difference(self, console: Console, d: Difference) -> None:
        console.print(f"  [bold]{escape(str(d.obligation))}[/] differs on rank {d.rank}:", highlight=False)
        console.print(f"    {d.layout.local} on rank {d.rank}: got {d.got}", highlight=False, markup=False)
        console.print(f"    {d.layout.logical}{list(d.index)}: want {d.want}", highlight=False, markup=False)
        if self.place is not None:
            p = self.place
            console.print(f"  [bold]first wrong tensor[/]: {escape(p.tensor)} on rank {p.rank}: {escape(p.cause)}", highlight=False)
            console.print(f"    plan:    {_op_line(p.op)}", highlight=False, markup=False)
            console.print(f"    logical: {_op_line(p.logical_op)}", highlight=False, markup=False)


def _table(obligations: tuple[Shown, ...]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("obligation", "tensor", "ranks", "status", "engine", "scope"):
        table.add_column(column, justify="right" if column == "ranks" else "left")
    for o in obligations:
        colour = "red" if o.status == "different" else "green" if o.status == "proved" else "yellow"
        table.add_row(escape(o.name), escape(o.tensor), str(o.holders), f"[{colour}]{o.status}[/]", o.engine, o.scope)
    return table


def _op_line(op: Op | None) -> str:
    return "-" if op is None else f"{op}" + (f"  ({op.source})" if op.source else "")


def _op_json(op: Op | None) -> dict[str, Any] | None:
    return None if op is None else {"op": op.name, "text": str(op), "source": str(op.source) if op.source else None}


def finding_json(f: Finding) -> dict[str, Any]:
    return {
        "code": f.code,
        "title": CODES[f.code],
        "severity": f.severity,
        "message": f.message,
        "rank": f.rank,
        "tensor": f.tensor,
        "source": str(f.source) if f.source else None,
        "hint": f.hint,
    }


def _difference_json(d: Difference) -> dict[str, Any]:
    return {
        "obligation": str(d.obligation),
        "rank": d.rank,
        "tensor": d.layout.local,
        "logical": d.layout.logical,
        "index": list(d.index),
        "got": d.got,
        "want": d.want,
        "seed": d.seed,
    }


def _place_json(p: Place) -> dict[str, Any]:
    return {
        "logical": p.logical,
        "logical_op": _op_json(p.logical_op),
        "rank": p.rank,
        "tensor": p.tensor,
        "op": _op_json(p.op),
        "cause": p.cause,
    }
