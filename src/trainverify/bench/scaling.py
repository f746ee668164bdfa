"""`trainverify bench scaling`: how the time of a whole `verify` grows with one variable, all else fixed (the paper's Figure 7 b to j)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from rich.table import Table

from trainverify.bench.case import Case
from trainverify.bench.clock import exponent, in_turns, least
from trainverify.bench.phases import PHASES, Run, verified
from trainverify.bench.plot import Plot, svg
from trainverify.zoo.parallel.degrees import Degrees

SHOWN: Final = tuple(p for p in PHASES if p != "explain")
CONSTANT: Final = 0.1  # exponent of what must not depend on a variable
LINEAR: Final = 1.1
FEW: Final = Degrees(dp=2, tp=2, pp=2, microbatches=2, zero=1)  # groups b to f of the paper's Table 7
MANY: Final = Degrees(dp=16, tp=8, pp=4, microbatches=8, zero=1)  # groups g to j


@dataclass(frozen=True)
class Series:
    """Cases that differ in one variable."""

    name: str
    figure: str  # of the paper
    values: tuple[int, ...]
    quick: tuple[int, ...]
    case: Callable[[int], Case]
    aim: float  # largest exponent


def _llama(how: Degrees, layers: int = 32, batch: int = 512, hidden: int = 4096, sequence: int = 128, heads: int = 32) -> Case:
    sizes = {"hidden": hidden, "ffn": hidden * 7 // 2, "sequence": sequence, "heads": heads}
    return Case("scaling", "llama3-8b", how, layers, batch, tuple(sizes.items()))


SERIES: Final = (
    Series("batch", "7b", (32, 128, 512, 2048), (32, 512), lambda n: _llama(FEW, batch=n), CONSTANT),
    Series("hidden", "7c", (1024, 2048, 4096, 8192, 16384), (1024, 4096), lambda n: _llama(FEW, hidden=n), CONSTANT),
    Series("sequence", "7d", (128, 1024, 8192, 65536), (128, 8192), lambda n: _llama(FEW, batch=32, hidden=128, sequence=n), CONSTANT),
    Series("heads", "7e", (8, 16, 32, 64, 128), (16, 32), lambda n: _llama(FEW, heads=n), CONSTANT),
    Series("pp", "7f", (2, 4, 8, 16, 32), (2, 4), lambda n: _llama(replace(FEW, pp=n)), LINEAR),
    Series("layers", "7g", (8, 16, 32, 64, 128), (4, 8), lambda n: _llama(MANY, layers=n), LINEAR),
    Series("dp", "7h", (4, 8, 16, 32, 64), (4, 64), lambda n: _llama(replace(MANY, dp=n)), CONSTANT),
    Series("micro-batches", "7i", (4, 8, 16, 32), (4, 8), lambda n: _llama(replace(MANY, microbatches=n)), LINEAR),
    Series("tp", "7j", (2, 4, 8, 16, 32), (2, 8), lambda n: _llama(replace(MANY, tp=n)), CONSTANT),
)
NAMES: Final = tuple(s.name for s in SERIES)
QUICK_LAYERS: Final = 4


@dataclass(frozen=True)
class Result:
    """A series, measured: for every value the runs, in the order in which they took turns."""

    series: Series
    values: tuple[int, ...]
    runs: tuple[tuple[Run, ...], ...]

    @property
    def seconds(self) -> list[dict[str, float]]:
        """By phase, of the quickest run."""
        return [least([r.seconds for r in mine], PHASES) for mine in self.runs]

    @property
    def totals(self) -> list[float]:
        """The quickest run, building the plan included."""
        return [least([{"total": r.total} for r in mine], ["total"])["total"] for mine in self.runs]

    @property
    def exponent(self) -> float:
        return exponent(self.values, self.totals)

    def exponents(self) -> dict[str, float]:
        found = self.seconds
        return {p: exponent(self.values, [s[p] for s in found]) for p in SHOWN if all(s.get(p) for s in found)}

    @property
    def proved(self) -> bool:
        return all(r.verdict == "PROVED" for mine in self.runs for r in mine)

    @property
    def text(self) -> str:
        met = "" if self.exponent <= self.series.aim else ", missed"
        return f"exponent {self.exponent:+.2f} (aim ≤ {self.series.aim:g}{met})"

    def json(self) -> dict[str, Any]:
        cases = []
        for v, mine, seconds, total in zip(self.values, self.runs, self.seconds, self.totals, strict=True):
            r = mine[0]
            verdicts = sorted({x.verdict for x in mine})
            counts = {"ranks": r.ranks, "ops": r.ops, "obligations": r.obligations, "runs": [round(x.total, 3) for x in mine]}
            cases.append({"value": v, "verdict": ", ".join(verdicts), **counts, "seconds": seconds, "total_seconds": round(total, 3)})
        return {
            "variable": self.series.name,
            "figure": self.series.figure,
            "exponent": round(self.exponent, 3),
            "aim": self.series.aim,
            "exponents": {p: round(e, 3) for p, e in self.exponents().items()},
            "cases": cases,
        }

    def table(self) -> Table:
        t = Table(title=f"{self.series.name}: {self.text}", title_justify="left", title_style="bold", box=None, pad_edge=False)
        for c in (self.series.name, "ranks", "ops", *SHOWN, "total", "least", "most", "verdict"):
            t.add_column(c, justify="right", no_wrap=True)
        for v, mine, seconds, total in zip(self.values, self.runs, self.seconds, self.totals, strict=True):
            cells = [f"{seconds[p]:.2f}" if p in seconds else "–" for p in SHOWN]
            spread = [f"{f(r.total for r in mine):.2f}" for f in (min, max)]
            t.add_row(str(v), str(mine[0].ranks), str(mine[0].ops), *cells, f"{total:.2f}", *spread, ", ".join({r.verdict for r in mine}))
        fitted = self.exponents()
        cells = [f"{fitted[p]:+.2f}" if p in fitted else "–" for p in SHOWN]
        t.add_row("exponent", "", "", *cells, f"{self.exponent:+.2f}", "", "", "", style="dim")
        return t


def bench(
    only: Sequence[str] = NAMES, repeat: int = 3, quick: bool = False, progress: Callable[[str], None] = lambda text: None
) -> Iterator[Result]:
    """Series after series; `quick` takes two values of each and few layers, once."""
    chosen = [s for s in SERIES if s.name in only]
    for n, s in enumerate(chosen):
        values = s.quick if quick else s.values
        cases = [_shallow(s, v) if quick else s.case(v) for v in values]
        progress(f"{s.name} {', '.join(map(str, values))}")
        if n == 0:
            verified(cases[0])  # imports, caches
        runs = in_turns(cases, 1 if quick else repeat, lambda case, _: verified(case)[0])
        yield Result(s, values, tuple(tuple(mine) for mine in runs))


def _shallow(s: Series, value: int) -> Case:
    case = s.case(value)
    return case if s.name == "layers" else replace(case, layers=QUICK_LAYERS)


def picture(results: Sequence[Result]) -> str:
    """All series as one SVG."""
    plots = [Plot(r.series.name, r.text, tuple(map(float, r.values)), tuple(r.totals)) for r in results]
    return svg("Processor seconds of a whole verification, by variable", plots, "s")
