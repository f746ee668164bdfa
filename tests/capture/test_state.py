"""What a step leaves is what the next one finds: every way to leave it, on wrong programs and their right twins."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is absent: captured code is not tested")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402

import trainverify.torch as tvt  # noqa: E402

BATCH = {"x": tvt.Reals((6, 4), "(dp b) k")}


class Model(nn.Module):
    """A buffer is assigned anew or written in place; both are ordinary style."""

    def __init__(self, anew: bool = True) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 5), nn.Linear(5, 3)
        self.anew = anew
        self.register_buffer("ema", torch.zeros(5))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Any, world: int, synced: bool = True) -> Any:
        y = torch.tanh(self.first(x))
        mean = y.detach().mean(0)
        if world > 1 and synced:
            dist.all_reduce(mean, op=dist.ReduceOp.AVG)
        if self.anew:
            self.ema = 0.9 * self.ema + 0.1 * mean
            self.seen = self.seen + 1
        else:
            self.ema.mul_(0.9).add_(0.1 * mean)
            self.seen += 1
        return self.second(y)


class SGD(torch.optim.Optimizer):
    """Not PyTorch's: it keeps a velocity under a name of its own, in place or assigned anew."""

    def __init__(self, params: Any, lr: float, anew: bool = False, reset: int = 0):
        super().__init__(params, {"lr": lr})
        self.anew, self.reset, self.taken = anew, reset, 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.taken += 1
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if "velocity" not in state:
                    state["velocity"] = torch.zeros_like(p)
                if self.anew:
                    state["velocity"] = 0.5 * state["velocity"] + p.grad
                else:
                    state["velocity"].mul_(0.5).add_(p.grad)
                p.add_(state["velocity"], alpha=-group["lr"])
        if self.taken == self.reset:
            self.state.clear()


Part = Callable[..., Any]


def nothing(*args: Any) -> None:
    pass


def plain(model: Any, wrong: bool) -> Any:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def stepped(rank: int, world: int, wrong: bool, model: Part, optimizer: Part, before: Part, after: Part, synced: bool) -> Any:
    net = model(wrong)
    opt = optimizer(net, wrong)
    count = itertools.count(1)

    def step(batch: Any) -> Any:
        n = next(count)
        opt.zero_grad()
        before(net, opt, rank, wrong, n)
        loss = net(batch["x"], world, synced).square().mean()
        loss.backward()
        if world > 1:
            for p in net.parameters():
                if p.grad is not None:
                    dist.all_reduce(p.grad, op=dist.ReduceOp.AVG)
        after(net, opt, rank, wrong, n)
        opt.step()
        return loss

    return step


def verdict(
    wrong: bool,
    model: Part = lambda wrong: Model(),
    optimizer: Part = plain,
    before: Part = nothing,
    after: Part = nothing,
    unsynced: bool = False,
) -> str:
    def one() -> Any:
        return stepped(0, 1, False, model, optimizer, before, after, True)

    def ranks(rank: int, world: int) -> Any:
        return stepped(rank, world, wrong, model, optimizer, before, after, not (unsynced and wrong))

    report = tvt.verify(one, ranks, 2, BATCH, {"dp": 2}, loss={"dp": "avg"}, points=1)
    return str(report.verdict)


def untied(net: Any, opt: Any, rank: int, wrong: bool, n: int) -> None:
    if wrong and n == 1:
        net.second.weight.data = net.second.weight.data.clone() * 2


def replaced(net: Any, opt: Any, rank: int, wrong: bool, n: int) -> None:
    if wrong and rank == 1 and n == 1:
        net.second.bias = nn.Parameter(net.second.bias.detach().clone())


def evaluated(net: Any, opt: Any, rank: int, wrong: bool, n: int) -> None:
    if wrong and n == 2:
        net.eval()


def frozen(net: Any, opt: Any, rank: int, wrong: bool, n: int) -> None:
    if n == 2 and wrong:
        net.first.bias.requires_grad_(False)


def left_out(net: Any, opt: Any, rank: int, wrong: bool, n: int) -> None:
    if wrong and n == 1:
        opt.param_groups[0]["params"] = opt.param_groups[0]["params"][1:]


def hooked(net: Any, opt: Any, rank: int, wrong: bool, n: int) -> None:
    if wrong and n == 1:
        net.second.register_forward_hook(lambda module, args, out: 2 * out)


class Later:
    """A hook that does nothing before the fourth step."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, grad: Any) -> Any:
        self.calls += 1
        return grad * 2 if self.calls > 3 else None


def hooked_later(net: Any, opt: Any, rank: int, wrong: bool, n: int) -> None:
    if wrong and n == 1:
        net.second.bias.register_hook(Later())


def after_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    pass


def hooked_optimizer(net: Any, opt: Any, rank: int, wrong: bool, n: int) -> None:
    if wrong and n == 3:
        opt.register_step_post_hook(after_step)


def scheduled(option: str, right: Any, other: Any) -> Part:
    """An option that the third step sets for the fourth."""

    def after_update(net: Any, opt: Any, rank: int, wrong: bool, n: int) -> None:
        if n == 3:
            opt.param_groups[0][option] = other if wrong and rank == 1 else right

    def before(net: Any, opt: Any, rank: int, wrong: bool, n: int) -> None:
        if n == 1:
            opt.register_step_post_hook(lambda *args: after_update(net, opt, rank, wrong, taken()))

        def taken() -> int:
            opt.taken_here = getattr(opt, "taken_here", 0) + 1
            return int(opt.taken_here)

    return before


def at_even_steps(net: Any, opt: Any, rank: int, wrong: bool, n: int) -> None:
    if wrong and n % 2 == 0:
        net.first.bias.grad.mul_(2)


def where_a_buffer_is_odd(net: Any, opt: Any, rank: int, wrong: bool, n: int) -> None:
    if wrong and int(net.seen) % 2 == 0:
        net.first.bias.grad.mul_(2)


def warmed_up(net: Any, opt: Any, rank: int, wrong: bool, n: int) -> None:
    """The first rate is 0; weights decay on rank 0 only."""
    for group in opt.param_groups:
        group["lr"] = 0.1 * (n - 1)
        group["weight_decay"] = 0.1 if not wrong or rank == 0 else 0.0


def cleared(net: Any, opt: Any, rank: int, wrong: bool, n: int) -> None:
    if wrong and n == 2:
        opt.state.clear()


def rebound(net: Any, opt: Any, rank: int, wrong: bool, n: int) -> None:
    for p in net.parameters():
        if "momentum_buffer" in opt.state[p]:
            opt.state[p]["momentum_buffer"] = opt.state[p]["momentum_buffer"] * (0.5 if wrong and rank else 1)


def own(**options: Any) -> Part:
    return lambda net, wrong: SGD(net.parameters(), lr=0.1, **options)


PAIRS: dict[str, dict[str, Any]] = {
    "a buffer assigned anew": {"unsynced": True},
    "a buffer written in place": {"unsynced": True, "model": lambda wrong: Model(False)},
    "data replaced": {"after": untied},
    "training switched off": {"model": lambda wrong: nn.ModuleList([Dropping()])[0], "after": evaluated},
    "a parameter frozen": {"after": frozen},
    "a parameter that leaves its group": {"after": left_out},
    "a hook": {"after": hooked},
    "a hook that acts later": {"after": hooked_later},
    "a hook of an optimizer": {"after": hooked_optimizer},
    "a rate for the fourth step": {"before": scheduled("lr", 0.05, 0.2)},
    "a decay for the fourth step": {"before": scheduled("weight_decay", 0.0, 0.2)},
    "ascent in the fourth step": {"before": scheduled("maximize", False, True)},
    "even steps": {"after": at_even_steps},
    "an odd buffer": {"after": where_a_buffer_is_odd},
    "a warm-up": {"before": warmed_up},
    "state cleared": {"after": cleared},
    "state rebound": {"after": rebound},
    "an optimizer called SGD": {"optimizer": own(), "after": at_even_steps},
    "an optimizer called SGD, assigned anew": {"optimizer": own(anew=True), "after": at_even_steps},
    "an optimizer that resets": {"optimizer": lambda net, wrong: SGD(net.parameters(), lr=0.1, reset=2 if wrong else 0)},
}


class Dropping(Model):
    """Dropout, so that it matters whether a module trains."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Any, world: int, synced: bool = True) -> Any:
        return self.drop(super().forward(x, world, synced))


@pytest.mark.parametrize("name", PAIRS)
def test_right(name: str) -> None:
    """PROVED."""
    assert verdict(False, **PAIRS[name]) == "PROVED"


@pytest.mark.parametrize("name", PAIRS)
def test_wrong(name: str) -> None:
    """Not PROVED; most are REFUTED."""
    assert verdict(True, **PAIRS[name]) in ("REFUTED", "INVALID", "UNKNOWN")


def test_a_replaced_parameter() -> None:
    """A new parameter that the optimizer does not have: REFUTED or no verdict, and PROVED where none is replaced."""
    assert verdict(False, after=replaced) == "PROVED"
    assert verdict(True, after=replaced) in ("REFUTED", "INVALID", "UNKNOWN")
