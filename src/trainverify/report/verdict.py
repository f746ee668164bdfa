"""Verdicts and reports: what was shown, what was not, under which assumptions; as text and as JSON."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal

from rich.console import Console
from rich.markup import escape

from trainverify.check.findings import CODES, Finding, names
from trainverify.evaluate.moved import described, seed_of
from trainverify.report.heirs import computed_from, heirs
from trainverify.report.next_steps import what_to_try

if TYPE_CHECKING:  # a command that compares nothing reports without them
    from trainverify.approximate import Change
    from trainverify.evaluate.compare import Difference
    from trainverify.explain.place import Place
    from trainverify.graph.plan import Plan
    from trainverify.graph.program import Op, Program
    from trainverify.ops.table import OpTable

Verdict = Literal["PROVED", "PROVED(reduced)", "PROVED(sampled)", "REFUTED", "INVALID", "UNKNOWN"]
EXIT: Final[dict[str, int]] = {"PROVED": 0, "REFUTED": 1, "INVALID": 1, "UNKNOWN": 3, "PROVED(reduced)": 3, "PROVED(sampled)": 3}
_COLUMNS: Final = ("status", "obligation", "tensor", "ranks", "engine", "scope")
_CLEAN: Final = ("proved", "agreed")
_MOST: Final = 60  # obligations listed in a text report; the JSON report has all
_FEW: Final = 3  # assumptions of one form that are listed each; outputs made of the first wrong tensor
_HOLDS: Final = re.compile(r"input (\S+) holds (.*)")
_DIFF: Final = 24  # lines of a diff that are shown
_SITES: Final = 8  # places of a longer diff that are shown
_LONG: Final = 400  # characters of a note
_COLOURS: Final = {"PROVED": "green", "REFUTED": "red", "INVALID": "red", "UNKNOWN": "yellow"}


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
class Compared:
    """What a report is about."""

    logical: Program
    plan: Plan
    ops: OpTable


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
    accept_reduced: bool = False  # the user takes a proof at reduced sizes for a proof
    options: frozenset[str] | None = None  # of the command that reports; None: it may have any
    accept_sampled: bool = False  # the user takes a proof about captured ranks for one about all ranks
    forms: tuple[str, ...] = ()  # got and want in normal form, of what is not proved
    approximations: tuple[Change, ...] = ()  # changes of the logical program that the user allowed
    compared: Compared | None = field(default=None, repr=False, compare=False)

    @property
    def headline(self) -> str:
        """The verdict, with the approximations that it rests on: `PROVED with local-batch-norm`."""
        return self.verdict + (f" with {', '.join(c.name for c in self.approximations)}" if self.approximations else "")

    @property
    def exit_code(self) -> int:
        accepted = {"PROVED(reduced)": self.accept_reduced, "PROVED(sampled)": self.accept_sampled}
        return 0 if accepted.get(self.verdict) else EXIT[self.verdict]

    def json(self) -> dict[str, Any]:
        later = self.heirs()
        return {
            "verdict": self.headline,
            "reason": self.reason,
            "subject": self.subject,
            "exit_code": self.exit_code,
            "findings": [finding_json(f) for f in self.findings],
            "obligations": [vars(o) | {"inherited": o in later} for o in self.obligations],
            "difference": None if self.difference is None else _difference_json(self.difference),
            "first_wrong": None if self.place is None else _place_json(self.place),
            "approximations": [c.json() for c in self.approximations],
            "assumptions": list(self.assumptions),
            "notes": list(self.notes),
            "forms": list(self.forms),
            "next_steps": self.next_steps(),
            "seconds": round(self.seconds, 3),
        }

    def heirs(self) -> set[Shown]:
        """Outputs that differ because others do."""
        bad = {o.tensor: o for o in self.obligations if o.status == "different"}
        if self.compared is None or len(bad) < 2:
            return set()
        first = self.place.logical if self.place is not None else None
        return {bad[t] for t in heirs(self.compared.logical, bad, first or None, _FEW)}

    def causes(self) -> list[str]:
        """What a front end knows about the cause, in its own terms."""
        return []

    def next_steps(self) -> list[str]:
        """What to try where there is no verdict, or one that is not accepted."""
        return what_to_try(self.verdict, self.reason, self.findings, self.notes, self.options) if self.exit_code == 3 else []

    def print(self, console: Console, verbose: bool = False) -> None:
        """As text; `verbose` has all obligations and assumptions one by one, and the normal forms."""
        colour = _COLOURS[self.verdict.partition("(")[0]]
        console.print(f"[bold {colour}]{self.headline}[/] {escape(self.subject)}: {escape(self.reason)}", highlight=False)
        for line in self.causes():
            console.print(f"  [bold]{escape(line)}[/]", highlight=False)
        for change in self.approximations:
            _print_change(console, change, verbose)
        for f in self.findings:
            text = str(f).replace("\n", "\n  ")
            console.print(f"  [{'yellow' if f.severity == 'warning' else 'red'}]{escape(text)}[/]", highlight=False)
        if self.place is not None and self.place.repair:
            console.print(f"  [bold]repair[/]: {escape(self.place.repair)}", highlight=False)
        if self.difference is not None:
            self._print_difference(console, self.difference)
        if self.place is not None:
            _print_place(console, self.place)
        if self.obligations:
            folded = set() if verbose else self.heirs()
            listed = tuple(o for o in self.obligations if o not in folded)
            _print_obligations(console, listed, len(listed) if verbose else _MOST)
            if folded:
                some = ", ".join([o.name for o in self.obligations if o in folded][:_FEW])
                verb = "differs as it is" if len(folded) == 1 else "differ as they are"
                text = f"{len(folded)} more {verb} computed from these: {some}{', …' if len(folded) > _FEW else ''} (--verbose lists them)"
                console.print(escape(text), highlight=False)
            elif (counted := inherited(self)) is not None:
                console.print(escape(counted), highlight=False)
        if self.assumptions and self.verdict != "INVALID":
            console.print("[bold]Assumed[/], and not shown by this verdict:")
            for a in self.assumptions if verbose else grouped(self.assumptions):
                console.print(f"  - {escape(a)}", highlight=False)
        for n in self.notes:
            short = n if verbose or len(n) <= _LONG else f"{n[:_LONG]}… (--verbose shows all)"
            console.print(f"[dim]{escape(short)}[/]", highlight=False)
        if verbose and self.forms:
            console.print("[bold]Forms[/] of what is not proved:")
            for form in self.forms:
                console.print(f"  {form}", highlight=False, markup=False)
        if steps := self.next_steps():
            console.print("[bold]What to try[/]:")
            for step in steps:
                console.print(f"  - {step}", highlight=False, markup=False)

    def _print_difference(self, console: Console, d: Difference) -> None:
        console.print(f"  [bold]{escape(str(d.obligation))}[/] differs on rank {d.rank}:", highlight=False)
        console.print(f"    {d.layout.local} on rank {d.rank}: got {d.got}", highlight=False, markup=False)
        console.print(f"    {d.layout.logical}{list(d.index)}: want {d.want}", highlight=False, markup=False)


def _print_change(console: Console, change: Change, verbose: bool) -> None:
    """The diff of the logical program, place by place; without `verbose` the first ones."""
    removed, added = change.counts
    title = f"{change.text}, allowed by {change.origin}: {removed} lines of the logical program removed, {added} added"
    console.print(f"  [bold]{escape(title)}[/]", highlight=False)
    lines = [line for site in change.sites for line in site]
    shown = lines if verbose or len(lines) <= _DIFF else [line for site in change.sites[:_SITES] for line in site][:_DIFF]
    for line in shown:
        console.print(f"    {line}", style="red" if line.startswith("- ") else "green", highlight=False, markup=False)
    if len(shown) < len(lines):
        console.print(f"    … and {len(lines) - len(shown)} lines more (--verbose shows all)", highlight=False, markup=False)


def grouped(assumptions: Sequence[str]) -> list[str]:
    """Assumptions, with those that say the same of many inputs in one line."""
    forms = [_HOLDS.fullmatch(a) for a in assumptions]
    names: dict[str, list[str]] = {}
    for form in forms:
        if form is not None:
            names.setdefault(form[2], []).append(form[1])
    found: list[str] = []
    for text, form in zip(assumptions, forms, strict=True):
        some = names.get(form[2], []) if form is not None else []
        if form is None or len(some) <= _FEW:
            found.append(text)
        elif form[1] == some[0]:
            found.append(f"{len(some)} inputs hold {form[2]}: {some[0]} … {some[-1]}")
    return found


def _print_place(console: Console, p: Place) -> None:
    console.print(f"  [bold]first wrong tensor[/]: {escape(p.tensor)} on rank {p.rank}: {escape(p.cause)}", highlight=False)
    console.print(f"    plan:    {_op_line(p.op)}", highlight=False, markup=False)
    if p.used is not None:
        console.print(f"    used:    as if it were whole at {p.used}", highlight=False, markup=False)
    if p.given is not None:
        console.print(f"    given:   at {p.given}", highlight=False, markup=False)
    console.print(f"    logical: {_op_line(p.logical_op)}", highlight=False, markup=False)


def inherited(report: Report) -> str | None:
    """How many of the outputs that differ are computed from the first wrong tensor."""
    bad = [o for o in report.obligations if o.status == "different"]
    if report.compared is None or report.place is None or not report.place.logical or len(bad) < 2:
        return None
    after = {report.place.logical} | computed_from(report.compared.logical, {report.place.logical})
    count = sum(o.tensor in after for o in bad)
    others = [o.name for o in bad if o.tensor not in after]
    also = f"; not {names(others, 3)}" if others and count else ""
    return f"{count} of the {len(bad)} that differ are computed from {report.place.logical}{also}" if count else None


def _print_obligations(console: Console, obligations: tuple[Shown, ...], most: int) -> None:
    """One line each, in columns; two on a terminal too narrow for them. Those that are not clean come first."""
    ordered = sorted(obligations, key=lambda o: o.status in _CLEAN)
    rows = [(o.status, o.name, o.tensor, str(o.holders), o.engine, o.scope) for o in ordered[:most]]
    widths = [max(map(len, column)) for column in zip(_COLUMNS, *rows, strict=True)]
    narrow = console.is_terminal and sum(widths) + 2 * len(widths) > console.width
    for row in rows if narrow else [_COLUMNS, *rows]:
        status, name, tensor, _, engine, scope = (text.ljust(w) for text, w in zip(row, widths, strict=True))
        colour = "bold" if row is _COLUMNS else "red" if row[0] == "different" else "green" if row[0] == "proved" else "yellow"
        if narrow:
            console.print(f"[{colour}]{escape(status)}[/]  {escape(row[1])}", highlight=False)
            console.print(f"    {row[2]}, {row[3]} ranks; {row[4]}, {row[5]}", highlight=False, markup=False)
        else:
            rest = f"{name}  {tensor}  {row[3].rjust(widths[3])}  {engine}  {scope}".rstrip()
            console.print(f"[{colour}]{escape(status)}[/]  {escape(rest)}", highlight=False, style="bold" if row is _COLUMNS else None)
    for status, count in Counter(o.status for o in ordered[most:]).items():
        console.print(f"… and {count} more: {status}", highlight=False, markup=False)


def _op_line(op: Op | None) -> str:
    if op is None or op.source is None:
        return "-" if op is None else f"{op}"
    called = f", called at {', '.join(map(str, op.source.callers))}" if op.source.callers else ""
    return f"{op}  ({op.source}{called})"


def _op_json(op: Op | None) -> dict[str, Any] | None:
    if op is None:
        return None
    callers = [str(c) for c in op.source.callers] if op.source else []
    return {"op": op.name, "text": str(op), "source": str(op.source) if op.source else None} | ({"callers": callers} if callers else {})


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
        "seed": seed_of(d.seed),
        "inputs": described(d.seed),
    }


def _place_json(p: Place) -> dict[str, Any]:
    return {
        "logical": p.logical,
        "logical_op": _op_json(p.logical_op),
        "rank": p.rank,
        "tensor": p.tensor,
        "op": _op_json(p.op),
        "used": None if p.used is None else str(p.used),
        "given": None if p.given is None else str(p.given),
        "cause": p.cause,
        "category": None if p.category is None else p.category.name,
        "repair": p.repair,
        "others": list(p.others),
    }


def codes_page() -> str:
    """docs/findings.md."""
    kinds = {"1": "Programs", "2": "Communication", "3": "Lineage and obligations", "4": "Plans of nnScaler", "5": "Captured code"}
    text = [
        "# Codes of the well-formedness check",
        "",
        "Generated by `python -c \"from trainverify.report import codes_page as p; print(p(), end='')\" > docs/findings.md`.",
        "",
        "A finding is an *error* (the verdict is INVALID), *unsupported* (UNKNOWN) or a *warning*.",
        "It comes with a message in the notation of the plan, the rank, the source line and often a hint.",
    ]
    for digit, title in kinds.items():
        rows = [f"| `{code}` | {meaning} |" for code, meaning in sorted(CODES.items()) if code[2] == digit]
        text += ["", f"## {title}", "", "| code | meaning |", "|---|---|", *rows]
    assert sum(code[2] in kinds for code in CODES) == len(CODES)
    return "\n".join(text) + "\n"
