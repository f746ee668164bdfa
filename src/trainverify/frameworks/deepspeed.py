"""DeepSpeed's ZeRO: what `trainverify deepspeed` verifies."""

from __future__ import annotations

from functools import partial

from trainverify.frameworks.deepspeed_options import package
from trainverify.frameworks.deepspeed_real import trial
from trainverify.frameworks.deepspeed_shims import cpu
from trainverify.frameworks.deepspeed_step import Alone, Ranks, facts
from trainverify.frameworks.job import Job, in_process
from trainverify.frameworks.versions import remark
from trainverify.graph.mesh import Mesh


def job(options: tuple[str, ...], world: int | None = None) -> Job:
    """The engine with this configuration, against the same step of PyTorch's on one device."""
    f = in_process(lambda: facts(options, world), "deepspeed")
    cpu()
    package()  # once, for all processes that are forked from this one
    name = f"deepspeed {f.version}"
    remarks = remark("deepspeed", f.version)
    given = Alone(options, f.world), Ranks(options, f.shims), f.shims
    return Job(name, Mesh({"dp": f.world}), f.batch, {"dp": "avg"}, *given, remarks, trial=partial(trial, options))
