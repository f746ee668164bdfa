"""Programs of the campaign, each run and judged."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from tools.step_campaigns.outcomes import Outcome
from tools.step_campaigns.verdicts import verdict
from tools.steps.gloo import Pair, truth
from tools.steps.programs import program
from tools.steps.verdicts import judge


def judged(seeds: Sequence[int], seconds: float) -> Iterator[Outcome]:
    """The outcome of every seed, in order, with one pair of rank processes."""
    pair = Pair()
    with tempfile.TemporaryDirectory() as folder:
        try:
            for seed in seeds:
                made = program(seed)
                path = Path(folder) / f"program_{seed}.py"
                path.write_text(made.source)
                yield Outcome(made, truth(pair, made, path), verdict(judge, path, seconds))
        finally:
            pair.stop()
