"""A report as SARIF 2.1.0, which code hosts show beside the line: findings, the first wrong tensor, or why there is no verdict."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
from collections.abc import Iterator
from pathlib import PurePath
from typing import Any, Final
from urllib.parse import quote

from trainverify.check.findings import CODES, Finding
from trainverify.explain.cause import Cause
from trainverify.explain.place import Place
from trainverify.graph.program import Source
from trainverify.report.verdict import Report

SCHEMA: Final = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
REFUTED, UNKNOWN = "refuted", "unknown"  # rules of results that have no code or cause
_LEVELS: Final = {"error": "error", "unsupported": "error", "warning": "warning"}
_RULES: Final = {
    **CODES,
    **{c.name.lower().replace("_", "-"): c.value for c in Cause},
    REFUTED: "The plan computes something else than the logical program.",
    UNKNOWN: "The plan is neither proved nor refuted.",
}


def sarif(report: Report, artifact: str | None = None) -> str:
    """The text of a SARIF file; results without a line of the user's are placed at the start of `artifact`."""
    results = list(_results(report, artifact))
    used = list(dict.fromkeys(r["ruleId"] for r in results))
    for r in results:
        r["ruleIndex"] = used.index(r["ruleId"])
    driver = {
        "name": "trainverify",
        "semanticVersion": importlib.metadata.version("trainverify"),
        "rules": [{"id": rule, "shortDescription": {"text": _RULES[rule]}} for rule in used],
    }
    run = {
        "tool": {"driver": driver},
        "invocations": [{"executionSuccessful": True, "exitCode": report.exit_code}],
        "originalUriBaseIds": {"SRCROOT": {"description": {"text": "The folder in which trainverify ran."}}},
        "columnKind": "unicodeCodePoints",
        "results": results,
        "properties": {"verdict": report.headline, "reason": report.reason, "subject": report.subject},
    }
    return json.dumps({"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}, indent=1) + "\n"


def _results(report: Report, artifact: str | None) -> Iterator[dict[str, Any]]:
    for f in report.findings:
        yield _finding(f, artifact)
    if report.verdict == "REFUTED" or (report.verdict == "INVALID" and report.place is not None):
        yield _difference(report, artifact)
    elif report.exit_code == 3:
        text = f"{report.headline}: {report.reason}"
        yield _result(UNKNOWN, "warning", text, None, artifact, report.subject)


def _finding(f: Finding, artifact: str | None) -> dict[str, Any]:
    where = "" if f.rank is None else f" on rank {f.rank}"
    text = f"{CODES[f.code]}{where}: {f.message}" + (f" Hint: {f.hint}" if f.hint else "")
    found = _result(f.code, _LEVELS[f.severity], text, f.source, artifact, f.tensor or f.message)
    return found | {"properties": {"rank": f.rank, "tensor": f.tensor}}


def _difference(report: Report, artifact: str | None) -> dict[str, Any]:
    place, d = report.place, report.difference
    lines = [] if place is None or not place.repair else [f"Repair: {place.repair}."]
    lines.append(f"{report.subject}: {report.reason}.")
    if place is not None:
        lines.append(f"{place.tensor} on rank {place.rank}: {place.cause}.")
    if d is not None:
        lines.append(f"{d.layout.logical}{list(d.index)}: got {d.got}, want {d.want}.")
    rule = REFUTED if place is None or place.category is None else place.category.name.lower().replace("_", "-")
    line = None if place is None else place.line
    identity = f"{report.subject} {place.tensor if place is not None else report.reason}"
    found = _result(rule, "error", " ".join(lines), line, artifact, identity)
    related = [] if place is None else list(_related(place))
    return found | ({"relatedLocations": related} if related else {})


def _related(place: Place) -> Iterator[dict[str, Any]]:
    """The same place in the logical program, and the lines that led to the one at fault."""
    logical = place.logical_op
    if logical is not None and (found := _location(logical.source)) is not None:
        yield found | {"message": {"text": _literal(f"the logical program: {logical}")}}
    for caller in () if place.line is None else place.line.callers:
        if (found := _location(caller)) is not None:
            yield found | {"message": {"text": "called here"}}


def _result(rule: str, level: str, text: str, source: Source | None, artifact: str | None, identity: str) -> dict[str, Any]:
    location = _location(source) or (None if artifact is None else _location(Source(artifact, 1)))
    print_of = hashlib.sha256(f"{rule} {identity}".encode("utf-8", "backslashreplace")).hexdigest()[:32]
    found = {"ruleId": rule, "level": level, "message": {"text": _literal(text)}, "partialFingerprints": {"trainverify/v1": print_of}}
    return found | ({} if location is None else {"locations": [location]})


def _literal(text: str) -> str:
    """Text in which nothing is a placeholder or a link."""
    return text.replace("{", "{{").replace("}", "}}").replace("](", "] (")


def _location(source: Source | None) -> dict[str, Any] | None:
    """A line of a file; None for code that is in no file."""
    if source is None or source.line < 1 or source.file.startswith("<") or not source.file:
        return None
    path = PurePath(source.file)
    if path.is_absolute() and path.is_relative_to(os.getcwd()):
        path = path.relative_to(os.getcwd())
    place = {"uri": path.as_uri()} if path.is_absolute() else {"uri": quote(path.as_posix()), "uriBaseId": "SRCROOT"}
    return {"physicalLocation": {"artifactLocation": place, "region": {"startLine": source.line}}}
