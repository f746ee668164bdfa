"""`trainverify bench needle`: one op changed on one rank of L3's 8192, at random places: is it found, and what does that cost?

A needle is a change of a value: one that leaves every output as it was, by an evaluation apart from the verification, is not
counted, and another place is drawn instead.
"""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from trainverify.bench.case import Case
from trainverify.bench.phases import alone, verified
from trainverify.bench.table3 import ROWS
from trainverify.graph.plan import Plan
from trainverify.graph.program import Op
from trainverify.mutate.mutations import Mutant, at_one_rank
from trainverify.mutate.run import contradiction
from trainverify.report import Report

AIM: Final = 2.0  # times the time of the correct plan
DRAWN: Final = 3  # places for every needle, at most


@dataclass(frozen=True)
class Needle:
    """One changed op and what was said of it."""

    seed: int
    rank: int
    text: str  # the change
    layer: int | None  # of the changed op, where it has one
    microbatch: int | None
    verdict: str
    reason: str
    named: str  # what the report points at
    rank_named: bool
    op_named: bool  # a tensor of the changed op itself
    layer_named: bool  # true where there is none
    microbatch_named: bool
    harmless: bool  # the change makes no difference
    phases: dict[str, float]
    seconds: float
    times: float = 0.0  # of the time of the correct plan
    megabytes: int = 0

    @property
    def found(self) -> bool:
        return self.verdict in ("REFUTED", "INVALID")

    @property
    def complete(self) -> bool:
        """Whether the report says where it is."""
        return self.rank_named and self.op_named and self.layer_named and self.microbatch_named

    def json(self) -> dict[str, Any]:
        return asdict(self)


def case(layers: int | None = None) -> Case:
    return replace(next(r.case for r in ROWS if r.case.name == "L3"), layers=layers)


def bench(
    count: int = 10,
    seed: int = 0,
    layers: int | None = None,
    progress: Callable[[str], None] = lambda text: None,
    of: Callable[[int | None], Case] = case,
) -> Iterator[Needle]:
    """The correct plan first, then the others; each is built and verified from the start, in a process of its own."""
    progress("the correct plan")
    base = alone(of(layers))
    if base.verdict != "PROVED":
        raise ValueError(f"the correct plan is {base.verdict}: {base.reason}")
    found = 0
    for n in range(seed, seed + DRAWN * count):
        if found == count:
            return
        progress(f"needle {found + 1} of {count}: seed {n}")
        command = [sys.executable, "-m", "trainverify.bench.needle", of(layers).text(), str(n)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError((done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1])
        needle = Needle(**json.loads(done.stdout))
        found += not needle.harmless
        yield replace(needle, times=round(needle.seconds / base.total, 2))


def searched(case: Case, seed: int) -> Needle:
    """One place, here."""
    made: list[Mutant] = []

    def change(plan: Plan) -> Plan:
        rng = random.Random(seed)
        made.append(at_one_rank(plan, rng.randrange(plan.size), rng))
        return made[0].plan

    run, report, plan = verified(case, change)
    (edit,) = plan.edits
    old = next(t for t in plan.templates if edit.rank in t.ranks).program.ops[edit.path[0]]
    named = pointed(report)
    layer, microbatch = where((old, *edit.ops))
    words = named.split()
    said = where_of(words)
    harmless = False
    if report.verdict not in ("REFUTED", "INVALID"):
        harmless = contradiction(case.build()[0], plan, simulate=False) is None
    return Needle(
        seed,
        edit.rank,
        made[0].text,
        layer,
        microbatch,
        report.verdict,
        report.reason,
        named,
        bool(re.search(rf"\brank {edit.rank}\b", named)),
        any(w in words for w in tensors((old, *edit.ops))),
        layer is None or layer in said[0],
        microbatch is None or microbatch in said[1],
        harmless,
        run.seconds,
        round(run.total, 2),
        megabytes=run.megabytes,
    )


def tensors(ops: Sequence[Op]) -> set[str]:
    """The results of ops; of a message, what is sent."""
    return {t for op in ops for t in (op.outputs or tuple(str(i) for i in op.inputs))}


def where(ops: Sequence[Op]) -> tuple[int | None, int | None]:
    """Layer and micro-batch of the first of some ops, as its results are called."""
    layers, microbatches = where_of(sorted(tensors(ops[:1])))
    return min(layers, default=None), min(microbatches, default=None)


def where_of(words: Sequence[str]) -> tuple[set[int], set[int]]:
    """Layers and micro-batches in names of tensors."""
    layers = {int(n) for w in words for n in re.findall(r"\blayers\.(\d+)\.", w)}
    return layers, {int(n) for w in words for n in re.findall(r"\bmb(\d+)/", w)}


def pointed(report: Report) -> str:
    """The place that a report names: the first wrong tensor, or the first error of an ill-formed plan. Words, without commas."""
    if report.place is not None:
        p = report.place
        text = f"{p.tensor} on rank {p.rank} : {p.op} : {p.cause}"
    else:
        text = next((str(f) for f in report.findings if f.severity == "error"), report.reason)
    return re.sub(r"[,:;()'\"]", " ", text)


if __name__ == "__main__":
    print(json.dumps(searched(Case.read(sys.argv[1]), int(sys.argv[2])).json()))
