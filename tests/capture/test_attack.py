"""Small wrong programs that try to get past the capture. None of them is PROVED; their right twin is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is absent: captured code is not tested")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402

import trainverify.torch as tvt  # noqa: E402

BATCH = {"x": tvt.Reals((6, 4), "(dp b) k")}


class Model(nn.Module):
    """Two square layers, so that tensors can take each other's place without an error."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.gain = nn.Parameter(torch.ones(4))
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Any) -> Any:
        y = self.second(torch.tanh(self.first(x))) * self.gain * self.scale
        self.mean.mul_(0.5).add_(0.5 * y.detach().mean(0))
        return y


Hook = Callable[..., Any]


def nothing(*args: Any) -> None:
    pass


def averaged(model: Any, rank: int, world: int) -> None:
    for p in model.parameters():
        dist.all_reduce(p.grad, op=dist.ReduceOp.AVG)


class Step:
    """A data-parallel step; a program changes one part of it."""

    def __init__(
        self,
        built: Hook = nothing,
        loss: Hook = lambda y, *args: y.square().mean(),
        reduced: Hook = averaged,
        before: Hook = nothing,
        after: Hook = nothing,
        optimizer: Hook = lambda model, *args: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        averages: bool = True,
    ):
        self.built, self.loss, self.reduced, self.before, self.after, self.optimizer = built, loss, reduced, before, after, optimizer
        self.averages = averages

    def __call__(self, rank: int, world: int) -> Any:
        model = Model()
        optimizer = self.optimizer(model, rank, world)
        self.built(model, rank, world)

        def step(batch: Any) -> Any:
            optimizer.zero_grad()
            self.before(model, rank, world)
            loss = self.loss(model(batch["x"]), rank, world)
            loss.backward()
            if world > 1:
                self.reduced(model, rank, world)
                if self.averages:
                    dist.all_reduce(model.mean, op=dist.ReduceOp.AVG)
            optimizer.step()
            self.after(model, rank, world)
            optimizer.zero_grad()
            return {"loss": loss}

        return step


def verdict(wrong: Step, reference: Step | None = None) -> str:
    reference = reference or Step()
    try:
        report = tvt.verify(lambda: reference(0, 1), wrong, 2, BATCH, {"dp": 2}, loss={"dp": "avg"}, points=1)
    except tvt.CaptureError:
        return "refused"
    return str(report.verdict)


def test_right() -> None:
    assert verdict(Step()) == "PROVED"


# -- writes -------------------------------------------------------------------------------------------------------------


def through_a_view(model: Any, rank: int, world: int) -> None:
    model.first.weight.data.view(-1)[3:5].zero_()


def data_scaled(model: Any, rank: int, world: int) -> None:
    model.first.weight.data.mul_(0.9)


def data_replaced(model: Any, rank: int, world: int) -> None:
    model.first.weight.data = model.first.weight.data * 2


def copied_under_no_grad(model: Any, rank: int, world: int) -> None:
    with torch.no_grad():
        model.first.weight.copy_(model.second.weight)


def grad_is_the_parameter(model: Any, rank: int, world: int) -> None:
    averaged(model, rank, world)
    model.first.weight.grad = model.first.weight.data


def grads_exchanged(model: Any, rank: int, world: int) -> None:
    averaged(model, rank, world)
    a, b = model.first.weight, model.second.weight
    a.grad, b.grad = b.grad, a.grad


def tied(model: Any, rank: int, world: int) -> None:
    model.second.weight.data = model.first.weight.data


def set_to_other_memory(model: Any, rank: int, world: int) -> None:
    with torch.no_grad():
        model.second.weight.set_(model.first.weight.detach().clone())


def same_tensor_twice_in_a_list(model: Any, rank: int, world: int) -> None:
    averaged(model, rank, world)
    g = model.gain.grad
    torch._foreach_mul_([g, g], 0.5)
    g.mul_(2)


def transposed_in_place(model: Any, rank: int, world: int) -> None:
    averaged(model, rank, world)
    g = model.first.weight.grad
    g.copy_(g.t().clone())


def stepped_twice(model: Any, rank: int, world: int) -> None:
    with torch.no_grad():
        model.gain -= 0.1 * model.gain.grad


def shifted_by_storage(model: Any, rank: int, world: int) -> None:
    """Writes the first row through a strided view of the memory."""
    model.first.weight.data.as_strided((4,), (4,), 1).add_(1)


# -- gradients ----------------------------------------------------------------------------------------------------------


def hooked(model: Any, rank: int, world: int) -> None:
    model.first.weight.register_hook(lambda g: g * 2)


def hooked_after(model: Any, rank: int, world: int) -> None:
    def double(p: Any) -> None:
        p.grad.mul_(1 + rank)

    model.first.weight.register_post_accumulate_grad_hook(double)


def detached(y: Any, rank: int, world: int) -> Any:
    return (y * y.detach()).mean()


def scaled(y: Any, rank: int, world: int) -> Any:
    return y.square().mean() * 512


def unscaled(model: Any, rank: int, world: int) -> None:
    averaged(model, rank, world)
    for p in model.parameters():
        p.grad.mul_(1 / 1024)


def loss_added_up(y: Any, rank: int, world: int) -> Any:
    loss = y.square().mean()
    with torch.no_grad():
        dist.all_reduce(loss)
    return loss


# -- optimizers ---------------------------------------------------------------------------------------------------------


def lr_of_rank(model: Any, rank: int, world: int) -> Any:
    return torch.optim.SGD(model.parameters(), lr=0.1 * (1 + rank), momentum=0.9)


def groups(model: Any, rank: int, world: int) -> Any:
    rest = [model.second.weight, model.gain]
    return torch.optim.SGD([{"params": [model.first.weight], "lr": 0.1 if rank == 0 else 0.2}, {"params": rest}], lr=0.1, momentum=0.9)


def one_parameter_missing(model: Any, rank: int, world: int) -> Any:
    return torch.optim.SGD([model.first.weight, model.gain], lr=0.1, momentum=0.9)


# -- communication ------------------------------------------------------------------------------------------------------


def other_order(model: Any, rank: int, world: int) -> None:
    """Ranks reduce gradients of equal shapes in different orders."""
    grads = [model.first.weight.grad, model.second.weight.grad]
    works = [dist.all_reduce(g, op=dist.ReduceOp.AVG, async_op=True) for g in (grads if rank == 0 else grads[::-1])]
    for w in works:
        w.wait()
    dist.all_reduce(model.gain.grad, op=dist.ReduceOp.AVG)


def other_memory_order(model: Any, rank: int, world: int) -> None:
    """A rank passes the transposed view and another one a copy: backends add up memory, element after element."""
    for p in model.parameters():
        g = p.grad.t() if p.ndim == 2 else p.grad
        g = g.contiguous() if rank == 1 else g
        dist.all_reduce(g, op=dist.ReduceOp.AVG)
        p.grad = (g.t() if p.ndim == 2 else g).contiguous()


def broadcast_from_the_wrong_rank(model: Any, rank: int, world: int) -> None:
    averaged(model, rank, world)
    model.gain.grad.mul_(1 if rank == 0 else 3)
    dist.broadcast(model.gain.grad, src=1)


def future_never_waited_for(model: Any, rank: int, world: int) -> None:
    for p in model.parameters():
        dist.all_reduce(p.grad, op=dist.ReduceOp.AVG, async_op=True).get_future()


def objects_of_ranks(model: Any, rank: int, world: int) -> None:
    averaged(model, rank, world)
    found: list[Any] = [None] * world
    dist.all_gather_object(found, 1.0 if rank == 0 else 3.0)
    model.gain.grad.mul_(sum(found) / (world * found[rank]))


def broadcast_objects(model: Any, rank: int, world: int) -> None:
    averaged(model, rank, world)
    found = [1.0 + rank]
    dist.broadcast_object_list(found, src=0)
    model.gain.grad.mul_(found[0] / (1.0 + rank))


def group_of_some_ranks(model: Any, rank: int, world: int) -> None:
    """Every rank has to create every group, in the same order."""
    if rank == 0:
        dist.new_group([0])
    group = dist.new_group([0, 1])
    for p in model.parameters():
        dist.all_reduce(p.grad, op=dist.ReduceOp.AVG, group=group)


def reduced_to_one_rank(model: Any, rank: int, world: int) -> None:
    for p in model.parameters():
        dist.reduce(p.grad, dst=0)
        p.grad.mul_(0.5)


def gathered_in_another_order(model: Any, rank: int, world: int) -> None:
    """Takes the other rank's gradient twice."""
    for p in model.parameters():
        parts = [torch.empty_like(p.grad) for _ in range(world)]
        dist.all_gather(parts, p.grad)
        p.grad = (parts[rank - 1] + parts[rank - 1]) / 2


def overlapping_results(model: Any, rank: int, world: int) -> None:
    """All parts are received into the same memory."""
    for p in model.parameters():
        one = torch.empty_like(p.grad)
        parts = [one] * world
        dist.all_gather(parts, p.grad)
        p.grad = (parts[0] + parts[1]) / 2


# -- what lives from step to step -----------------------------------------------------------------------------------------


def buffer_of_rank(model: Any, rank: int, world: int) -> None:
    model.scale.add_(rank)


def buffer_reset(model: Any, rank: int, world: int) -> None:
    model.mean.zero_()


KEPT = torch.zeros(4)
COUNT = torch.ones(())


def hidden_memory(model: Any, rank: int, world: int) -> None:
    """Error feedback in memory that nobody names: what a step adds depends on the step before."""
    averaged(model, rank, world)
    model.gain.grad.add_(KEPT)
    KEPT.add_(model.gain.grad)


def make_hidden(model: Any, rank: int, world: int) -> None:
    global KEPT, COUNT
    KEPT, COUNT = torch.zeros(4), torch.ones(())


def hidden_number(model: Any, rank: int, world: int) -> None:
    averaged(model, rank, world)
    model.gain.grad.mul_(COUNT)
    COUNT.add_(1)


WRONG: dict[str, Step] = {
    **{f.__name__: Step(after=f) for f in (through_a_view, data_scaled, data_replaced, copied_under_no_grad, shifted_by_storage)},
    **{f.__name__: Step(after=f) for f in (buffer_of_rank, buffer_reset, stepped_twice)},
    **{f.__name__: Step(built=f) for f in (tied, hooked, hooked_after)},
    "set_to_other_memory": Step(before=set_to_other_memory),
    **{
        f.__name__: Step(reduced=f)
        for f in (
            *(grad_is_the_parameter, grads_exchanged, same_tensor_twice_in_a_list, transposed_in_place),
            *(other_order, other_memory_order, broadcast_from_the_wrong_rank, future_never_waited_for, objects_of_ranks),
            *(broadcast_objects, group_of_some_ranks, reduced_to_one_rank, gathered_in_another_order, overlapping_results),
        )
    },
    "detached": Step(loss=detached),
    "scaled": Step(loss=scaled, reduced=unscaled),
    "loss_added_up": Step(loss=loss_added_up),
    "lr_of_rank": Step(optimizer=lr_of_rank),
    "groups": Step(optimizer=groups),
    "one_parameter_missing": Step(optimizer=one_parameter_missing),
    "statistics_not_averaged": Step(averages=False),
    "hidden_memory": Step(built=make_hidden, reduced=hidden_memory),
    "hidden_number": Step(built=make_hidden, reduced=hidden_number),
}


@pytest.mark.parametrize("name", WRONG)
def test_not_proved(name: str) -> None:
    """REFUTED, INVALID, UNKNOWN or refused."""
    assert verdict(WRONG[name]) != "PROVED"
