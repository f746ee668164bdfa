"""`trainverify transformers`: is the training step of Transformers' Trainer under its own options the one on a single device?"""

from __future__ import annotations

from typing import Annotated, Final

import typer

from trainverify.cli.job import AcceptSampled, AcceptShims, AllRanks, Asked, Cached, Out, Points, Seed, verified
from trainverify.cli.judged import EngineName, Memory
from trainverify.refusal import Refused
from trainverify.terminal import AsJson, Timeout, guarded

SETTINGS: Final = {"ignore_unknown_options": True}  # they are Transformers'


@guarded
def command(
    options: Annotated[
        list[str],
        typer.Argument(
            metavar="OPTIONS", help="As for run_clm.py and the Trainer: --model_type llama --tp_size 2 --gradient_accumulation_steps 2 …"
        ),
    ],
    world_size: Annotated[
        int | None,
        typer.Option(
            "--world-size",
            min=2,
            max=65536,
            metavar="N",
            help="Ranks; by default the product of the sizes of parallelism; with --fsdp, or none, all are data-parallel.",
        ),
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
    """Is the training step of Transformers' Trainer, with its own options, equal to the same without parallelism?

    It runs on fake tensors.
    """
    try:
        from trainverify.frameworks import transformers
    except ImportError as error:
        raise Refused(str(error)) from error
    asked = Asked(points, seed, engine, folder, all_ranks, accept_sampled, accept_shims, cached)
    return verified(
        "transformers", "the ranks of Transformers", lambda: transformers.job(tuple(options), world_size), asked, as_json, timeout, memory
    )
