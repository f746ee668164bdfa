"""torchtitan's step on one device, which its parallel ones are compared with, against one written from the definition of Llama."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

torchtitan = pytest.importorskip("torchtitan", reason="torchtitan is absent: make frameworks has an environment with it")

from trainverify.frameworks.job import How, Job, in_process, verdict  # noqa: E402
from trainverify.frameworks.torchtitan import with_module  # noqa: E402
from trainverify.frameworks.torchtitan_shims import trainer_module  # noqa: E402
from trainverify.frameworks.torchtitan_step import Alone, facts  # noqa: E402
from trainverify.graph.mesh import Mesh  # noqa: E402
from trainverify.ops import OPS  # noqa: E402
from trainverify.report import Report  # noqa: E402

sys.path.insert(0, str(Path(__file__).parent / "sources"))

from plain_llama import Sizes, plain  # noqa: E402

DEBUG = Sizes(vocabulary=2048, dim=256, hidden=768, heads=16, kv_heads=16, layers=2, length=64, theta=500_000.0, lr=4e-4)
FLAT = replace(DEBUG, layers=1, scaled=False)


class One:
    """torchtitan without parallelism, as the only rank."""

    def __init__(self, alone: Alone):
        self.alone = alone

    def __call__(self, rank: int, world: int) -> Any:
        return self.alone()


def compared(config: str, sizes: Sizes) -> Report:
    options = with_module(("--module", "small_llama", "--config", config, "--parallelism.tensor_parallel_degree", "2"))
    found = in_process(lambda: facts(options, 2), "torchtitan")
    trainer_module()
    one = One(Alone(options, found.rows))
    job = Job("torchtitan", Mesh({"one": 1}), found.batch, "whole", partial(plain, sizes), one, ())
    return verdict(job, OPS, lambda text: None, How(points=3))


def test_the_step_agrees() -> None:
    """Expected: all of the step agrees on random points; it is not proved, since rotations of scaled waves are written in other cases."""
    report = compared("two_layers", DEBUG)
    assert {o.status for o in report.obligations} <= {"agreed", "proved"}
    assert len(report.obligations) > 60


def test_the_loss_is_proved() -> None:
    report = compared("unscaled", FLAT)
    assert {o.status for o in report.obligations} <= {"agreed", "proved"}
    assert next(o for o in report.obligations if o.name == "loss").status == "proved"


def test_another_step_is_refuted() -> None:
    """Expected: REFUTED, since norms add another number."""
    assert compared("two_layers", replace(DEBUG, eps=1e-3)).verdict == "REFUTED"
