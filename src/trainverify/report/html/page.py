"""The whole page of one report or several. Nothing is loaded from elsewhere."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any, Final

from trainverify.check.findings import CODES
from trainverify.evaluate.example import Example
from trainverify.evaluate.moved import described
from trainverify.explain.place import Place
from trainverify.graph.program import Op
from trainverify.report.html.example import example_section
from trainverify.report.html.markup import Raw, field, joined, tag
from trainverify.report.html.mesh import mesh_picture
from trainverify.report.html.neighbourhood import logical_side, plan_side
from trainverify.report.html.timeline import timeline_picture
from trainverify.report.verdict import Report, grouped, inherited

ROWS: Final = 30_000  # obligations that a page has; the rest is counted
_STATES: Final = {"PROVED": "good", "REFUTED": "bad", "INVALID": "bad", "UNKNOWN": "open"}


@dataclass(frozen=True)
class Entry:
    """A report under a name (of a test, or none), with a counterexample of readable size if there is one."""

    report: Report
    name: str = ""
    example: Example | None = None


def page(entries: Sequence[Entry]) -> str:
    head = entries[0].report if len(entries) == 1 else None
    title = f"{head.headline} {head.subject}" if head is not None else f"trainverify: {len(entries)} plans"
    body = [_contents(entries)] if len(entries) > 1 else []
    body += [_report(n, e) for n, e in enumerate(entries)]
    data = [_data(e.report) for e in entries]
    shown = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    return "\n".join(
        (
            "<!doctype html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            '<link rel="icon" href="data:,">',
            tag("title", title),
            f"<style>{_asset('page.css')}</style>",
            "</head>",
            "<body>",
            tag("main", joined(body)),
            tag("footer", "trainverify. Keys: / filters obligations, d those that differ, Esc clears."),
            f'<script type="application/json" id="data">{shown}</script>',
            f"<script>{_asset('page.js')}</script>",
            "</body>",
            "</html>",
            "",
        )
    )


def _asset(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text("utf-8")


def _contents(entries: Sequence[Entry]) -> Raw:
    rows = [
        tag("li", tag("a", _badge(e.report), " ", e.name or e.report.subject, href=f"#report-{n}"))
        for n, e in sorted(enumerate(entries), key=lambda x: x[1].report.exit_code == 0)
    ]
    return tag("nav", tag("h2", f"{len(entries)} plans"), tag("ul", joined(rows)))


def _badge(report: Report) -> Raw:
    return tag("span", report.headline, class_=f"badge {_STATES[report.verdict.partition('(')[0]]}")


def _report(n: int, entry: Entry) -> Raw:
    report = entry.report
    heading = tag("h1", _badge(report), " ", entry.name or report.subject)
    parts: list[Raw] = [heading]
    if entry.name:
        parts.append(tag("p", report.subject, class_="subject"))
    parts.append(tag("p", report.reason, class_="reason"))
    parts += _lead(report)
    parts += _evidence(report)
    if entry.example is not None:
        parts.append(example_section(entry.example, report.difference))
    parts += _pictures(report)
    if report.obligations:
        parts.append(_obligations(n, report))
    parts += _changed(report)
    parts += _assumed(report)
    return tag("article", joined(parts), id=f"report-{n}")


def _lead(report: Report) -> Iterator[Raw]:
    """What to do: the repair, what a front end knows, findings, next steps."""
    place = report.place
    if place is not None and place.repair:
        yield tag("p", tag("strong", "Repair: "), place.repair, class_="repair")
    for line in report.causes():
        yield tag("p", line, class_="repair")
    steps = report.next_steps()
    if steps:
        yield _section("What to try", tag("ul", joined(tag("li", s) for s in steps)))
    if report.findings:
        rows = []
        for f in report.findings:
            where = ", ".join(x for x in (f"rank {f.rank}" if f.rank is not None else "", str(f.source) if f.source else "") if x)
            hint = tag("p", f"Hint: {f.hint}", class_="hint") if f.hint else ""
            head = tag("strong", f"{f.code} {CODES[f.code]}")
            rows.append(tag("li", head, tag("span", f" {where}", class_="line"), tag("p", f.message), hint, class_=f.severity))
        yield _section("Findings", tag("ul", joined(rows), class_="findings"))


def _evidence(report: Report) -> Iterator[Raw]:
    d, place = report.difference, report.place
    if d is not None:
        rows = (("obligation", d.obligation), ("rank", d.rank), ("tensor", f"{d.layout.local} ~ {d.layout.logical}{list(d.index)}"))
        values = (
            tag("tr", tag("th", "got"), tag("td", d.got, class_="got")),
            tag("tr", tag("th", "want"), tag("td", d.want, class_="want")),
        )
        table = tag("table", joined(tag("tr", tag("th", k), tag("td", v)) for k, v in rows), joined(values), class_="facts")
        yield _section(
            "The difference", table, tag("p", f"{described(d.seed)}; the lineage that is violated: {d.layout}", class_="subject")
        )
    if place is not None:
        yield _section("The first wrong tensor", *_wrong(report, place))
    if report.forms:
        forms = joined(tag("li", tag("code", f)) for f in report.forms[:50])
        yield tag("details", tag("summary", "Both sides in normal form"), tag("ul", forms, class_="forms"))


def _wrong(report: Report, place: Place) -> Iterator[Raw]:
    yield tag("p", tag("code", place.tensor), f" on rank {place.rank}: {place.cause}")
    compared = report.compared
    for title, op, side in (
        ("In the plan", place.op, None if compared is None else plan_side(compared.plan, place.rank, place.tensor)),
        ("In the logical program", place.logical_op, None if compared is None else logical_side(compared.logical, place.logical)),
    ):
        if side is not None:
            yield joined((tag("h3", title), side))
        elif op is not None:
            yield joined((tag("h3", title), tag("p", tag("code", _line(op)))))


def _line(op: Op) -> str:
    return f"{op}" + (f"  ({op.source})" if op.source else "")


def _pictures(report: Report) -> Iterator[Raw]:
    if report.compared is None or report.compared.plan.size < 2:
        return
    plan = report.compared.plan
    wrong = {x.rank for x in (report.place, report.difference) if x is not None} | {f.rank for f in report.findings if f.rank is not None}
    yield _section("The mesh", mesh_picture(plan, frozenset(wrong)))
    picture = None if report.verdict == "INVALID" else timeline_picture(plan, report.compared.ops, frozenset(wrong))
    if picture is not None:
        yield _section("The step in time", picture)


def _obligations(n: int, report: Report) -> Raw:
    counts = Counter(o.status for o in report.obligations)
    boxes = [
        tag("label", field(type="checkbox", checked=True, data_status=status), f" {status} ({count:,})")
        for status, count in sorted(counts.items(), key=lambda x: x[0] == "proved")
    ]
    search = field(type="search", placeholder="Filter by name or tensor", aria_label="Filter obligations")
    heads = joined(tag("th", h) for h in ("status", "obligation", "tensor", "ranks", "engine", "scope"))
    table = tag("table", tag("thead", tag("tr", heads)), tag("tbody"), class_="obligations")
    line = inherited(report)
    note = [tag("p", line)] if line else []
    left = len(report.obligations) - ROWS
    rest = [tag("p", f"{left:,} more are in the JSON report.")] if left > 0 else []
    more = tag("button", "Show more", type="button", class_="more", hidden=True)
    controls = tag("div", search, joined(boxes), tag("span", "", class_="count", aria_live="polite"), class_="controls")
    inside = tag("div", controls, tag("div", table, class_="scroll"), more, class_="filtered", data_report=n)
    script = Raw("<noscript><p>The list needs JavaScript; the JSON report has it too.</p></noscript>")
    return _section(f"{len(report.obligations):,} obligations", *note, inside, script, *rest)


def _data(report: Report) -> dict[str, Any]:
    """Obligations in few characters: those that are not proved first; repeated texts by number."""
    ordered = sorted(
        report.obligations, key=lambda o: ("different", "proved").index(o.status) if o.status in ("different", "proved") else 0.5
    )
    texts: dict[str, int] = {}
    rows = [
        [o.name, o.tensor, o.holders, *(texts.setdefault(t, len(texts)) for t in (o.status, o.engine, o.scope))] for o in ordered[:ROWS]
    ]
    return {"texts": list(texts), "rows": rows}


def _changed(report: Report) -> Iterator[Raw]:
    """The diffs of the logical program that approximations make."""
    for change in report.approximations:
        removed, added = change.counts
        lines = [line for site in change.sites for line in site]
        more = [f"… and {len(lines) - ROWS} lines more"] if len(lines) > ROWS else []
        diff = tag("pre", "\n".join([*lines[:ROWS], *more]))
        summary = tag("summary", f"{removed} lines of the logical program removed, {added} added")
        yield _section(f"{change.text}, allowed by {change.origin}", tag("p", change.says), tag("details", summary, diff))


def _assumed(report: Report) -> Iterator[Raw]:
    if report.assumptions and report.verdict != "INVALID":
        some = grouped(report.assumptions)
        all_of_them = [
            tag(
                "details",
                tag("summary", f"All {len(report.assumptions)}"),
                tag("ul", joined(tag("li", a) for a in report.assumptions[:2000])),
            )
        ]
        shown = tag("ul", joined(tag("li", a) for a in some))
        yield _section("Assumed, and not shown by this verdict", shown, *(all_of_them if len(some) < len(report.assumptions) else ()))
    if report.notes:
        yield _section("Notes", tag("ul", joined(tag("li", n) for n in report.notes)))


def _section(title: str, *inside: object) -> Raw:
    return tag("section", tag("h2", title), *inside)
