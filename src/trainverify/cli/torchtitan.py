"""`trainverify torchtitan`: is torchtitan's training step under its own options the one on a single device?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Final

import typer

from trainverify.cli.judged import EngineName, Memory, judged
from trainverify.ops import OPS
from trainverify.refusal import Refused
from trainverify.report import Report
from trainverify.terminal import AsJson, Timeout, guarded

SETTINGS: Final = {"ignore_unknown_options": True}  # they are torchtitan's


@guarded
def command(
    options: Annotated[
        list[str],
        typer.Argument(metavar="OPTIONS", help="As for torchtitan: --config llama3_8b --parallelism.tensor_parallel_degree 8 …"),
    ],
    world_size: Annotated[
        int | None,
        typer.Option("--world-size", min=2, max=65536, metavar="N", help="Ranks; by default the product of the degrees of parallelism."),
    ] = None,
    all_ranks: Annotated[bool, typer.Option("--all-ranks", help="Capture every rank, also of more than 16.")] = False,
    accept_sampled: Annotated[
        bool, typer.Option("--accept-sampled", help="PROVED(sampled), of captured ranks only, counts as proved: exit code 0.")
    ] = False,
    accept_shims: Annotated[
        bool,
        typer.Option(
            "--accept-shims", help="Take the shims as they are. Else they are checked by a tiny real run; what is not makes UNKNOWN."
        ),
    ] = False,
    cached: Annotated[bool, typer.Option("--cache/--no-cache", help="Use captures of the same sources and arguments again.")] = True,
    folder: Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Write both programs to this folder.")] = None,
    as_json: AsJson = False,
    points: Annotated[int, typer.Option(min=1, max=1000, help="Random points to evaluate.")] = 3,
    seed: Annotated[int, typer.Option(min=0, help="Of the first random point.")] = 0,
    timeout: Timeout = None,
    memory: Memory = None,
    engine: EngineName = "algebra",
) -> int:
    """Is the training step of torchtitan, with its own options, equal to the same without parallelism? Its Trainer runs on fake tensors."""
    try:
        from trainverify.frameworks import torchtitan
        from trainverify.frameworks.job import How, verdict
        from trainverify.frameworks.trust import checked
        from trainverify.torch.cache import Cache, default_folder
        from trainverify.translate.targets import CaptureError
    except ImportError as error:
        raise Refused(str(error)) from error

    def work(tell: Callable[[str], None]) -> Report:
        try:
            job = torchtitan.job(tuple(options), world_size)
            cache = Cache(default_folder(), "torchtitan", job.framework) if cached else None
            trust = None if accept_shims else partial(checked, table=OPS, tell=tell)
            how = How(points, seed, engine, folder, all_ranks)
            report = verdict(job, OPS, tell, how, cache, trust)
        except CaptureError as error:
            raise Refused(str(error)) from error
        if cache is not None and cache.used:
            used = f"{cache.used} captures of the same sources and arguments were used again (--no-cache captures anew): {cache.folder}"
            report = replace(report, notes=(*report.notes, used))
        return replace(report, accept_sampled=accept_sampled)

    return judged("torchtitan", "the ranks of torchtitan", work, as_json, timeout, memory)
