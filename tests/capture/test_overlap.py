"""A call that reads memory while it writes it computes what the order of its kernel gives: no value, unless it is the identical view."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is absent: captured code is not tested")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

import trainverify.torch as tvt  # noqa: E402
from capture.tracing import agree, traced  # noqa: E402
from trainverify.torch.record import Recorder  # noqa: E402
from trainverify.torch.translate import Translator, type_of  # noqa: E402
from trainverify.torch.values import Unknown  # noqa: E402
from trainverify.translate.emit import Place  # noqa: E402


def real(*shape: int) -> Any:
    return torch.rand(shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64) + 0.5


FACTOR = real(2, 2)


def added(z: Any) -> None:
    torch.add(z[1:6], 1.0, out=z[:5])


def first_column(z: Any) -> None:
    z.view(2, 3).div_(z.view(2, 3)[:, :1])


def all_by_one(z: Any) -> None:
    z.div_(z[2])


WRONG: dict[str, Callable[[Any], Any]] = {
    "every other one by the first": lambda z: z[::2].sub_(z[:3]),
    "copied one further": lambda z: z[1:].copy_(z[:-1]),
    "out=": added,
    "broadcast": first_column,
    "by one of its elements": all_by_one,
    "a list": lambda z: torch._foreach_add_([z[:2], z[3:5]], [z[4:6], z[1:3]]),
    "a list of one": lambda z: torch._foreach_add_([z[::2]], [z[:3]]),
    "a list by a scalar in it": lambda z: torch._foreach_mul_([z[:1], z[1:]], z[0]),
    "a maximum into its row": lambda z: torch.max(z.view(2, 3), 1, out=(z[:2], torch.empty(2, dtype=torch.int64))),
    "written twice": lambda z: torch._foreach_zero_([z[:2], z[1:3]]),
    "a product into a factor": lambda z: torch.mm(z[:4].view(2, 2), FACTOR, out=z[:4].view(2, 2)),
    "of other dtype": lambda z: z.view(torch.int64)[::2].add_(1) if z[:3].sub_(1) is not None else None,
}

RIGHT: dict[str, Callable[[Any], Any]] = {
    "every other one by the others": lambda z: z[::2].sub_(z[1::2]),
    "halves": lambda z: z[:3].sub_(z[3:]),
    "itself": lambda z: z.mul_(z),
    "into itself": lambda z: torch.add(z, z, out=z),
    "a copy first": lambda z: z[::2].sub_(z[:3].clone()),
    "lists of the same": lambda z: torch._foreach_mul_([z[:2], z[2:]], [z[:2], z[2:]]),
    "a product added": lambda z: torch.addmm(z[:4].view(2, 2), FACTOR, FACTOR, out=z[:4].view(2, 2)),
    "columns": lambda z: z.view(2, 3)[:, :1].add_(z.view(2, 3)[:, 2:]),
}


@pytest.mark.parametrize("name", WRONG)
def test_overlapping(name: str) -> None:
    translator = Translator(Place)
    with FakeTensorMode(allow_non_fake_inputs=True), Recorder(translator):  # on real tensors PyTorch refuses some of these itself
        z = torch.empty(6, dtype=torch.float64)
        translator.begin()  # before a step, what has no value has a name
        translator.emitter.declare("z", type_of(z))
        translator.define(z, "z")
        WRONG[name](z)
        found = translator.read(z.sum())
    assert isinstance(found, Unknown)
    assert "it writes memory" in str(found) or "written as f64" in str(found)


def test_pytorch_sees_some_itself() -> None:
    with pytest.raises(RuntimeError, match="single memory location"):
        traced(added, (real(6),))


@pytest.mark.parametrize("name", RIGHT)
def test_apart_or_identical(name: str) -> None:
    agree(lambda a: [RIGHT[name](a), a.sum()][1:], real(6), also=(0,))


class Mixed(nn.Module):
    def __init__(self, overlapping: bool):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))
        self.overlapping = overlapping

    def forward(self, x: Any) -> Any:
        z = (x * self.weight).sum(0)
        other = z[:3] if self.overlapping else z[:3].clone()
        z = z.detach()
        z[::2].sub_(other.detach())
        return ((x * self.weight).sum(0) * z).sum()


@pytest.mark.parametrize(("overlapping", "verdict"), [(True, "UNKNOWN"), (False, "PROVED")])
def test_a_step_that_reads_what_it_writes(overlapping: bool, verdict: str) -> None:
    """UNKNOWN, though reference and ranks do the same; with a copy it is PROVED."""

    def stepped(model: Any, group: bool) -> Any:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(batch: Any) -> Any:
            loss = model(batch["x"])
            loss.backward()
            if group:
                dist.all_reduce(model.weight.grad, op=dist.ReduceOp.AVG)
            optimizer.step()
            return loss

        return step

    batch = {"x": tvt.Reals((2, 6), "b k")}
    report = tvt.verify(
        lambda: stepped(Mixed(overlapping), False), lambda rank, world: stepped(Mixed(overlapping), True), 2, batch, {"dp": 2}, points=1
    )
    assert report.verdict == verdict, report.reason
