"""Megatron-core: what `trainverify megatron` verifies."""

from __future__ import annotations

from functools import partial

from trainverify.frameworks.job import Job, in_process
from trainverify.frameworks.megatron_real import shims_of, trial
from trainverify.frameworks.megatron_step import Alone, Ranks, facts
from trainverify.frameworks.versions import remark
from trainverify.graph.mesh import Mesh


def job(options: tuple[str, ...], world: int | None = None) -> Job:
    """Megatron-core with these options, against the same without parallelism."""
    f = in_process(lambda: facts(options, world), "megatron")
    others = remark("megatron-core", f.version)
    reference, ranks = Alone(options, f.rows // f.micro_rows), Ranks(options, f.micro_batches)
    name = f"Megatron-core {f.version}"
    return Job(name, Mesh(f.mesh), f.batch, "whole", reference, ranks, shims_of(f), others, trial=partial(trial, options, f))
