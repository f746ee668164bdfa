"""More than 64 ranks: a sample is captured. Never PROVED: PROVED(sampled) at best, with the number of ranks, exit code 3."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is absent: captured code is not tested")

import torch.distributed as dist  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402

import trainverify.torch as tvt  # noqa: E402
from trainverify.graph.mesh import Mesh  # noqa: E402
from trainverify.report import Report  # noqa: E402
from trainverify.torch.judge import _of_a_sample  # noqa: E402
from trainverify.torch.sample import chosen, everyone  # noqa: E402

WIDE, DEEP = {"dp": 128}, {"dp": 12, "tp": 6}
FORGOTTEN = 5  # of 128: not captured


class Column(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        dist.all_reduce(grad := grad.clone(), group=ctx.group)
        return grad, None


class Row(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        dist.all_reduce(x := x.clone(), group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def trained(parameters, forward, over=None, skip: bool = False):
    optimizer = torch.optim.SGD(parameters, lr=0.1)

    def step(batch):
        loss = F.mse_loss(forward(batch["x"]), batch["y"])
        loss.backward()
        if over is not None and not skip:
            for p in parameters:
                dist.all_reduce(p.grad, op=dist.ReduceOp.AVG, group=over)
        optimizer.step()
        return loss

    return step


class Model(nn.Module):
    def __init__(self, parts: int = 1, group=None):
        super().__init__()
        self.up, self.down, self.group = nn.Linear(7, 18 // parts), nn.Linear(18 // parts, 5, bias=False), group

    def forward(self, x):
        x = x if self.group is None else Column.apply(x, self.group)
        y = self.down(self.up(x).relu())
        return y if self.group is None else Row.apply(y, self.group)


def reference():
    model = Model()
    return trained(list(model.parameters()), model)


def data(rank: int, world: int, forgets: int | None = None):
    """Every rank averages its gradients, but one that forgets to."""
    model = Model()
    return trained(list(model.parameters()), model, dist.group.WORLD, skip=rank == forgets)


def grid(rank: int, world: int, bug: str | None = None):
    """Data and tensor parallel."""
    dp, tp = DEEP["dp"], DEEP["tp"]
    across = [dist.new_group(list(range(i * tp, (i + 1) * tp))) for i in range(dp)][rank // tp]
    along = [dist.new_group(list(range(j, world, tp))) for j in range(tp)][rank % tp]
    model = Model(tp, across)
    return trained(list(model.parameters()), model, across if bug == "wrong group" else along)


def batch(rows: int, cut: str):
    return {"x": tvt.Reals((rows, 7), f"({cut} b) k"), "y": tvt.Reals((rows, 5), f"({cut} b) k")}


CUTS = {"up.weight": "(tp o) k", "up.bias": "(tp o)", "down.weight": "o (tp k)"}


def verify_data(forgets: int | None = None):
    made = (reference, lambda r, w: data(r, w, forgets), 128, batch(256, "dp"), WIDE)
    return tvt.verify(*made, loss={"dp": "avg"}, points=1)


def verify_grid(bug: str | None = None):
    made = (reference, lambda r, w: grid(r, w, bug), 72, batch(36, "dp"), DEEP)
    return tvt.verify(*made, cuts=CUTS, loss={"dp": "avg"}, points=1)


def test_all_of_few_and_some_of_many() -> None:
    assert chosen(Mesh(dp=64)) == tuple(range(64))
    for mesh in (Mesh(dp=65), Mesh(WIDE), Mesh(DEEP), Mesh(pp=8, dp=64, tp=8), Mesh({f"a{i}": 2 for i in range(9)})):
        found = chosen(mesh)
        assert 16 < len(found) <= 64
        assert found == tuple(sorted(set(found)))
        assert found[0] == 0
        assert found[-1] == mesh.size - 1
    every = {(a, c) for r in chosen(Mesh(DEEP)) for a, c in Mesh(DEEP).coordinates(r).items()}
    assert every == {(a, c) for a, n in DEEP.items() for c in range(n)}
    assert FORGOTTEN not in chosen(Mesh(WIDE))


def test_a_rank_that_was_not_captured() -> None:
    """PROVED(sampled): rank 5 forgets to average its gradients, and nothing is said of rank 5."""
    report = verify_data(FORGOTTEN)
    captured = len(chosen(Mesh(WIDE)))
    assert report.verdict == "PROVED(sampled)"
    assert report.exit_code == 3
    assert report.reason.startswith(f"{captured} of 128 ranks captured, nothing is shown of the others")
    assert any(a.startswith(f"{128 - captured} of 128 ranks were not captured") for a in report.assumptions)


def test_a_rank_that_was_captured() -> None:
    """REFUTED or INVALID: the first rank forgets, and others wait for it."""
    report = verify_data(0)
    assert report.verdict in ("REFUTED", "INVALID")
    assert "of 128 ranks captured" in report.reason


@pytest.mark.capture
def test_groups_and_integers_of_other_ranks() -> None:
    """PROVED(sampled): every rank that was not captured gets groups of its own along the axes."""
    report = verify_grid()
    assert report.verdict == "PROVED(sampled)", report.reason


@pytest.mark.capture
def test_a_wrong_group_on_all_ranks() -> None:
    """REFUTED: gradients are averaged over the tensor-parallel ranks."""
    report = verify_grid("wrong group")
    assert report.verdict == "REFUTED"
    assert "of 72 ranks captured" in report.reason


def test_what_is_assumed_is_what_runs() -> None:
    """All ranks captured, and some of them left out again: what is assumed of these is what they really run."""
    mesh = Mesh(dp=3, tp=2, cp=2)

    def shifted(rank: int, world: int):
        def step(b):
            start = rank % 2 * b["x"].shape[0] + 12 * (rank // 4)
            loss = (b["x"] * torch.arange(start, start + b["x"].shape[0])[:, None]).sum()
            dist.all_reduce(loss)
            return loss

        return step

    made = {"x": tvt.Reals((12, 7), "(cp s) k")}
    (one, ranks), *_ = tvt.captures(lambda: lambda b: b["x"].sum(), shifted, 12, made, mesh)
    left = [c for c in ranks if c.rank not in (5, 10, 11)]
    found = everyone(left, mesh)
    assert [c.program for c in found] == [c.program for c in ranks]
    assert found[10].groups == {n: m for n, m in ranks[10].groups.items() if any(op.get("group") == n for op in ranks[10].program.ops)}
    assert one.rank is None


def test_a_sample_at_reduced_sizes_is_no_proof() -> None:
    """UNKNOWN: of captured ranks only, and at reduced sizes only; no option accepts both at once."""
    report = Report("PROVED(reduced)", "as it seems", "a step", accept_reduced=True, accept_sampled=True)
    found = _of_a_sample(report, {0, 1}, 128)
    assert (found.verdict, found.exit_code) == ("UNKNOWN", 3)
    assert found.reason.startswith("2 of 128 ranks captured")
