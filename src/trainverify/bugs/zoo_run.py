"""Running bugs that are planted in plans of the zoo: the verdict, and whether cause, tensor and all sites are the planted ones."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from trainverify.bugs.plant import Site
from trainverify.bugs.run import Explanation, explanation
from trainverify.bugs.zoo_cases import ZooCase
from trainverify.report import Verdict
from trainverify.verdicts import verify


@dataclass(frozen=True)
class ZooOutcome:
    case: ZooCase
    mesh: str
    sites: tuple[Site, ...]
    verdict: Verdict
    found: Explanation
    named: frozenset[str]  # all tensors that the explanation names
    seconds: float

    @property
    def verdict_holds(self) -> bool:
        return self.verdict in ("REFUTED", "INVALID")

    @property
    def cause_holds(self) -> bool:
        return self.found.cause is self.case.cause

    @property
    def tensor_holds(self) -> bool:
        return any(self.found.tensor in site for site in self.sites)

    @property
    def sites_hold(self) -> bool:
        """Whether every site is named; of one bug in several ops, one of them will do."""
        every = all(not self.named.isdisjoint(site) for site in self.sites)
        return every if self.case.systematic else self.tensor_holds

    def json(self) -> dict[str, Any]:
        found, case = self.found, self.case
        return {
            "id": case.id,
            "model": case.model.name,
            "mesh": self.mesh,
            "sites": len(self.sites),
            "verdict": self.verdict,
            "cause": {"expected": case.cause.name, "found": None if found.cause is None else found.cause.name, "text": found.text},
            "tensor": {"expected": sorted({t for site in self.sites for t in site}), "found": found.tensor},
            "sites_named": sum(not self.named.isdisjoint(site) for site in self.sites),
            "seconds": round(self.seconds, 3),
        }


def run_zoo_case(case: ZooCase) -> ZooOutcome:
    began = time.perf_counter()
    logical, plan, sites = case.build()
    report = verify(logical, plan, also=case.rebuilt())
    found = explanation(report)
    others = () if report.place is None else report.place.others
    named = frozenset(t for t in (found.tensor, *others) if t)
    return ZooOutcome(case, str(plan.mesh), sites, report.verdict, found, named, time.perf_counter() - began)


def run_zoo_cases(cases: Iterable[ZooCase], progress: Callable[[str], None]) -> Iterator[ZooOutcome]:
    for case in cases:
        progress(f"{case.id} in {case.model.name}")
        yield run_zoo_case(case)


def zoo_counts(outcomes: Sequence[ZooOutcome]) -> dict[str, int]:
    return {
        "verdicts": sum(o.verdict_holds for o in outcomes),
        "cause": sum(o.cause_holds for o in outcomes),
        "tensor": sum(o.tensor_holds for o in outcomes),
        "sites": sum(o.sites_hold for o in outcomes),
    }
