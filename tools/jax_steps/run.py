"""Programs of the campaign, each run and judged."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from tools.jax_steps.devices import Runner, host_devices, truth
from tools.jax_steps.programs import program
from tools.step_campaigns.outcomes import Outcome
from tools.step_campaigns.verdicts import verdict


def judged(seeds: Sequence[int], seconds: float) -> Iterator[Outcome]:
    """The outcome of every seed, in order, with one process that runs programs."""
    host_devices()
    from tools.jax_steps.verdicts import judge  # JAX: after the devices are set

    runner = Runner()
    with tempfile.TemporaryDirectory() as folder:
        try:
            for seed in seeds:
                made = program(seed)
                path = Path(folder) / f"program_{seed}.py"
                path.write_text(made.source)
                yield Outcome(made, truth(runner, path, made.planted is not None), verdict(judge, path, seconds))
        finally:
            runner.stop()
