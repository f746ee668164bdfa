"""Running cases: the verdicts of both plans, and how the explanation of the wrong one compares with what is expected."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from trainverify.bugs.case import Case
from trainverify.bugs.cases import KNOWN_OPEN
from trainverify.explain.cause import Cause
from trainverify.graph.program import Source
from trainverify.report import Report, Verdict
from trainverify.verdicts import verify

CODES: dict[str, Cause] = {"TV201": Cause.WRONG_GROUP, "TV202": Cause.WRONG_GROUP}  # what findings of ill-formed plans say


@dataclass(frozen=True)
class Explanation:
    """What a report says about a bug."""

    text: str | None = None
    cause: Cause | None = None
    tensor: str | None = None
    line: tuple[str, int] | None = None  # file name and number


@dataclass(frozen=True)
class Outcome:
    case: Case
    right: Verdict
    wrong: Verdict
    found: Explanation
    seconds: float

    @property
    def verdicts_hold(self) -> bool:
        return self.right == "PROVED" and self.wrong in ("REFUTED", "INVALID")

    @property
    def cause_holds(self) -> bool:
        return self.found.cause is self.case.cause

    @property
    def tensor_holds(self) -> bool:
        return self.found.tensor in self.case.tensors

    @property
    def line_holds(self) -> bool:
        return self.found.line in self.case.lines()

    def json(self) -> dict[str, Any]:
        found, case = self.found, self.case
        return {
            "id": case.id,
            "title": case.title,
            "reference": case.reference,
            "mechanism": case.mechanism,
            "right": self.right,
            "wrong": self.wrong,
            "verdicts_hold": self.verdicts_hold,
            "known_open": KNOWN_OPEN.get(case.id),
            "cause": {"expected": case.cause.name, "found": None if found.cause is None else found.cause.name, "text": found.text},
            "tensor": {"expected": list(case.tensors), "found": found.tensor},
            "line": {"expected": sorted(map(shown_line, case.lines())), "found": None if found.line is None else shown_line(found.line)},
            "seconds": round(self.seconds, 3),
        }


def explanation(report: Report) -> Explanation:
    """Where a refuted or invalid plan goes wrong, as its report says."""
    if report.place is not None:
        place = report.place
        return Explanation(place.cause, place.category, place.tensor, _line(place.line))
    finding = next((f for f in report.findings if f.severity == "error"), None)
    if finding is None:
        return Explanation()
    return Explanation(f"{finding.code} {finding.message}", CODES.get(finding.code), finding.tensor, _line(finding.source))


def _line(source: Source | None) -> tuple[str, int] | None:
    return None if source is None else (PurePath(source.file).name, source.line)


def shown_line(line: tuple[str, int]) -> str:
    return f"{line[0]}:{line[1]}"


def run_case(case: Case) -> Outcome:
    began = time.perf_counter()
    right, wrong = verify(*case.build(True)), verify(*case.build(False))
    return Outcome(case, right.verdict, wrong.verdict, explanation(wrong), time.perf_counter() - began)


def run_cases(cases: Iterable[Case], progress: Callable[[str], None]) -> Iterator[Outcome]:
    for case in cases:
        progress(f"{case.id} {case.title}")
        yield run_case(case)


def counts(outcomes: Sequence[Outcome]) -> dict[str, int]:
    """How many cases hold, in each respect."""
    return {
        "verdicts": sum(o.verdicts_hold for o in outcomes),
        "cause": sum(o.cause_holds for o in outcomes),
        "tensor": sum(o.tensor_holds for o in outcomes),
        "line": sum(o.line_holds for o in outcomes),
    }
