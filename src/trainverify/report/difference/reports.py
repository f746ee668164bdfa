"""What changed between two reports of `--json`: the verdict, obligations, findings, what is wrong first, assumptions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from trainverify.report.difference.change import Change, between


def is_report(tree: object) -> bool:
    return isinstance(tree, dict) and isinstance(tree.get("verdict"), str) and isinstance(tree.get("obligations"), list)


def report_changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Change]:
    """Times and notes do not count."""
    return [
        *between("report", "verdict", {"": _text(old, "verdict")}, {"": _text(new, "verdict")}),
        *between("report", "reason", {"": _text(old, "reason")}, {"": _text(new, "reason")}),
        *between("report", "subject", {"": _text(old, "subject")}, {"": _text(new, "subject")}),
        *between("report", "finding", dict(_findings(old)), dict(_findings(new))),
        *between("report", "obligation", dict(_obligations(old)), dict(_obligations(new))),
        *between("report", "first wrong tensor", dict(_place(old)), dict(_place(new))),
        *between("report", "assumption", _set(old), _set(new)),
    ]


def _text(report: Mapping[str, Any], field: str) -> str:
    return str(report.get(field))


def _items(report: Mapping[str, Any], field: str) -> Iterator[Mapping[str, Any]]:
    found = report.get(field)
    yield from (x for x in found if isinstance(x, dict)) if isinstance(found, list) else ()


def _findings(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for f in _items(report, "findings"):
        where = f" ({f['source']})" if f.get("source") else ""
        text = f"{f.get('code')} {f.get('message')}{where}"
        yield text, text


def _obligations(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for o in _items(report, "obligations"):
        yield (
            str(o.get("name")),
            f"{o.get('name')} ({o.get('tensor')}, {o.get('holders')} ranks): {o.get('status')}, {o.get('engine')}, {o.get('scope')}",
        )


def _place(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    place = report.get("first_wrong")
    if isinstance(place, dict):
        yield "", f"{place.get('tensor')} on rank {place.get('rank')}: {place.get('repair') or place.get('cause')}"


def _set(report: Mapping[str, Any]) -> dict[str, str]:
    found = report.get("assumptions")
    return {str(a): str(a) for a in found} if isinstance(found, list) else {}
