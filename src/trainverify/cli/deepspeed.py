"""`trainverify deepspeed`: is the training step of DeepSpeed's engine under its own configuration the one on a single device?"""

from __future__ import annotations

from typing import Annotated, Final

import typer

from trainverify.cli.job import AcceptSampled, AcceptShims, AllRanks, Asked, Cached, Out, Points, Seed, verified
from trainverify.cli.judged import EngineName, Memory
from trainverify.refusal import Refused
from trainverify.terminal import AsJson, Timeout, guarded

SETTINGS: Final = {"ignore_unknown_options": True}  # they are DeepSpeed's


@guarded
def command(
    options: Annotated[
        list[str],
        typer.Argument(
            metavar="[FILE] OPTIONS",
            help="A file with model(), loss(model, batch) and batch; --deepspeed_config FILE; --mean-of-micro-batches.",
        ),
    ],
    world_size: Annotated[
        int | None,
        typer.Option("--world-size", min=2, max=65536, metavar="N", help="Ranks, all of them data-parallel."),
    ] = None,
    all_ranks: AllRanks = False,
    accept_sampled: AcceptSampled = False,
    accept_shims: AcceptShims = False,
    cached: Cached = False,
    folder: Out = None,
    as_json: AsJson = False,
    points: Points = 3,
    seed: Seed = 0,
    timeout: Timeout = None,
    memory: Memory = None,
    engine: EngineName = "algebra",
) -> int:
    """Is the training step of DeepSpeed's engine (ZeRO 1, 2, 3), with its own configuration, equal to PyTorch's on one device?

    It runs on fake tensors.
    """
    try:
        from trainverify.frameworks import deepspeed
    except ImportError as error:
        raise Refused(str(error)) from error
    asked = Asked(points, seed, engine, folder, all_ranks, accept_sampled, accept_shims, cached)
    return verified(
        "deepspeed", "the ranks of DeepSpeed", lambda: deepspeed.job(tuple(options), world_size), asked, as_json, timeout, memory
    )
