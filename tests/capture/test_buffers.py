"""Buffers that a model computes when it is built are followed, not assumed: a rank that computes another table is seen."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is absent: captured code is not tested")

from torch import nn  # noqa: E402

import trainverify.torch as tvt  # noqa: E402


class Shifted(nn.Module):
    """Adds a table of positions from `start` on."""

    def __init__(self, start: int, length: int, persistent: bool):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        table = torch.arange(start, start + length).float()[:, None] * 0.5
        self.register_buffer("table", table, persistent=persistent)

    def forward(self, x):
        return (x + self.table) * self.weight


def trained(model: nn.Module):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch):
        loss = model(batch["x"]).square().mean()
        loss.backward()
        for p in model.parameters():
            if torch.distributed.is_initialized():
                torch.distributed.all_reduce(p.grad, op=torch.distributed.ReduceOp.AVG)
        optimizer.step()
        return loss

    return step


def verdict(starts: tuple[int, int], persistent: bool = False):
    def ranks(rank: int, world: int):
        return trained(Shifted(starts[rank], 5, persistent))

    batch = {"x": tvt.Reals((10, 3), "(cp s) k")}
    return tvt.verify(lambda: trained(Shifted(0, 10, persistent)), ranks, 2, batch, {"cp": 2}, loss={"cp": "avg"}, points=1)


def test_each_rank_its_own_positions() -> None:
    """Not refuted: rank 1 starts at 5, as its rows do."""
    assert verdict((0, 5)).verdict in ("PROVED", "UNKNOWN")


def test_the_same_positions_on_both_ranks() -> None:
    """REFUTED: rank 1 starts at 0."""
    assert verdict((0, 0)).verdict == "REFUTED"


@pytest.mark.parametrize(("starts", "expected"), [((0, 5), "PROVED"), ((0, 0), "REFUTED")])
def test_a_kept_table_that_no_step_changes(starts: tuple[int, int], expected: str) -> None:
    """PROVED with an assumption: each rank holds the positions of its rows. REFUTED where both hold the first ones."""
    report = verdict(starts, persistent=True)
    assert report.verdict == expected
    assert any("table, which no captured step changes" in a for a in report.assumptions)


def broadcast_verdict(starts: tuple[int, int]):
    """Ranks with the same rows of a table that rank 0 gives to all before the step."""

    def ranks(rank: int, world: int):
        model = Shifted(starts[rank], 5, False)
        torch.distributed.broadcast(model.table, 0)
        return trained(model)

    batch = {"x": tvt.Reals((2, 5, 3), "(dp b) s k")}
    return tvt.verify(lambda: trained(Shifted(0, 5, False)), ranks, 2, batch, {"dp": 2}, loss={"dp": "avg"}, points=1)


def test_a_table_that_is_broadcast() -> None:
    """PROVED: both ranks computed the same, so that the broadcast changes nothing."""
    assert broadcast_verdict((0, 0)).verdict == "PROVED"


def test_another_table_that_is_broadcast() -> None:
    """UNKNOWN: rank 1 computed another table, and what it gets instead is not followed. REFUTED where both computed another one."""
    report = broadcast_verdict((0, 1))
    assert report.verdict == "UNKNOWN"
    assert "before the step" in report.reason
    assert broadcast_verdict((1, 1)).verdict == "REFUTED"


class Scaled(nn.Module):
    """Multiplies by a kept table, and adds parameters that are one number when they are built."""

    def __init__(self, table: list[float], bias: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.bias = nn.Parameter(torch.full((3,), bias))
        self.register_buffer("table", torch.tensor(table))

    def forward(self, x):
        return x * self.weight * self.table + self.bias


@pytest.mark.parametrize(
    ("table", "bias", "known"),
    [([0.3, 2, 5], 0.0, True), ([0.1 * 3, 4 / 2, 5], 0.0, True), ([0.3, 2, 6], 0.0, False), ([0.3, 2, 5], 1.0, False)],
)
def test_constants_that_ranks_start_with(table: list[float], bias: float, known: bool) -> None:
    """PROVED where they are the reference's. Where they are others: REFUTED of a table that no step changes, UNKNOWN of a parameter."""
    batch = {"x": tvt.Reals((10, 3), "(cp s) k")}
    ranks = lambda rank, world: trained(Scaled(table if rank else [0.3, 2, 5], bias if rank else 0.0))  # noqa: E731
    report = tvt.verify(lambda: trained(Scaled([0.3, 2, 5], 0.0)), ranks, 2, batch, {"cp": 2}, loss={"cp": "avg"}, points=1)
    assert report.verdict == ("PROVED" if known else "UNKNOWN" if bias else "REFUTED"), report.reason
    assert known or not bias or "when it is built" in report.reason


class Queued(nn.Module):
    """A table of positions that every step rolls on: state, though constants lead to it when it is built."""

    def __init__(self, persistent: bool = True):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("table", torch.arange(3.0) * 0.5, persistent=persistent)

    def forward(self, x, by: int):
        self.table.copy_(torch.cat((self.table[by:], self.table[:by])))
        return x * self.weight * self.table


@pytest.mark.parametrize(("by", "expected"), [(1, "PROVED"), (2, "REFUTED")])
def test_a_table_that_steps_change_is_state(by: int, expected: str) -> None:
    """PROVED as state that may hold anything before the step; REFUTED where ranks roll it the other way."""

    def stepped(by: int):
        model = Queued()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(batch):
            optimizer.zero_grad()
            loss = model(batch["x"], by).square().mean()
            loss.backward()
            for p in model.parameters():
                if torch.distributed.is_initialized():
                    torch.distributed.all_reduce(p.grad, op=torch.distributed.ReduceOp.AVG)
            optimizer.step()
            return loss

        return step

    batch = {"x": tvt.Reals((10, 3), "(dp s) k")}
    report = tvt.verify(lambda: stepped(1), lambda rank, world: stepped(by), 2, batch, {"dp": 2}, loss={"dp": "avg"}, points=1)
    assert report.verdict == expected, report.reason
    assert not any("which no captured step changes" in a for a in report.assumptions)


class Masked(nn.Module):
    """Two tables that are made with the model, which DDP broadcasts in every forward pass."""

    def __init__(self, factor: float):
        super().__init__()
        self.linear = nn.Linear(3, 5)
        self.register_buffer("slopes", torch.arange(5.0) * factor, persistent=False)
        self.register_buffer("mask", torch.tril(torch.ones(5, 5)), persistent=False)
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x):
        self.seen += 1
        return ((self.linear(x) * self.slopes) @ self.mask).square().mean()


@pytest.mark.parametrize(("factors", "verdict"), [((0.3, 0.3), "PROVED"), ((0.3, 0.4), "UNKNOWN"), ((0.4, 0.4), "REFUTED")])
def test_tables_that_ddp_broadcasts_in_the_step(factors: tuple[float, float], verdict: str) -> None:
    """PROVED; UNKNOWN where rank 1 made another table; REFUTED where both did. A buffer that the step changes is state as before."""

    def stepped(model: nn.Module, called: nn.Module):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(batch):
            optimizer.zero_grad()
            loss = called(batch["x"])
            loss.backward()
            optimizer.step()
            return loss

        return step

    def reference():
        model = Masked(0.3)
        return stepped(model, model)

    def ranks(rank: int, world: int):
        model = Masked(factors[rank])
        return stepped(model, nn.parallel.DistributedDataParallel(model))

    report = tvt.verify(reference, ranks, 2, {"x": tvt.Reals((4, 3), "(dp b) k")}, {"dp": 2}, loss={"dp": "avg"}, points=1)
    assert report.verdict == verdict, report.reason
    assert verdict != "UNKNOWN" or "constants" in report.reason


@pytest.mark.parametrize(("reference", "ranks"), [(True, False), (False, True)])
def test_state_that_checkpoints_keep_on_one_side(reference: bool, ranks: bool) -> None:
    """UNKNOWN: a step from a checkpoint starts with other numbers; one from the beginning does not."""

    def step(persistent: bool):
        model = Queued(persistent)
        one = trained(model)
        call = model.forward
        model.forward = lambda x: call(x, 1)
        return one

    batch = {"x": tvt.Reals((10, 3), "(dp s) k")}
    report = tvt.verify(lambda: step(reference), lambda r, w: step(ranks), 2, batch, {"dp": 2}, loss={"dp": "avg"}, points=1)
    assert report.verdict == "UNKNOWN", report.reason
    assert "is computed with the model" in report.reason
