"""`trainverify bench torch`: Llama-3-8B as PyTorch code on 8 ranks, captured and verified. Processor seconds and peak memory of both."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from rich.table import Table

from trainverify.bench.clock import walks
from trainverify.bench.phases import Phases
from trainverify.bench.torch_llama import IGNORE, Sizes, alone, sharded, tensor_parallel
from trainverify.graph.mesh import Mesh
from trainverify.torch.inputs import Ids
from trainverify.torch.judge import captures, judge
from trainverify.torch.ways import all_ways, joined

RANKS: Final = 8
SHOWN: Final = ("validate", "axes", "logical", "plan", "compare", "cross-check")


@dataclass(frozen=True)
class Row:
    parallel: Callable[[Sizes, int], Any]
    axis: str
    text: str
    cut: str | None = None
    loss: Any = "whole"
    vocabulary: int | None = None  # instead of the model's own


ROWS: Final[Mapping[str, Row]] = {
    "tp": Row(tensor_parallel, "tp", "DTensor tp 8 + sp"),
    "fsdp": Row(sharded, "dp", "FSDP2 on 8 ranks", "(dp b) s", {"dp": "avg"}),
    "fsdp-32001": Row(sharded, "dp", "FSDP2, vocabulary 32,001", "(dp b) s", {"dp": "avg"}, 32001),
    "fsdp-128257": Row(sharded, "dp", "FSDP2, vocabulary 128,257", "(dp b) s", {"dp": "avg"}, 128257),
}
NAMES: Final = tuple(ROWS)


@dataclass(frozen=True)
class Run:
    """What one capture and one proof took."""

    name: str
    verdict: str
    reason: str
    layers: int
    ranks: int
    ops: int  # of one rank
    obligations: int
    capture_seconds: float  # processor time of all processes
    rank_seconds: float  # of the slowest rank
    capture_megabytes: int  # peak of the largest process
    pair_seconds: float  # until both programs are there
    seconds: dict[str, float]  # of the proof and the evaluation behind it, by phase
    megabytes: int  # peak of the process that proves, PyTorch included

    @property
    def total(self) -> float:
        return self.pair_seconds + sum(self.seconds.values())


def _used(who: int) -> float:
    found = resource.getrusage(who)
    return found.ru_utime + found.ru_stime


def _megabytes(who: int) -> int:
    return resource.getrusage(who).ru_maxrss // 1024


def measured(name: str, sizes: Sizes) -> Run:
    """Here; children of this process are those that capture."""
    row, mesh = ROWS[name], Mesh({ROWS[name].axis: RANKS})
    sizes = replace(sizes, vocabulary=row.vocabulary or sizes.vocabulary)
    shape = (sizes.batch, sizes.sequence)
    ignore = IGNORE if row.cut is None else None  # ranks' means have equal weight only if they have equally many labels
    batch = {"tokens": Ids(shape, row.cut, sizes.vocabulary), "labels": Ids(shape, row.cut, sizes.vocabulary, ignore)}
    targets = (lambda: alone(sizes), lambda rank, world: row.parallel(sizes, world))
    found = all_ways(lambda choices: captures(*targets, RANKS, batch, mesh, choices=choices))
    ranks = found[0].ranks
    phases = Phases("pair")
    with walks(phases):
        report = joined([(w, judge(w.reference, w.ranks, mesh, batch, None, row.loss, progress=phases.tell)) for w in found])
    phases.enter("")
    seconds = {p: round(s, 2) for p, s in phases.seconds.items() if p not in ("pair", "")}
    return Run(
        name,
        report.verdict,
        report.reason,
        sizes.layers,
        RANKS,
        len(ranks[0].program.ops),
        len(report.obligations),
        round(_used(resource.RUSAGE_CHILDREN), 1),
        round(max(c.seconds for c in ranks), 1),
        _megabytes(resource.RUSAGE_CHILDREN),
        round(phases.seconds["pair"], 2),
        seconds,
        _megabytes(resource.RUSAGE_SELF),
    )


def bench(only: Sequence[str], layers: int | None, timeout: float | None, tell: Callable[[str], None]) -> Iterator[Run]:
    """Each in a process of its own, so that memory is its own."""
    sizes = Sizes() if layers is None else Sizes(layers=layers)
    for name in only:
        tell(f"{name}: {ROWS[name].text}")
        command = [sys.executable, "-m", "trainverify.bench.captured", name, json.dumps(asdict(sizes))]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
        except subprocess.TimeoutExpired:
            yield Run(name, "TIME", f"no verdict in {timeout:g} s", sizes.layers, RANKS, 0, 0, 0.0, 0.0, 0, 0.0, {}, 0)
            continue
        if done.returncode:
            last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            yield Run(name, "ERROR", last, sizes.layers, RANKS, 0, 0, 0.0, 0.0, 0, 0.0, {}, 0)
            continue
        yield Run(**json.loads(done.stdout))


def table(runs: Sequence[Run]) -> Table:
    t = Table(title="processor seconds", title_justify="left", box=None, pad_edge=False)
    columns = ("", "layers", "ops a rank", "obligations", "verdict", "capture", "a rank", "peak MB", "pair", *SHOWN, "proof", "peak MB")
    for c in columns:
        t.add_column(c, justify="left" if c in ("", "verdict") else "right", no_wrap=True)
    for r in runs:
        cells = [f"{r.seconds[p]:.1f}" if p in r.seconds else "–" for p in SHOWN]
        captured = (f"{r.capture_seconds:.0f}", f"{r.rank_seconds:.1f}", str(r.capture_megabytes), f"{r.pair_seconds:.1f}")
        counts = (str(r.layers), str(r.ops), str(r.obligations), r.verdict)
        t.add_row(ROWS[r.name].text, *counts, *captured, *cells, f"{r.total:.1f}", str(r.megabytes))
    return t


if __name__ == "__main__":
    print(json.dumps(asdict(measured(sys.argv[1], Sizes(**json.loads(sys.argv[2]))))))
