"""A report as JUnit XML: one test case for the verdict, one for every finding, one for every obligation."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal
from xml.etree import ElementTree

from trainverify.check.findings import CODES
from trainverify.report.verdict import Report, Shown

Outcome = Literal["passed", "failure", "error"]


@dataclass(frozen=True)
class Case:
    name: str
    group: str
    outcome: Outcome
    message: str = ""
    text: str = ""


def junit(report: Report, now: float | None = None) -> str:
    """The text of a JUnit file. What is refuted or ill-formed is a failure, what is not proved an error."""
    cases = list(_cases(report))
    counts = {outcome: sum(c.outcome == outcome for c in cases) for outcome in ("failure", "error")}
    numbers = {"tests": str(len(cases)), "failures": str(counts["failure"]), "errors": str(counts["error"])}
    root = ElementTree.Element("testsuites")
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now))
    suite = ElementTree.SubElement(root, "testsuite", name=_plain(report.subject) or "trainverify", package="trainverify", id="0")
    suite.attrib |= {"timestamp": stamp, "hostname": "localhost", "time": f"{report.seconds:.3f}", **numbers}
    properties = ElementTree.SubElement(suite, "properties")
    for name, value in (("verdict", report.headline), ("reason", report.reason), ("exit_code", str(report.exit_code))):
        ElementTree.SubElement(properties, "property", name=name, value=_plain(value))
    for n, c in enumerate(cases):
        seconds = report.seconds if n == 0 else 0.0
        element = ElementTree.SubElement(suite, "testcase", name=_plain(c.name), classname=_plain(c.group), time=f"{seconds:.3f}")
        if c.outcome != "passed":
            ElementTree.SubElement(element, c.outcome, message=_plain(c.message), type=report.verdict).text = _plain(c.text)
    ElementTree.SubElement(suite, "system-out").text = _plain("\n".join(report.notes))
    ElementTree.SubElement(suite, "system-err")
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(root, "unicode") + "\n"


def _cases(report: Report) -> Iterator[Case]:
    whole: Outcome = {0: "passed", 1: "failure"}.get(report.exit_code, "error")  # type: ignore[assignment]
    yield Case("verdict", "trainverify", whole, f"{report.headline}: {report.reason}", "\n".join(_explained(report)))
    for f in report.findings:
        outcome: Outcome = {"error": "failure", "warning": "passed"}.get(f.severity, "error")  # type: ignore[assignment]
        yield Case(f"{f.code} {CODES[f.code]}: {f.message}", "trainverify.findings", outcome, f.message, str(f))
    for o in report.obligations:
        yield Case(o.name, "trainverify.obligations", _outcome(o, report), f"{o.status} ({o.engine}, {o.scope})", _got(o, report))


def _outcome(o: Shown, report: Report) -> Outcome:
    """Proved counts at full size, or where the report as a whole is accepted."""
    if o.status == "different":
        return "failure"
    return "passed" if o.status == "proved" and (o.scope == "full size" or report.exit_code == 0) else "error"


def _explained(report: Report) -> Iterator[str]:
    place = report.place
    if place is None:
        return
    if place.repair:
        yield f"repair: {place.repair}"
    yield f"first wrong tensor: {place.tensor} on rank {place.rank}: {place.cause}"
    for what, op in (("plan", place.op), ("logical", place.logical_op)):
        if op is not None:
            yield f"{what}: {op}" + (f"  ({op.source})" if op.source else "")


def _got(o: Shown, report: Report) -> str:
    d = report.difference
    if d is None or str(d.obligation) != o.name:
        return ""
    return f"{d.layout.local} on rank {d.rank}: got {d.got}\n{d.layout.logical}{list(d.index)}: want {d.want}"


def _plain(text: str) -> str:
    """What XML can hold."""
    return "".join(c if c in "\t\n" or (c >= " " and not "\ud800" <= c <= "\udfff" and c not in "\ufffe\uffff") else "?" for c in text)
