"""`trainverify bench table3`: the paper's six models at full size, beside the paper's hours on 48 cores and 1 TB."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from rich.table import Table

from trainverify.bench.case import Case
from trainverify.bench.phases import PHASES, Run, alone
from trainverify.zoo.parallel.degrees import Degrees

SHOWN: Final = tuple(p for p in PHASES if p != "explain")


@dataclass(frozen=True)
class Row:
    case: Case
    hours: float  # of the paper


def _row(name: str, model: str, hours: float, **how: Any) -> Row:
    return Row(Case(name, model, Degrees(zero=1, **how)), hours)


ROWS: Final = (
    _row("L1", "llama3-8b", 0.5, dp=512),
    _row("L2", "llama3-70b", 7.5, dp=16, tp=8, pp=4, microbatches=32),
    _row("L3", "llama3-405b", 47, dp=64, tp=8, pp=16, microbatches=16),
    _row("D1", "deepseek-16b", 0.5, dp=16, tp=4, pp=2, microbatches=16, ep=4),
    _row("D2", "deepseek-236b", 3.5, dp=16, tp=8, pp=4, microbatches=16, ep=8),
    _row("D3", "deepseek-671b", 31, dp=32, tp=8, pp=8, microbatches=16, ep=8),
)
NAMES: Final = tuple(r.case.name for r in ROWS)


@dataclass(frozen=True)
class Result:
    row: Row
    run: Run

    def json(self) -> dict[str, Any]:
        how = self.row.case.how
        degrees = {"dp": how.dp, "tp": how.tp, "pp": how.pp, "ep": how.ep, "microbatches": how.microbatches, "zero": how.zero}
        return {"model": self.row.case.model, **degrees, "paper_hours": self.row.hours, **self.run.json()}


def bench(
    only: Sequence[str] = NAMES,
    layers: int | None = None,
    zero: int = 1,
    timeout: float | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> Iterator[Result]:
    """Row by row; `layers` makes smaller models of them."""
    for row in ROWS:
        if row.case.name in only:
            case = replace(row.case, how=replace(row.case.how, zero=zero), layers=layers)
            progress(f"{case.name}: {case.model}")
            yield Result(replace(row, case=case), alone(case, timeout))


def table(results: Sequence[Result]) -> Table:
    t = Table(title="processor seconds by phase", title_justify="left", box=None, pad_edge=False)
    for c in ("", "model", "ranks", "ops", "obligations", "verdict", *SHOWN, "total s", "wall s", "peak MB", "paper h"):
        t.add_column(c, justify="left" if c in ("", "model", "verdict") else "right", no_wrap=True)
    for r in results:
        run = r.run
        cells = [f"{run.seconds[p]:.1f}" if p in run.seconds else "–" for p in SHOWN]
        counts = (str(run.ranks), str(run.ops), str(run.obligations))
        costs = (f"{run.total:.1f}", f"{run.wall:.1f}", str(run.megabytes), f"{r.row.hours:g}")
        t.add_row(run.name, r.row.case.model, *counts, run.verdict, *cells, *costs)
    return t
