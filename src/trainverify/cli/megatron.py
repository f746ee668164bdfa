"""`trainverify megatron`: is Megatron-core's training step under its own options the one on a single device?"""

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

SETTINGS: Final = {"ignore_unknown_options": True}  # they are Megatron-core's


@guarded
def command(
    options: Annotated[
        list[str],
        typer.Argument(metavar="OPTIONS", help="As for Megatron-LM: --num-layers 2 --tensor-model-parallel-size 2 --sequence-parallel …"),
    ],
    world_size: Annotated[
        int | None,
        typer.Option("--world-size", min=2, max=65536, metavar="N", help="Ranks; by default the product of the sizes of parallelism."),
    ] = None,
    all_ranks: Annotated[bool, typer.Option("--all-ranks", help="Capture every rank, also of more than 16.")] = False,
    accept_sampled: Annotated[
        bool, typer.Option("--accept-sampled", help="PROVED(sampled), of captured ranks only, counts as proved: exit code 0.")
    ] = False,
    accept_shims: Annotated[
        bool, typer.Option("--accept-shims", help="Take the shims as they are. No real run checks them yet: a proof on them is UNKNOWN.")
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
    """Is the training step of Megatron-core, with its own options, equal to the same without parallelism? It runs on fake tensors."""
    try:
        from trainverify.frameworks import megatron
        from trainverify.frameworks.job import How, verdict
        from trainverify.frameworks.trust import checked
        from trainverify.torch.cache import Cache, default_folder
        from trainverify.translate.targets import CaptureError
    except ImportError as error:
        raise Refused(str(error)) from error

    def work(tell: Callable[[str], None]) -> Report:
        try:
            job = megatron.job(tuple(options), world_size)
            cache = Cache(default_folder(), "megatron", job.framework) if cached else None
            trust = None if accept_shims else partial(checked, table=OPS, tell=tell)
            report = verdict(job, OPS, tell, How(points, seed, engine, folder, all_ranks), cache, trust)
        except CaptureError as error:
            raise Refused(str(error)) from error
        if cache is not None and cache.used:
            used = f"{cache.used} captures of the same sources and arguments were used again (--no-cache captures anew): {cache.folder}"
            report = replace(report, notes=(*report.notes, used))
        return replace(report, accept_sampled=accept_sampled)

    return judged("megatron", "the ranks of Megatron-core", work, as_json, timeout, memory)
