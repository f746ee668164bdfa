"""`trainverify bench stages`: what staged proofs cost, in the process itself and in workers (the paper's Figure 8)."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Final

from trainverify.graph.obligations import obligations
from trainverify.graph.plan import units
from trainverify.ops import OPS
from trainverify.prove.staged_proof import prove
from trainverify.verdicts import related
from trainverify.zoo.llama import Config
from trainverify.zoo.parallel import Degrees, llama_plan, llama_step

BASE: Final = Config(layers=4, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocabulary=128256, sequence=8192)
HOW: Final = Degrees(dp=2, tp=2, pp=2, microbatches=2)


@dataclass(frozen=True)
class Row:
    layers: int
    workers: int  # 0: no process but this one
    verdict: str
    stages: int
    distinct: int
    seconds: float  # wall clock
    processor: float  # seconds of processor time, of this process and of the workers
    megabytes: int  # peak of this process so far
    worker_megabytes: int  # peak of the largest worker so far

    def __str__(self) -> str:
        what = f"{self.layers} layers, {self.workers} workers: {self.verdict}, {self.stages} stages ({self.distinct} distinct)"
        took = f"{self.seconds:.1f} s, {self.processor:.1f} s of processor time"
        return f"{what}, {took}, {self.megabytes} MB, largest worker {self.worker_megabytes} MB"


def bench(quick: bool = False, progress: Callable[[str], None] = lambda text: None) -> Iterator[Row]:
    """The same plan with no worker, one, two and four."""
    how = Degrees(dp=2) if quick else HOW
    config = replace(BASE, layers=1 if quick else BASE.layers, batch=8)
    logical, plan = llama_step(config), llama_plan(config, how)
    for workers in (0, 2) if quick else (0, 1, 2, 4):
        began, spent = time.perf_counter(), _processor()
        parts = units(plan)
        wanted, _ = obligations(logical, plan, parts)
        proof = prove(related(logical, plan, OPS, parts, wanted), wanted, plan.lineage, workers, progress=progress)
        own, children = (resource.getrusage(who).ru_maxrss // 1024 for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        verdict = "all proved" if not proof.failed else f"{len(proof.failed)} of {len(wanted)} not proved"
        took = time.perf_counter() - began, _processor() - spent
        yield Row(config.layers, workers, verdict, proof.stages, proof.distinct, *took, own, children)


def _processor() -> float:
    """Seconds of this process and of those that it waited for."""
    return sum(u.ru_utime + u.ru_stime for u in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)))
