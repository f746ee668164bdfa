"""torchtitan: what `trainverify torchtitan` verifies."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from trainverify.frameworks.job import Job, in_process
from trainverify.frameworks.torchtitan_real import trial
from trainverify.frameworks.torchtitan_shims import ALL_SHIMS, part, trainer_module
from trainverify.frameworks.torchtitan_step import BACKEND, Alone, Facts, Ranks, facts
from trainverify.frameworks.torchtitan_tiny import Tiny
from trainverify.frameworks.versions import remark
from trainverify.graph.mesh import Mesh
from trainverify.translate.targets import CaptureError


def with_module(options: tuple[str, ...]) -> tuple[str, ...]:
    """The options with `--module`, which the name of most configurations begins with."""
    given = [o.split("=", 1) for o in options]
    if any(o[0] == "--module" for o in given):
        return options
    trainer_module()
    name = next(
        (o[1] if len(o) > 1 else (given[i + 1][0] if i + 1 < len(given) else "") for i, o in enumerate(given) if o[0] == "--config"), ""
    )
    found = [m for m in part("models")._supported_models if name.startswith(f"{m}_")]
    if not found:
        raise CaptureError("say --module and --config as torchtitan has them: --module llama3 --config llama3_8b")
    return ("--module", max(found, key=len), *options)


def job(options: tuple[str, ...], world: int | None = None) -> Job:
    """torchtitan with these options, against the same without parallelism."""
    options = with_module(options)
    f = in_process(lambda: facts(options, world), "torchtitan")
    trainer_module()  # once, for all processes that are forked from this one
    return replace(_job(options, f), trial=partial(trial, options, Tiny(tuple(f.mesh))))


def _job(options: tuple[str, ...], f: Facts) -> Job:
    shims = tuple(s for s in ALL_SHIMS if s.name in f.shims)
    other: tuple[str, ...] = () if f.backend == BACKEND else (f"its SPMD backend {BACKEND}, not {f.backend}",)
    other += remark("torchtitan", f.version)
    return Job(f"torchtitan {f.version}", Mesh(f.mesh), f.batch, f.loss, Alone(options, f.rows), Ranks(options), shims, other)
