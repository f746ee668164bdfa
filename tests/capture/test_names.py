"""Names of tensors, where the step refers to a model and to a wrapper of a part of it."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is absent: captured code is not tested")

from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

import trainverify.torch as tvt  # noqa: E402

BATCH = {"x": tvt.Reals((6, 3), "(dp b) k")}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        self.factor = 1.0


def trained(model: Any, called: Any, factor: float = 1.0) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch: Any) -> Any:
        optimizer.zero_grad()
        loss = called(batch["x"]).square().mean() * getattr(model, "factor", 1.0)
        (loss * factor).backward()
        optimizer.step()
        return loss

    return step


def reference() -> Any:
    model = Model()
    return trained(model, model.body)


def wraps_a_part(rank: int, world: int) -> Any:
    model = Model()
    return trained(model, DistributedDataParallel(model.body))


def wraps_a_part_and_doubles(rank: int, world: int) -> Any:
    model = Model()
    return trained(model, DistributedDataParallel(model.body), 2.0)


def has_the_part_alone(rank: int, world: int) -> Any:
    body = Model().body
    return trained(body, DistributedDataParallel(body))


@pytest.mark.parametrize(
    ("ranks", "verdict"), [(wraps_a_part, "PROVED"), (wraps_a_part_and_doubles, "REFUTED"), (has_the_part_alone, "UNKNOWN")]
)
def test_wrapper_of_a_part(ranks: Any, verdict: str) -> None:
    report = tvt.verify(reference, ranks, 2, BATCH, {"dp": 2}, loss={"dp": "avg"}, points=1)
    assert report.verdict == verdict, report.reason
    assert verdict != "UNKNOWN" or "models with the same names" in report.reason


def two_models(world: int, frozen: bool) -> Any:
    one, other = (nn.Sequential(nn.Linear(3, 2), nn.Tanh()) for _ in range(2))
    optimizer = torch.optim.SGD([*one.parameters(), *other.parameters()], lr=0.1)
    called = [DistributedDataParallel(m) for m in (one, other)] if world > 1 else [one, other]
    steps = 0

    def step(batch: Any) -> Any:
        nonlocal steps
        steps += 1
        optimizer.zero_grad()
        loss = sum(m(batch["x"]) for m in called).square().mean()  # type: ignore[union-attr]
        loss.backward()
        optimizer.step()
        if frozen and steps == 3:
            one.eval()
        return loss

    return step


@pytest.mark.parametrize(("frozen", "verdict"), [(False, "PROVED"), (True, "UNKNOWN")], ids=["trains_on", "first_model_in_eval"])
def test_models_with_parts_of_one_name(frozen: bool, verdict: str) -> None:
    """What the third step leaves shows in none, and two models have parts that are called alike."""
    batch = {"x": tvt.Reals((6, 3))}
    report = tvt.verify(lambda: two_models(1, False), lambda r, w: two_models(w, frozen), 2, batch, {"dp": 2}, points=1)
    assert report.verdict == verdict, report.reason
