"""Right code in an unusual form, and a wrong twin of each."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is absent: captured code is not tested")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402

import trainverify.torch as tvt  # noqa: E402
from trainverify.report import Report  # noqa: E402

BATCH = {"x": tvt.Reals((6, 4), "(dp b) k")}


class Step:
    """A data-parallel step of a linear layer; a program changes one part of it."""

    def __init__(
        self,
        factor: Callable[[int, int, Any], Any] = lambda rank, world, x: 1.0,
        returned: Callable[[Any], Any] = lambda loss: loss,
        optimizer: Callable[[Any], Any] = lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    ):
        self.factor, self.returned, self.optimizer = factor, returned, optimizer

    def __call__(self, rank: int, world: int) -> Any:
        model = nn.Linear(4, 3)
        optimizer = self.optimizer(model)

        def step(batch: Any) -> Any:
            optimizer.zero_grad()
            loss = model(batch["x"]).square().mean() * self.factor(rank, world, batch["x"])
            loss.backward()
            if world > 1:
                for p in model.parameters():
                    dist.all_reduce(p.grad, op=dist.ReduceOp.AVG)
            optimizer.step()
            return self.returned(loss)

        return step


def judged(ranks: Step, reference: Step | None = None, loss: Any = None) -> Report:
    reference = reference or Step()
    return tvt.verify(lambda: reference(0, 1), ranks, 2, BATCH, {"dp": 2}, loss=loss or {"dp": "avg"}, points=1)


# -- messages that are constants ----------------------------------------------------------------------------------------------


def counted(rank: int, world: int, x: Any) -> Any:
    """1 on two ranks: the sum of ranks."""
    found = torch.tensor([float(rank), 1.0])
    dist.all_reduce(found)
    return found[0] / (found[1] - 1)


def miscounted(rank: int, world: int, x: Any) -> Any:
    return counted(rank + 1, world, x)


@pytest.mark.parametrize(("factor", "verdict"), [(counted, "PROVED"), (miscounted, "REFUTED")])
def test_constants_that_differ_by_rank(factor: Any, verdict: str) -> None:
    assert judged(Step(factor)).verdict == verdict


def test_ranks_that_stack_what_others_do_not() -> None:
    """UNKNOWN: rank 0 sends a stack of numbers, which are reduced one by one, and rank 1 zeros."""

    def factor(rank: int, world: int, x: Any) -> Any:
        found = torch.zeros(2) if rank else torch.stack([x.detach().square().sum() + 1, torch.tensor(1.0)])
        dist.all_reduce(found)
        return found[1]

    report = judged(Step(factor))
    assert report.verdict == "UNKNOWN"
    assert "in other pieces" in report.reason


# -- losses --------------------------------------------------------------------------------------------------------------------


def nothing(loss: Any) -> None:
    return None


def test_a_step_without_a_loss() -> None:
    """PROVED, with a warning; REFUTED where its updates differ."""
    silent = Step(returned=nothing)
    report = judged(silent, silent)
    assert report.verdict == "PROVED"
    assert [(f.code, f.severity) for f in report.findings] == [("TV308", "warning")]
    assert judged(Step(lambda *args: 0.5, nothing), silent).verdict == "REFUTED"


@pytest.mark.parametrize(("ranks", "reference"), [(nothing, lambda loss: loss), (lambda loss: loss, nothing)])
def test_a_loss_that_only_one_side_returns(ranks: Any, reference: Any) -> None:
    """UNKNOWN, with what to do."""
    report = judged(Step(returned=ranks), Step(returned=reference))
    assert report.verdict == "UNKNOWN"
    assert "returns a loss, and" in report.reason
    assert str(report.findings[0].hint).startswith("return the loss from the steps of both")


def test_a_loss_in_a_tuple_is_refused() -> None:
    with pytest.raises(tvt.CaptureError, match="returns a tuple"):
        judged(Step(returned=lambda loss: (loss, 1.0)))


# -- shapes of what is gathered -------------------------------------------------------------------------------------------------


def gathering(shape: Any, rows: Any = lambda found: found) -> Any:
    """1: a sum of squares over gathered rows by itself."""

    def factor(rank: int, world: int, x: Any) -> Any:
        x = x.detach().clone()
        found = torch.empty(shape)
        dist.all_gather_into_tensor(found, x)
        found = found.reshape(world, *x.shape).sum(0)
        dist.all_reduce(x)
        return (1 + rows(found).square().sum()) / (1 + x.square().sum())

    return factor


def test_outputs_that_concatenate() -> None:
    """PROVED; REFUTED where the sum is doubled."""
    assert judged(Step(gathering((6, 4)))).verdict == "PROVED"
    assert judged(Step(gathering((6, 4), lambda found: 2 * found))).verdict == "REFUTED"


def test_outputs_that_stack() -> None:
    """PROVED, for backends that take them: gloo does not."""
    report = judged(Step(gathering((2, 3, 4))))
    assert report.verdict == "PROVED"
    assert any("gloo raises an error" in a for a in report.assumptions)


@pytest.mark.parametrize("shape", [(24,), (4, 6), (3, 2, 4)])
def test_outputs_of_another_shape_are_refused(shape: Any) -> None:
    """UNKNOWN, by name: gloo raises an error, also where the number of elements fits."""
    report = judged(Step(gathering(shape)))
    assert report.verdict == "UNKNOWN"
    assert "neither their concatenation nor their stack" in report.reason


# -- numbers --------------------------------------------------------------------------------------------------------------------


def adamw(lr: Any, **options: Any) -> Step:
    return Step(optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=lr(), **options))


@pytest.mark.parametrize("options", [{"foreach": False}, {"fused": True}], ids=str)
def test_a_rate_that_is_a_tensor(options: Any) -> None:
    """PROVED against the same float, whatever float32 makes of its quotients; REFUTED against another rate."""
    reference = adamw(lambda: 1e-2)
    assert judged(adamw(lambda: torch.tensor(1e-2), **options), reference).verdict == "PROVED"
    assert judged(adamw(lambda: torch.tensor(1.00001e-2), **options), reference).verdict == "REFUTED"


# -- the environment ----------------------------------------------------------------------------------------------------------


def by_environment(name: str) -> Any:
    """What a rank makes of a variable that the launcher sets: the first one halves its loss."""
    return Step(lambda rank, world, x: 0.5 if os.environ.get(name, "none") == "1" else 1.0)


@pytest.mark.parametrize("name", ["RANK", "LOCAL_RANK"])
def test_a_rank_by_its_environment(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """REFUTED: rank 1 halves its loss, by its number in the environment; also where this process has such a variable."""
    monkeypatch.setenv(name, "0")
    assert judged(by_environment(name)).verdict == "REFUTED"
    assert os.environ[name] == "0"


def by_size(rank: int, world: int, x: Any) -> Any:
    """1 on one device, where the launcher sets nothing, and on two ranks."""
    return int(os.environ.get("WORLD_SIZE", "1")) / world


def test_the_number_of_ranks_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """PROVED."""
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert judged(Step(by_size)).verdict == "PROVED"
