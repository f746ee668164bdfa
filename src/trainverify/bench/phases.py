"""One `verify` of a model of the zoo, in a process of its own: verdict, processor seconds by phase, peak memory."""

from __future__ import annotations

import gc
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from trainverify.graph.plan import Plan
from trainverify.graph.program import Program
from trainverify.prove.algebra.engine import Prover
from trainverify.report import Report
from trainverify.verify import verify
from trainverify.zoo.parallel.degrees import Degrees
from trainverify.zoo.recipes import Wish, family_of

PHASES: Final[tuple[str, ...]] = ("build", "validate", "axes", "logical", "plan", "compare", "cross-check", "explain")
_BEGINS: Final = {  # what `verify` says when a phase begins
    "checking the plan": "validate",
    "inferring axes": "axes",
    "proving": "compare",
    "choosing small sizes": "cross-check",
    "locating the first wrong tensor": "explain",
}


_WALKS: Final = {"_run_logical": "logical", "_run_plan": "plan"}


@dataclass(frozen=True)
class Case:
    """A model and how it is divided; `sizes` are fields of its configuration that differ from the preset's."""

    name: str
    model: str
    how: Degrees
    layers: int | None = None
    batch: int | None = None
    sizes: tuple[tuple[str, int], ...] = ()

    def build(self) -> tuple[Program, Plan]:
        wish = Wish(self.model, self.how, layers=self.layers, batch=self.batch)
        if not self.sizes:
            return wish.build()
        family, config = family_of(self.model), replace(wish.config(), **dict(self.sizes))
        assert family.plan is not None
        return family.step(config), family.plan(config, self.how)

    def text(self) -> str:
        return json.dumps({**asdict(self), "how": {k: v for k, v in vars(self.how).items() if v != getattr(Degrees(), k)}})

    @staticmethod
    def read(text: str) -> Case:
        found = json.loads(text)
        return Case(
            found["name"],
            found["model"],
            Degrees(**found["how"]),
            found["layers"],
            found["batch"],
            tuple((k, v) for k, v in found["sizes"]),
        )


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


class Phases:
    """Processor seconds by phase, told by what `verify` says it is doing."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.name = "build"
        self.began = time.process_time()

    def tell(self, text: str) -> None:
        if text in _BEGINS:
            self.enter(_BEGINS[text])

    def enter(self, name: str) -> str:
        now, before = time.process_time(), self.name
        self.seconds[before] = self.seconds.get(before, 0.0) + now - self.began
        self.name, self.began = name, now
        return before


@contextmanager
def walks(phases: Phases) -> Iterator[None]:
    """The two walks of the prover as phases of their own."""
    kept = Prover._run_logical, Prover._run_plan

    def timed(name: str, walk: Callable[[Prover], None]) -> Callable[[Prover], None]:
        def walked(self: Prover) -> None:
            before = phases.enter(name)
            walk(self)
            phases.enter(before)

        return walked

    try:
        for name, walk in zip(_WALKS, kept, strict=True):
            setattr(Prover, name, timed(_WALKS[name], walk))
        yield
    finally:
        for name, walk in zip(_WALKS, kept, strict=True):
            setattr(Prover, name, walk)


def verified(case: Case, change: Callable[[Plan], Plan] | None = None) -> tuple[Run, Report, Plan]:
    """Build and verify here; with `change`, another plan than the zoo's."""
    phases, wall = Phases(), time.perf_counter()
    logical, plan = case.build()
    if change is not None:
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
