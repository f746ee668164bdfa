"""Data-parallel ResNet: synchronised batch norms are the step on one device, local ones are not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from trainverify.build.tape import BuildError
from trainverify.verdicts import verify
from trainverify.zoo.parallel.degrees import Degrees
from trainverify.zoo.parallel.resnet import resnet_plan, resnet_step
from verdicts.changes import Change, attrs, edited
from zoo.parallel.mistakes import skipped
from zoo.parallel.resnet import HOW, SMALL, base


def test_synchronised_batch_norm_agrees() -> None:
    """PROVED by the algebra, as at any size."""
    report = verify(*base(), points=1)
    assert report.verdict == "PROVED"
    assert {(o.status, o.engine) for o in report.obligations} == {("proved", "algebra")}, report.reason
    assert {o.of for o in base()[0].outputs if o.role == "parameter"} == set(base()[0].parameters)


def test_bottlenecks_and_the_large_stem_agree() -> None:
    config = replace(SMALL, bottleneck=True, stem="large", size=(12, 8))
    report = verify(resnet_step(config), resnet_plan(config, Degrees(dp=3)), points=1)
    assert report.verdict in ("PROVED", "UNKNOWN")
    assert {o.name for o in report.obligations} >= {"loss"}
    assert {o.status for o in report.obligations} <= {"agreed", "proved"}, report.reason


def test_local_batch_norm_is_refuted() -> None:
    report = verify(resnet_step(SMALL), resnet_plan(SMALL, HOW, synchronised=False), points=1)
    assert report.verdict == "REFUTED"
    assert report.place is not None
    assert report.place.tensor == "bn1.running_mean.new"


BUGS: dict[str, tuple[str, Change]] = {
    # bug: (the wrong tensor, the change)
    "loss of own images": ("loss", skipped("all", "loss")),
    "squares of own images only": ("bn1.squares", skipped("all", "bn1.squares")),
    "statistics averaged": ("layer1.0.bn1.sum", attrs("all", "layer1.0.bn1.sum", op="avg")),
    "divided by the number of own elements": ("layer2.0.bn2.var", attrs("all", "layer2.0.bn2.var", value=3 * 3 * 2)),
    "gradient of the statistics of own images only": ("bn1.sum.part.grad", skipped("all", "bn1.sum.part.grad")),
    "gradient of a convolution not added up": ("conv1.weight.grad.dp", skipped("all", "conv1.weight.grad.dp")),
    "biased variance kept": ("bn1.var.unbiased", attrs("all", "bn1.var.unbiased", value=6 * 6 * 4)),
}


@pytest.mark.parametrize("bug", BUGS)
def test_bug_is_refuted(bug: str) -> None:
    tensor, change = BUGS[bug]
    logical, plan = base()
    report = verify(logical, change(plan), points=1)
    assert report.verdict == "REFUTED", (report.reason, report.findings)
    assert report.place is not None
    assert report.place.tensor == tensor
    assert tensor in edited(plan, change(plan))


@pytest.mark.parametrize(
    ("how", "why"), [(Degrees(dp=2, tp=2), "nothing else"), (Degrees(dp=4), "6 images of the batch do not divide among 4")]
)
def test_refused(how: Degrees, why: str) -> None:
    with pytest.raises(BuildError, match=why):
        resnet_plan(SMALL, how)
