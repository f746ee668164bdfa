"""Transformers with accelerate: what `trainverify transformers` verifies."""

from __future__ import annotations

from functools import partial

from trainverify.frameworks.job import Job, in_process
from trainverify.frameworks.transformers_options import package
from trainverify.frameworks.transformers_real import trial
from trainverify.frameworks.transformers_step import Alone, Ranks, facts
from trainverify.frameworks.versions import remark
from trainverify.graph.mesh import Mesh


def job(options: tuple[str, ...], world: int | None = None) -> Job:
    """The Trainer with these options, against the same without parallelism."""
    f = in_process(lambda: facts(options, world), "transformers")
    package("transformers.trainer")  # once, for all processes that are forked from this one
    others = tuple(r for name, version in f.versions.items() for r in remark(name, version))
    name = ", ".join(f"{n} {v}" for n, v in f.versions.items())
    real = partial(trial, options, tuple(f.mesh))
    return Job(name, Mesh(f.mesh), f.batch, f.loss, Alone(options, f.ranks), Ranks(options, f.shims), f.shims, others, trial=real)
