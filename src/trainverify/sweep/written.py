"""A sweep as files: JUnit, one test case for each configuration, and one page with a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from html import escape
from typing import Final
from xml.etree import ElementTree

from trainverify.report.verdict import EXIT
from trainverify.sweep.cache import Row
from trainverify.sweep.run import NOT_BUILT

STYLE: Final = """
:root { color-scheme: light dark; font: 15px/1.5 system-ui, sans-serif; }
body { margin: 2rem auto; max-width: 70rem; padding: 0 1rem; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; padding: .3rem .6rem; border-bottom: 1px solid #8884; vertical-align: top; overflow-wrap: anywhere; }
td:nth-child(3), td:nth-child(4) { white-space: nowrap; }
.good { color: #1a7f37; } .bad { color: #cf222e; } .open { color: #9a6700; }
@media (prefers-color-scheme: dark) { .good { color: #3fb950; } .bad { color: #f85149; } .open { color: #d29922; } }
"""


def exit_code(rows: Sequence[Row]) -> int:
    """1 if one is wrong, else 3 if one is open, else 2 if one cannot be built, else 0."""
    codes = {2 if r.verdict == NOT_BUILT else EXIT[r.verdict] for r in rows}
    return next((c for c in (1, 3, 2) if c in codes), 0)


def counted(rows: Sequence[Row]) -> dict[str, int]:
    """How many have each verdict; a verdict that rests on approximations counts apart."""
    return dict(Counter(r.headline for v in (*EXIT, NOT_BUILT) for r in rows if r.verdict == v))


def junit(rows: Sequence[Row]) -> str:
    """What is wrong is a failure, what is open an error, what cannot be built is skipped."""
    kinds = {0: "", 1: "failure", 3: "error"}
    found = ["skipped" if r.verdict == NOT_BUILT else kinds[EXIT[r.verdict]] for r in rows]
    root = ElementTree.Element("testsuites")
    numbers = {"tests": len(rows), "failures": found.count("failure"), "errors": found.count("error"), "skipped": found.count("skipped")}
    suite = ElementTree.SubElement(root, "testsuite", {"name": "trainverify sweep", **{k: str(v) for k, v in numbers.items()}})
    for row, kind in zip(rows, found, strict=True):
        case = ElementTree.SubElement(suite, "testcase", name=row.name, classname="trainverify.sweep", time=f"{row.seconds:.3f}")
        if kind:
            ElementTree.SubElement(case, kind, message=f"{row.headline}: {row.reason}").text = row.place
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(root, "unicode") + "\n"


def page(title: str, rows: Sequence[Row]) -> str:
    """One page without scripts, in light and dark."""
    body = "".join(
        f"<tr><td>{escape(r.name)}</td><td class={_class(r)}>{escape(r.headline)}</td><td>{r.seconds:.1f} s</td>"
        f"<td>{'kept' if r.cached else 'new'}</td><td>{escape(' · '.join(t for t in (r.reason, r.place, r.note) if t))}</td></tr>\n"
        for r in rows
    )
    total = ", ".join(f"{n} {v}" for v, n in counted(rows).items())
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n<body><h1>{escape(title)}</h1><p>{escape(total)}</p>\n"
        f"<table><thead><tr><th>configuration<th>verdict<th>time<th>it is<th>why</thead><tbody>\n{body}</tbody></table></body></html>\n"
    )


def _class(row: Row) -> str:
    return {0: "good", 1: "bad"}.get(EXIT.get(row.verdict, 2), "open")


__all__ = ["counted", "exit_code", "junit", "page"]
