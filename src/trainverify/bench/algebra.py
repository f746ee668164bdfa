"""`trainverify bench algebra`: what a proof by tensor algebra costs, and how that grows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

from rich.table import Table

from trainverify.bench.case import Case
from trainverify.bench.clock import exponent
from trainverify.bench.measure import PHASES, PROVE, Measurement, measure
from trainverify.zoo.parallel import Degrees

BASE: Final = {"layers": 2, "hidden": 1024, "heads": 128, "kv_heads": 128, "ffn": 4096, "vocabulary": 128256, "sequence": 8192}
HOW: Final = Degrees(dp=2, tp=2, microbatches=2)

CONSTANT: Final = 1.2  # what must not depend on a parameter may grow by so much


@dataclass(frozen=True)
class Series:
    """Cases that differ in one parameter; `linear` says that the cost should follow it, else that it should not."""

    name: str
    values: tuple[int, ...]
    quick: tuple[int, ...]
    case: Callable[[int], Case]
    linear: bool


def _case(degrees: dict[str, Any] | None = None, **sizes: int) -> Case:
    how = replace(HOW, **(degrees or {}))
    return Case("", "llama3-8b", how, sizes=tuple({**BASE, **sizes, "batch": how.dp * how.microbatches}.items()))


def _gpt(layers: int) -> Case:
    """GPT-2 XL: means and biases, so that sums over the residual stream and its gradient are taken in every layer."""
    return Case("", "gpt2-xl", replace(HOW, tp=1), layers)


SERIES: Final = (
    Series("layers", (2, 4, 8, 16, 32), (2, 4), lambda n: _case(layers=n), True),
    Series("layers of GPT", (2, 12, 24, 48, 96), (2, 12), _gpt, True),
    Series("micro-batches", (2, 4, 8, 16), (2, 4), lambda n: _case({"microbatches": n}), True),
    Series("layers and micro-batches, n of each", (2, 4, 8, 32), (2, 4), lambda n: _case({"microbatches": n}, layers=n), True),
    Series("dp", (2, 8, 32, 128, 512), (2, 32), lambda n: _case({"dp": n}), False),
    Series("tp", (2, 8, 32, 64), (2, 8), lambda n: _case({"tp": n}), False),
    Series("hidden", (256, 1024, 4096, 16384), (256, 1024), lambda n: _case(heads=64, kv_heads=64, hidden=n, ffn=4 * n), False),
)


@dataclass(frozen=True)
class Result:
    """A series, measured."""

    series: Series
    values: tuple[int, ...]
    found: tuple[Measurement, ...]

    @property
    def size(self) -> list[float]:
        """What the cost is compared with: the parameter, or the ops of the folded programs where it should be linear."""
        return [float(m.folded_ops) for m in self.found] if self.series.linear else [float(v) for v in self.values]

    @property
    def ratio(self) -> float:
        """Of the dearest case to the first; where cost should be linear, per op."""
        costs = [m.prove / (m.folded_ops if self.series.linear else 1) for m in self.found]
        return max(costs) / costs[0]

    @property
    def exponent(self) -> float:
        return exponent(self.size, [m.prove for m in self.found])

    def exponents(self) -> dict[str, float]:
        phases = [p for p in PHASES if all(p in m.seconds for m in self.found)]
        return {p: exponent(self.size, [m.seconds[p] for m in self.found]) for p in phases}

    def json(self) -> dict[str, Any]:
        return {
            "parameter": self.series.name,
            "expected": "linear" if self.series.linear else "constant",
            "against": "folded ops" if self.series.linear else self.series.name,
            "ratio": round(self.ratio, 3),
            "exponent": round(self.exponent, 3),
            "exponents": {p: round(e, 3) for p, e in self.exponents().items()},
            "cases": [{"value": v, **m.json()} for v, m in zip(self.values, self.found, strict=True)],
        }

    def table(self) -> Table:
        t = Table(title=f"{self.series.name}: {self.verdict}", title_justify="left", title_style="bold", box=None, pad_edge=False)
        for c in (
            self.series.name.split(",")[0],
            "ranks",
            "folded ops",
            *PHASES,
            "prove",
            "peak MB",
            "ops/s",
            "ops/s, all ranks",
            "proved",
        ):
            t.add_column(c, justify="right", no_wrap=True)
        for v, m in zip(self.values, self.found, strict=True):
            cells = [f"{m.seconds[p]:.3f}" if p in m.seconds else "–" for p in PHASES]
            peak = max((m.megabytes[p] for p in PROVE if p in m.megabytes), default=None)
            shown = "–" if peak is None else f"{peak:.0f}"
            proved = "all" if not m.failed else f"{m.obligations - m.failed} of {m.obligations}"
            t.add_row(
                str(v), str(m.ranks), str(m.folded_ops), *cells, f"{m.prove:.3f}", shown, f"{m.rate:.0f}", f"{m.rate_all:.0f}", proved
            )
        fitted = self.exponents()
        cells = [f"{fitted[p]:+.2f}" if p in fitted else "–" for p in PHASES]
        t.add_row("exponent", "", "", *cells, f"{self.exponent:+.2f}", "", "", "", "", style="dim")
        return t

    @property
    def verdict(self) -> str:
        if self.series.linear:
            return f"prove time per op within {self.ratio:.2f}× of the first case, exponent {self.exponent:.2f} against ops"
        return f"prove time within {self.ratio:.2f}× of the first case (aim {CONSTANT}×)"


def bench(quick: bool = False, only: str | None = None, progress: Callable[[str], None] = lambda text: None) -> Iterator[Result]:
    """All series, one after the other; `quick` takes few values, once, without memory."""
    for s in SERIES:
        if only is None or s.name == only:
            values = s.quick if quick else s.values
            progress(f"{s.name} {', '.join(map(str, values))}")
            yield Result(s, values, tuple(measure([s.case(v) for v in values], repeat=1 if quick else 5, memory=not quick)))
