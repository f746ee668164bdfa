"""Every parallelism and products of them, verified one after the other: `python -m tools.zoo_verdicts [--only TEXT] [--engine smt]`.

Prints a row for each and the time of all; exit code 1 if one is not as expected. Whole steps with clipping and AdamW at published widths:
two layers for the algebra, one (or one a stage) for the second engine, which reduces the sizes itself.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from dataclasses import dataclass, replace
from typing import Final, Literal

from trainverify.report import Verdict
from trainverify.verdicts import verify
from trainverify.zoo.parallel.degrees import Degrees
from trainverify.zoo.recipes import Wish


@dataclass(frozen=True)
class Row:
    """A combination, and the verdict that it has."""

    name: str
    wish: Wish
    verdict: Verdict = "PROVED"


def _row(
    model: str,
    layers: int | None = 2,
    packed: bool = False,
    master: bool = False,
    loss: str | None = None,
    capacity: int | None = None,
    **how: object,
) -> Row:
    degrees = Degrees(**how)  # type: ignore[arg-type]
    words = [f"{k}={v}" if v is not True else k for k, v in how.items()]
    others = {"packed": packed, "master": master, f"loss={loss}": loss is not None, f"capacity={capacity}": capacity is not None}
    words += [word for word, on in others.items() if on]
    name = f"{model} {' '.join(words) or 'alone'}"
    vocabulary = 50304 if model == GPT else None  # 50257 is odd: Megatron pads it
    return Row(name, Wish(model, degrees, layers=layers, vocabulary=vocabulary, packed=packed, master=master, loss=loss, capacity=capacity))


LLAMA, GPT, DEEPSEEK = "llama3-8b", "gpt2", "deepseek-16b"


ALONE: Final = (
    _row(LLAMA, dp=4),
    _row("resnet50", layers=None, dp=8),  # all blocks, 224 × 224
    _row("resnet152", layers=None, dp=2),
    _row(LLAMA, tp=4),
    _row("llama3-70b", tp=16),  # more ranks than key-value heads
    _row(LLAMA, tp=4, sp=True),
    _row(LLAMA, pp=2, microbatches=4, schedule="gpipe"),
    _row(LLAMA, pp=2, microbatches=4),
    _row(LLAMA, layers=4, pp=2, chunks=2, microbatches=4, schedule="interleaved"),
    _row(LLAMA, layers=3, pp=2, microbatches=2, stages=(2, 1)),
    _row(GPT, pp=2, microbatches=2),  # tied embeddings
    _row(LLAMA, cp=4, cp_kind="zigzag"),
    _row(LLAMA, cp=4, cp_kind="ring"),
    _row(LLAMA, cp=4, cp_kind="ulysses"),
    _row(DEEPSEEK, dp=4, ep=4),
    _row(LLAMA, dp=4, zero=1),
    _row(LLAMA, dp=4, zero=2, microbatches=2),
    _row(LLAMA, dp=4, zero=3),
    _row(LLAMA, dp=3, zero=1, shards="chunk"),
    _row(LLAMA, dp=3, zero=1, shards="flat"),
    _row(LLAMA, microbatches=4),
)

PRODUCTS: Final = (
    _row(LLAMA, dp=2, tp=2),
    _row(LLAMA, dp=2, tp=2, sp=True),
    _row(LLAMA, dp=2, pp=2, microbatches=2),
    _row(LLAMA, tp=2, pp=2, microbatches=2),
    _row(LLAMA, dp=2, tp=2, sp=True, pp=2, microbatches=4),
    _row(LLAMA, dp=2, tp=2, pp=2, microbatches=2, normalise="loss"),
    _row(LLAMA, layers=4, dp=2, tp=2, pp=2, chunks=2, microbatches=4, schedule="interleaved"),
    _row(LLAMA, dp=2, tp=4, sp=True, zero=1, microbatches=2),
    _row(LLAMA, dp=2, pp=2, zero=2, microbatches=2),
    _row(LLAMA, dp=2, tp=2, sp=True, zero=3),
    _row(LLAMA, dp=2, tp=2, sp=True, pp=2, zero=1, microbatches=2),
    _row(LLAMA, dp=512, zero=1),
    _row("llama3-70b", dp=8, tp=16, sp=True, zero=1, microbatches=2),
    _row("llama3-405b", dp=16, tp=8, sp=True, pp=2, zero=1, microbatches=4),
    _row(LLAMA, dp=3, zero=3, shards="flat", microbatches=2),
    _row(LLAMA, dp=4, pp=2, zero=1, shards="flat", microbatches=2),
    _row(GPT, layers=1, dp=5, zero=2, shards="chunk"),
    _row(LLAMA, dp=2, cp=2, cp_kind="zigzag", tp=2, microbatches=2),
    _row(LLAMA, dp=2, cp=2, cp_kind="ring", tp=2, pp=2, microbatches=2),
    _row(LLAMA, dp=2, cp=2, cp_kind="ulysses", tp=2, sp=True),
    _row(LLAMA, cp=2, cp_kind="ring", zero=1, dp=2),
    _row(LLAMA, dp=2, tp=2, packed=True),
    _row(LLAMA, dp=2, zero=1, master=True),
    _row(LLAMA, dp=2, tp=2, pp=2, microbatches=2, loss="per_sequence"),
    _row(GPT, dp=2, tp=2, sp=True, pp=2, microbatches=2),
    _row(GPT, dp=2, tp=2, pp=2, zero=3, microbatches=2),
    _row(GPT, dp=2, cp=2, cp_kind="ulysses", microbatches=2, zero=1),
    _row(DEEPSEEK, dp=4, ep=2, tp=2),
    _row("deepseek-671b", layers=4, dp=4, ep=2, cp=2, cp_kind="ulysses", tp=2, sp=True, pp=2, zero=1, microbatches=2),
    _row(DEEPSEEK, dp=4, ep=2, tp=2, sp=True, capacity=480),  # tokens beyond it are dropped
    _row("deepseek-236b", dp=4, ep=2, tp=2, sp=True, pp=2, microbatches=2),
    _row("deepseek-671b", layers=4, dp=8, ep=4, tp=4, pp=2, microbatches=2),
    _row(DEEPSEEK, dp=16, ep=4, tp=4, pp=2, zero=1, microbatches=4),
    _row("deepseek-671b", layers=4, dp=4, ep=2, tp=2, sp=True, zero=3),
)

ROWS: Final = (*ALONE, *PRODUCTS)


def _confirmed(model: str, layers: int = 1, **how: object) -> Row:
    return replace(_row(model, layers, **how), verdict="PROVED(reduced)")  # type: ignore[arg-type]


CONFIRMED: Final = (  # by stages and the solver alone
    _confirmed(LLAMA, dp=2),
    _confirmed(LLAMA, tp=2),
    _confirmed(LLAMA, tp=2, sp=True),
    _confirmed(LLAMA, microbatches=2),
    _confirmed(LLAMA, cp=2, cp_kind="ulysses"),
    _confirmed(LLAMA, dp=2, zero=1),
    _confirmed(LLAMA, dp=2, zero=2),
    _confirmed(LLAMA, dp=2, zero=3),
    _confirmed(LLAMA, dp=3, zero=1, shards="chunk"),
    _confirmed(LLAMA, dp=2, tp=2),
    _confirmed(LLAMA, dp=2, tp=2, sp=True, zero=1),
    _confirmed(LLAMA, dp=2, zero=1, master=True),
    _confirmed(LLAMA, dp=2, loss="per_sequence"),
    _confirmed(LLAMA, dp=2, tp=2, loss="sum"),
    _confirmed(LLAMA, dp=2, microbatches=2, normalise="loss"),
    _confirmed(GPT, dp=2),
    _confirmed(GPT, dp=2, zero=1),
    _confirmed(GPT, dp=2, zero=3),
    _confirmed(GPT, layers=2, pp=2, microbatches=2),  # tied embeddings
    _confirmed(DEEPSEEK, dp=2),  # latent attention
    _confirmed(DEEPSEEK, tp=2),
    _confirmed("deepseek-671b", dp=2, zero=1),
)

Proof = Literal["algebra", "smt"]
TABLES: Final[dict[Proof, tuple[Row, ...]]] = {"algebra": ROWS, "smt": CONFIRMED}


def checked(row: Row, engine: Proof = "algebra") -> tuple[bool, str]:
    """Whether a combination has its verdict, and a line about it."""
    began = time.process_time()
    logical, plan = row.wish.build()
    report = verify(logical, plan, points=1, engine=engine)
    took, peak = time.process_time() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    good = report.verdict == row.verdict
    shown = f"{report.verdict:{len(row.verdict)}}"
    text = f"{'ok   ' if good else 'WRONG'} {row.name:88} {plan.size:5} ranks  {shown} {took:6.2f} s  {peak:5} MB"
    return good, text if good else f"{text}  {report.reason}"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.zoo_verdicts", description=__doc__)
    parser.add_argument("--only", default="", help="combinations whose names contain this")
    parser.add_argument("--engine", choices=tuple(TABLES), default="algebra", help="what proves; smt has a table of its own")
    given = parser.parse_args(arguments)
    rows = [r for r in TABLES[given.engine] if given.only in r.name]
    if not rows:
        print(f"error: no combination is called {given.only!r}", file=sys.stderr)
        return 2
    wrong, began, clock = 0, time.process_time(), time.monotonic()
    for row in rows:
        good, text = checked(row, given.engine)
        wrong += not good
        print(text, flush=True)
    took, passed = time.process_time() - began, time.monotonic() - clock
    print(f"{len(rows) - wrong} of {len(rows)} as expected, {took:.1f} s of processor time, {passed:.1f} s on the clock")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
