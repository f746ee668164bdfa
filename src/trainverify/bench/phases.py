"""One `verify` of a model of the zoo, in a process of its own: verdict, processor seconds by phase, peak memory."""

from __future__ import annotations

import gc
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from trainverify.bench.case import Case
from trainverify.bench.clock import Clock, walks
from trainverify.graph.plan import Plan
from trainverify.report import Report
from trainverify.verdicts import verify

PHASES: Final[tuple[str, ...]] = ("build", "validate", "axes", "logical", "plan", "compare", "cross-check", "explain")
_BEGINS: Final = {  # what `verify` says when a phase begins
    "checking the plan": "validate",
    "inferring axes": "axes",
    "proving": "compare",
    "choosing small sizes": "cross-check",
    "locating the first wrong tensor": "explain",
}


@dataclass(frozen=True)
class Run:
    """What one `verify` did."""

    name: str
    verdict: str
    reason: str
    ranks: int
    programs: int
    ops: int  # of all programs
    obligations: int
    seconds: dict[str, float]  # processor time by phase
    wall: float
    megabytes: int  # peak of the process

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    def json(self) -> dict[str, Any]:
        return {**vars(self), "total_seconds": round(self.total, 2)}


class Phases(Clock):
    """The phases of `verify`, told by what it says it is doing."""

    def tell(self, text: str) -> None:
        if text in _BEGINS:
            self.enter(_BEGINS[text])


def verified(case: Case, change: Callable[[Plan], Plan] | None = None) -> tuple[Run, Report, Plan]:
    """Build and verify here; with `change`, another plan than the zoo's, whose making is not counted."""
    phases, wall = Phases(), time.perf_counter()
    logical, plan = case.build()
    if change is not None:
        with phases.phase("change"):
            plan = change(plan)
    gc.collect()
    with walks(phases):
        report = verify(logical, plan, progress=phases.tell)
    phases.enter("")
    seconds = {p: round(phases.seconds[p], 3) for p in PHASES if p in phases.seconds}
    ops = sum(len(t.program.ops) for t in plan.templates)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    wall = round(time.perf_counter() - wall, 2)
    run = Run(case.name, report.verdict, report.reason, plan.size, len(plan.templates), ops, len(report.obligations), seconds, wall, peak)
    return run, report, plan


def alone(case: Case, timeout: float | None = None) -> Run:
    """The same in a process of its own, so that the peak of memory is its own."""
    command = [sys.executable, "-m", "trainverify.bench.phases", case.text()]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        return Run(case.name, "TIME", f"no verdict in {timeout:g} s", 0, 0, 0, 0, {}, timeout or 0.0, 0)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return Run(case.name, "ERROR", last, 0, 0, 0, 0, {}, 0.0, 0)
    return Run(**json.loads(done.stdout))


if __name__ == "__main__":
    print(json.dumps(vars(verified(Case.read(sys.argv[1]))[0])))
