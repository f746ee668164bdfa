"""`python -m tools.campaign agree`: do the two engines agree? On random plans and mistakes, dumps of nnScaler, or kept plans.

Both are asked about every obligation by itself, so that neither hides behind the other or behind the verdict: nothing that the
algebra proves may look different to the staged engine, and nothing that the staged engine proves may be different.
"""

from __future__ import annotations

import argparse
import json
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

from tools.campaign import kept
from tools.campaign.run import make
from tools.nnscaler_verdicts import Expected, expected
from trainverify.evaluate.compare import DIFFERENT
from trainverify.evaluate.compare import compare as evaluated
from trainverify.evaluate.small import shrink_system
from trainverify.explain.place import Place
from trainverify.graph.obligations import obligations
from trainverify.graph.plan import Plan, units
from trainverify.graph.program import Program
from trainverify.limits import OutOfTime, limited
from trainverify.nnscaler.dump import read
from trainverify.nnscaler.judge import ratio
from trainverify.nnscaler.plan import plan as translated
from trainverify.nnscaler.plan import program
from trainverify.nnscaler.trainer import Trainer
from trainverify.nnscaler.writer import Broken
from trainverify.ops import OPS
from trainverify.prove.attempt import Contradiction
from trainverify.prove.propose.search import DIFFERS
from trainverify.prove.staged.ledger import StagedProof
from trainverify.prove.staged_proof import prove
from trainverify.verdicts import declared, related, verify

BAD: Final = ("contradiction", "crash")
T = TypeVar("T")
NOWHERE: Final = Place("", None, 0, "", None, "")


@dataclass(frozen=True)
class Compared:
    what: str  # what the two make of it; BAD ones must never happen
    reason: str = ""
    seconds: float = 0.0
    seed: int = 0
    mutant: bool = False
    name: str = ""

    def __str__(self) -> str:
        which = self.name or f"{self.seed}{' mistake' if self.mutant else ''}"
        return f"{which}: {self.what} ({self.seconds:.1f} s) {self.reason[:200]}"


def staged(logical: Program, plan: Plan) -> StagedProof:
    """The staged engine alone, no evaluation beside it."""
    parts = units(plan)
    wanted, _ = obligations(logical, plan, parts)
    wanted += declared(logical, plan, parts, wanted)
    return prove(related(logical, plan, OPS, parts, wanted), wanted, plan.lineage)


def compare(logical: Program, plan: Plan) -> Compared:
    """What the algebra with its evaluation says, against what stages show."""
    report = verify(logical, plan, locator=lambda *_: NOWHERE)
    if report.verdict == "INVALID":
        return Compared("both: INVALID")
    if any(f.severity == "unsupported" for f in report.findings):
        return Compared("both: unsupported", report.reason)
    proved, refuted = report.verdict.startswith("PROVED"), report.verdict == "REFUTED"
    said = "PROVED" if proved else "REFUTED" if refuted else "algebra open"
    try:
        proof = staged(logical, plan)
    except OutOfTime:
        return Compared(f"{said}, stages out of time", report.reason)
    shown = {str(o) for o in proof.proved}
    differ = {str(o): why for o, why in proof.failed.items() if why == DIFFERS}
    status = {o.name: o.status for o in report.obligations}
    for name, s in status.items():
        if s == "proved" and name in differ:
            return _contested(logical, plan, name, f"the algebra proves {name}, to stages it {differ[name]}")
        if s == "different" and name in shown:
            return Compared("contradiction", f"stages prove {name}, which differs: {report.reason}")
    if refuted:
        seen = differ or any(proof.models.values())  # on random inputs, or on some that the solver found
        return Compared("both: REFUTED" if seen else "REFUTED, stages open", report.reason)
    if proved:
        why = next(iter(proof.failed.values()), "")
        return Compared("PROVED, stages open" if proof.failed else "both: PROVED", why)
    if differ:
        return Compared("algebra open, stages see a difference", report.reason)
    return Compared("algebra open, stages PROVED" if not proof.failed else "both open", report.reason)


def _contested(logical: Program, plan: Plan, name: str, why: str) -> Compared:
    """A literal that is a size may be the reason at reduced sizes: both are asked together, as users do, which looks at literals too."""
    try:
        report = verify(logical, plan, engine="both", locator=lambda *_: NOWHERE)
    except Contradiction:
        return Compared("contradiction", why)
    if report.verdict.startswith("PROVED") or _differs_when_reduced(logical, plan, name):
        return Compared(f"both: {report.verdict}, after a look at literals", why)
    return Compared("contradiction", why)


def _differs_when_reduced(logical: Program, plan: Plan, name: str) -> bool:
    """Whether an obligation, true or not at full size, fails at reduced sizes as stages have them: evaluated, without stages."""
    parts = units(plan)
    wanted, _ = obligations(logical, plan, parts)
    wanted += declared(logical, plan, parts, wanted)
    small = shrink_system(related(logical, plan, OPS, parts, wanted))
    found = evaluated(small, plan.lineage, [o for o in wanted if str(o) == name], range(3))
    return any(s.distance > DIFFERENT for wrong, _ in found for s in wrong)


def case(item: tuple[int, bool], seconds: float) -> Compared:
    seed, mutant = item

    def programs() -> tuple[Program, Plan]:
        made = make(seed, mutant)
        return made.logical, made.plan

    return replace(timed(programs, seconds), seed=seed, mutant=mutant)


def timed(programs: Callable[[], tuple[Program, Plan]], seconds: float) -> Compared:
    """Within so many seconds of processor time."""
    began = time.process_time()
    try:
        with limited(seconds, None, processor=True):
            found = compare(*programs())
    except OutOfTime:
        found = Compared("out of time")
    except Broken:
        raise
    except MemoryError:
        found = Compared("out of memory")
    except Exception as error:
        at = traceback.extract_tb(error.__traceback__)[-1]
        found = Compared("crash", f"{type(error).__name__} in {at.filename.rsplit('/', 1)[-1]}:{at.name}: {error}")
        if time.process_time() - began >= seconds:  # the limit struck inside a library, which made something else of it
            found = Compared("out of time")
    return replace(found, seconds=time.process_time() - began)


def dumps(folder: Path, verdicts: Path, seconds: float) -> Iterator[Compared]:
    """The plans of a list of verdicts on dumps of nnScaler."""
    for row in expected(verdicts):
        trainer = Trainer("mean" if row.mean else "none")

        def programs(row: Expected = row, trainer: Trainer = trainer) -> tuple[Program, Plan]:
            single, dump = (read(folder / f"{name}.json.gz") for name in (row.logical, row.plan))
            made = translated(dump, OPS, trainer)
            return program(single, OPS, trainer, ratio(single, dump, made)), made.plan

        try:
            yield replace(timed(programs, seconds), name=row.plan)
        except Broken as error:
            yield Compared("not translated", str(error), name=row.plan)


def plans(folder: Path, seconds: float, workers: int = 1) -> Iterator[Compared]:
    """Pairs that were kept, the smallest first, and one line for each that was not."""
    for why, whose in kept.left_out(folder):
        yield Compared(f"not kept: {why}", whose, name="-")
    names = kept.kept(folder)
    yield from _each(partial(_pair, folder, seconds), names, workers)


def _pair(folder: Path, seconds: float, name: str) -> Compared:
    return replace(timed(lambda: kept.read(folder, name), seconds), name=name)


def _each(work: Callable[[T], Compared], items: Sequence[T], workers: int) -> Iterator[Compared]:
    if workers <= 1:
        yield from map(work, items)
        return
    with ProcessPoolExecutor(workers) as pool:
        yield from pool.map(work, items)


def agree(seeds: Iterable[int], seconds: float = 30.0, workers: int = 1) -> Iterator[Compared]:
    """A correct plan and one with a mistake for every seed."""
    items = [(seed, mutant) for seed in seeds for mutant in (False, True)]
    yield from _each(partial(case, seconds=seconds), items, workers)


def summary(found: Iterable[Compared]) -> dict[str, Any]:
    found = list(found)
    groups: dict[str, Counter[str]] = {}
    for c in found:
        groups.setdefault("plans" if c.name else "mistake" if c.mutant else "correct", Counter())[c.what] += 1
    return {
        "cases": len(found),
        **{group: dict(count.most_common()) for group, count in groups.items()},
        "bad": [asdict(c) for c in found if c.what in BAD],
        "slowest_seconds": round(max((c.seconds for c in found), default=0.0), 1),
    }


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.campaign agree", description="Both engines on random plans and mistakes.")
    parser.add_argument("--count", type=int, default=500, help="seeds: a correct plan and a mistake each")
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    parser.add_argument("--seconds", type=float, default=30.0, help="processor time that a case may take")
    parser.add_argument("--workers", type=int, default=1, help="processes")
    parser.add_argument("--dumps", type=Path, metavar="FOLDER", help="dumps of nnScaler instead")
    parser.add_argument("--verdicts", type=Path, help="their list, if not FOLDER/verdicts.txt")
    parser.add_argument("--plans", type=Path, metavar="FOLDER", help="what `pytest --keep-plans FOLDER` kept instead")
    parser.add_argument("--verbose", action="store_true", help="a line per case")
    args = parser.parse_args(arguments)
    found = []
    if args.dumps is not None:
        cases = dumps(args.dumps, args.verdicts or args.dumps / "verdicts.txt", args.seconds)
    elif args.plans is not None:
        cases = plans(args.plans, args.seconds, args.workers)
    else:
        cases = agree(range(args.seed, args.seed + args.count), args.seconds, args.workers)
    for c in cases:
        found.append(c)
        if args.verbose or c.what in BAD:
            print(c, flush=True)
    made = summary(found)
    print(json.dumps(made, indent=2))
    return 1 if made["bad"] else 0
