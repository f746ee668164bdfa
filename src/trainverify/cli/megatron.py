"""`trainverify megatron`: is Megatron-core's training step under its own options the one on a single device?"""

from __future__ import annotations

from typing import Annotated, Final

import typer

from trainverify.cli.job import AcceptSampled, AcceptShims, AllRanks, Asked, Cached, Out, Points, Seed, verified
from trainverify.cli.judged import EngineName, Memory
from trainverify.refusal import Refused
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
    """Is the training step of Megatron-core, with its own options, equal to the same without parallelism? It runs on fake tensors."""
    try:
        from trainverify.frameworks import megatron
    except ImportError as error:
        raise Refused(str(error)) from error
    asked = Asked(points, seed, engine, folder, all_ranks, accept_sampled, accept_shims, cached)
    return verified(
        "megatron", "the ranks of Megatron-core", lambda: megatron.job(tuple(options), world_size), asked, as_json, timeout, memory
    )
