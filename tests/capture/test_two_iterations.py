"""Two iterations in one captured step: what goes wrong only in the second is found."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is absent: captured code is not tested")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

import trainverify.torch as tvt  # noqa: E402

BATCH = {f"x{i}": tvt.Reals((6, 4), "(dp b) k") for i in (0, 1)}


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.GELU(), nn.Linear(5, 3))


def stepped(model: nn.Module, called: nn.Module, second=contextlib.nullcontext, forgets: bool = False):
    """AdamW, twice; `second` is a context of the second backward pass. One that forgets starts the second with a momentum of 0."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def step(batch):
        for i, context in enumerate((contextlib.nullcontext, second)):
            with context():
                loss = called(batch[f"x{i}"]).square().mean()
                loss.backward()
            optimizer.step()
            if forgets and not i:
                for p in model.parameters():
                    optimizer.state[p]["exp_avg"].zero_()
            optimizer.zero_grad()
        return loss

    return step


def report(wrong: str):
    def ranks(rank: int, world: int):
        alone = model()
        shared = DistributedDataParallel(alone)
        second = shared.no_sync if wrong == "no_sync" else contextlib.nullcontext
        return stepped(alone, shared, second, wrong == "momentum" and rank == 1)

    def reference():
        alone = model()
        return stepped(alone, alone)

    return tvt.verify(reference, ranks, 2, BATCH, {"dp": 2}, loss={"dp": "avg"}, points=1)


CASES = [("", "PROVED", ""), ("no_sync", "REFUTED", "partial sum"), ("momentum", "REFUTED", "lerp")]


@pytest.mark.parametrize(("wrong", "verdict", "said"), CASES)
def test_two_iterations_with_ddp(wrong: str, verdict: str, said: str) -> None:
    found = report(wrong)
    assert found.verdict == verdict, found.reason
    if said:
        assert found.place is not None
        assert said in f"{found.place.tensor} {found.place.cause}"
        assert found.place.op is not None
        assert "test_two_iterations" in str(found.place.op.source)


def hooked(looks: bool) -> Any:
    """An average by a communication hook. One that looks at buckets leaves those out that do not begin with the last weight."""

    def ranks(rank: int, world: int) -> Any:
        alone = model()
        shared = DistributedDataParallel(alone)

        def average(state, bucket):  # DDP refuses other annotations than its own
            total = bucket.buffer().div_(world)
            if looks and bucket.parameters()[0] is not alone[0].weight:  # so it is in the first iteration only
                done: Any = torch.futures.Future()
                done.set_result(total)
                return done
            return dist.all_reduce(total, async_op=True).get_future().then(lambda f: f.value()[0])

        shared.register_comm_hook(None, average)
        return stepped(alone, shared)

    return ranks


@pytest.mark.parametrize(("looks", "verdict"), [(False, "PROVED"), (True, "REFUTED")])
def test_buckets_are_ordered_anew_for_hooks(looks: bool, verdict: str) -> None:
    def reference() -> Any:
        alone = model()
        return stepped(alone, alone)

    assert tvt.verify(reference, hooked(looks), 2, BATCH, {"dp": 2}, loss={"dp": "avg"}, points=1).verdict == verdict
