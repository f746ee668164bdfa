"""Code that reads computed values: symbolic numbers, and branches on data captured both ways."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is absent: captured code is not tested")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402

import trainverify.torch as tvt  # noqa: E402

BATCH = {"x": tvt.Reals((6, 3), "(dp b) k")}
Update = Callable[[Any, Any, Any, int], Any]


def norm_of(model: Any) -> Any:
    return torch.stack([p.grad.square().sum() for p in model.parameters()]).sum().sqrt()


def build(update: Update, rank: int, world: int) -> Any:
    model = nn.Linear(3, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch: Any) -> Any:
        optimizer.zero_grad()
        loss = model(batch["x"]).square().mean()
        loss.backward()
        if world > 1:
            for p in model.parameters():
                dist.all_reduce(p.grad, op=dist.ReduceOp.AVG)
        update(model, optimizer, norm_of(model), rank)
        return {"loss": loss}

    return step


def verify(ranks: Update, reference: Update | None = None, **more: Any) -> Any:
    one = reference or ranks
    return tvt.verify(lambda: build(one, 0, 1), lambda r, w: build(ranks, r, w), 2, BATCH, {"dp": 2}, loss={"dp": "avg"}, points=1, **more)


def stepped_if_finite(model: Any, optimizer: Any, norm: Any, rank: int) -> None:
    if torch.isfinite(norm):
        optimizer.step()


def stepped_if_its_own_is_finite(model: Any, optimizer: Any, norm: Any, rank: int) -> None:
    """A number that ranks have otherwise, of which only that it is finite is asked."""
    if torch.isfinite(norm + rank * model.bias.square().sum()):
        optimizer.step()


def stepped_where_positive(model: Any, optimizer: Any, norm: Any, rank: int) -> None:
    model.bias.grad[model.bias > 0].sum()
    optimizer.step()


def clipped(model: Any, optimizer: Any, norm: Any, rank: int) -> None:
    if norm > 1.0:
        for p in model.parameters():
            p.grad.mul_(1.0 / norm)
    optimizer.step()


def clipped_by_number(model: Any, optimizer: Any, norm: Any, rank: int) -> None:
    value = norm.item()
    print(f"norm {value:.3f}")
    if value > 1.0:
        for p in model.parameters():
            p.grad.mul_(1.0 / value)
    optimizer.step()


def skipped_otherwise(model: Any, optimizer: Any, norm: Any, rank: int) -> None:
    """The other way than it should be."""
    if torch.isfinite(norm):
        optimizer.step()
    else:
        with torch.no_grad():
            model.weight.zero_()


def clipped_by_a_sum_of_numbers(model: Any, optimizer: Any, norm: Any, rank: int) -> None:
    """Numbers that are read go back into a tensor, and both ranks add theirs up."""
    two = torch.tensor([norm.item(), 2 * norm.item() + 1], dtype=torch.float32)
    if dist.is_initialized():
        dist.all_reduce(two)
        two = two / dist.get_world_size()
    mean = torch.as_tensor(two[1].item())
    for p in model.parameters():
        p.grad.mul_(1.0 / mean)
    optimizer.step()


def added_up_only(model: Any, optimizer: Any, norm: Any, rank: int) -> None:
    """The sum is not divided by the number of ranks."""
    two = torch.tensor([norm.item(), 2 * norm.item() + 1], dtype=torch.float32)
    dist.all_reduce(two)
    for p in model.parameters():
        p.grad.mul_(1.0 / two[1])
    optimizer.step()


def clipped_on_one_rank(model: Any, optimizer: Any, norm: Any, rank: int) -> None:
    """Another limit on rank 1."""
    if norm > 1.0 + rank:
        for p in model.parameters():
            p.grad.mul_(1.0 / norm)
    optimizer.step()


def clipped_too_much(model: Any, optimizer: Any, norm: Any, rank: int) -> None:
    if norm > 1.0:
        for p in model.parameters():
            p.grad.mul_(0.5 / norm)
    optimizer.step()


def decided_by_number(model: Any, optimizer: Any, norm: Any, rank: int) -> None:
    optimizer.param_groups[0]["lr"] = 0.1 / (1.0 + float(norm))
    optimizer.step()


def many(model: Any, optimizer: Any, norm: Any, rank: int) -> None:
    for limit in (1.0, 2.0, 3.0, 4.0):
        if norm > limit:
            model.bias.grad.mul_(0.5)
    optimizer.step()


@pytest.mark.parametrize("update", [stepped_if_finite, clipped, clipped_by_number])
def test_both_ways(update: Update) -> None:
    """PROVED, from two captures."""
    report = verify(update)
    assert report.verdict == "PROVED", report.reason
    assert any("captured 2 ways" in n for n in report.notes)


def test_the_same_by_another_spelling() -> None:
    """PROVED: a number that is read and a tensor that is not are the same condition."""
    assert verify(clipped_by_number, clipped).verdict == "PROVED"


def test_numbers_that_go_back_into_tensors() -> None:
    """PROVED, and REFUTED where a division is forgotten."""
    assert verify(clipped_by_a_sum_of_numbers).verdict == "PROVED"
    assert verify(added_up_only, clipped_by_a_sum_of_numbers).verdict == "REFUTED"


def test_a_wrong_way() -> None:
    """Not PROVED: what ranks do where the norm is not finite differs. Over the reals it never happens."""
    report = verify(skipped_otherwise, stepped_if_finite)
    assert report.verdict == "UNKNOWN"
    assert "is False" in report.reason


def test_a_wrong_condition() -> None:
    """Not PROVED: rank 1 compares with 2. At most points both conditions have one value."""
    report = verify(clipped_on_one_rank, clipped)
    assert report.verdict in ("REFUTED", "UNKNOWN")
    open_ones = [o.name for o in report.obligations if o.status not in ("proved", "agreed")]
    assert open_ones == ["metric condition 1"]


def test_a_condition_that_holds_of_other_numbers_too() -> None:
    """UNKNOWN: no data was found where the conditions part."""
    report = verify(stepped_if_its_own_is_finite, stepped_if_finite)
    assert report.verdict == "UNKNOWN", report.reason
    assert "no data was found" in report.reason


def test_a_size_that_depends_on_data() -> None:
    """UNKNOWN, and the line is named."""
    report = verify(stepped_where_positive)
    assert report.verdict == "UNKNOWN", report.reason
    assert "depends on data" in report.reason
    assert "test_branches.py" in report.reason


def test_a_wrong_branch() -> None:
    """REFUTED where the condition holds."""
    report = verify(clipped_too_much, clipped)
    assert report.verdict == "REFUTED", report.reason
    assert "is True" in report.reason


def test_the_value_itself() -> None:
    """UNKNOWN, with the line: Python needs the number."""
    report = verify(decided_by_number)
    assert report.verdict == "UNKNOWN"
    assert "test_branches.py" in report.reason
    assert "float()" in report.reason


def chosen_by_data(model: Any, optimizer: Any, norm: Any, rank: int) -> None:
    for _ in range(int(norm * 0 + 2)):
        model.bias.grad.mul_(0.5)
    optimizer.step()


def chosen_wrongly(model: Any, optimizer: Any, norm: Any, rank: int) -> None:
    for _ in range(int(norm * 0 + 2 + rank)):
        model.bias.grad.mul_(0.5)
    optimizer.step()


def test_a_real_run() -> None:
    """PROVED, and what was read is an assumption; UNKNOWN on fake tensors."""
    assert verify(chosen_by_data).verdict == "UNKNOWN"
    report = verify(chosen_by_data, real=True)
    assert report.verdict == "PROVED", report.reason
    assert any("chosen by the data of this run" in a and "2.0 is read" in a for a in report.assumptions)


def test_a_wrong_real_run() -> None:
    """Not PROVED: rank 1 halves once more, because of a number that it reads; whether other data leads there too is not known."""
    report = verify(chosen_wrongly, chosen_by_data, real=True)
    assert report.verdict == "UNKNOWN"
    assert "read other values" in report.reason


def halved_once_more(model: Any, optimizer: Any, norm: Any, rank: int) -> None:
    chosen_by_data(model, optimizer, norm, rank)
    with torch.no_grad():
        model.bias.mul_(0.5)


def test_a_bug_in_a_real_run() -> None:
    """REFUTED: all read the same, and the bias is halved afterwards."""
    assert verify(halved_once_more, chosen_by_data, real=True).verdict == "REFUTED"


def numpy_in_between(model: Any, optimizer: Any, norm: Any, rank: int) -> None:
    scale = float(norm.detach().numpy() * 0 + 0.5)
    model.bias.grad.mul_(scale)
    optimizer.step()


def test_values_that_leave_pytorch() -> None:
    """UNKNOWN: NumPy is not followed, also where values are real."""
    assert verify(numpy_in_between, real=True).verdict == "UNKNOWN"


def test_too_many() -> None:
    """UNKNOWN with four conditions; with the fourth accepted it is an assumption."""
    assert verify(many).verdict == "UNKNOWN"


@pytest.mark.capture
def test_accepted() -> None:
    report = verify(many, accept_choices=True)
    assert report.verdict == "PROVED", report.reason
    assert any("is True (accepted" in a for a in report.assumptions)


def positions(model: Any, optimizer: Any, norm: Any, rank: int) -> None:
    if (torch.diff(torch.arange(7)) == 1).all():
        optimizer.step()


def test_a_condition_that_constants_decide() -> None:
    """PROVED, and captured one way: no data decides whether positions follow each other."""
    report = verify(positions)
    assert report.verdict == "PROVED", report.reason
    assert not any("conditions on data" in n for n in report.notes)


def test_constants_that_decide_otherwise_on_a_rank() -> None:
    """REFUTED or INVALID: rank 1 takes no step."""

    def other(model: Any, optimizer: Any, norm: Any, rank: int) -> None:
        if (torch.arange(7) < 7 - rank).all():
            optimizer.step()

    assert verify(other, positions).verdict in ("REFUTED", "INVALID")


def decided_at_random(model: Any, optimizer: Any, norm: Any, rank: int) -> None:
    if norm < torch.rand(()):
        optimizer.step()


def test_a_condition_without_a_meaning() -> None:
    """UNKNOWN, with the line of the condition; no error."""
    found = verify(decided_at_random)
    assert found.verdict == "UNKNOWN"
    assert "a condition on a value without a meaning here: a random number" in found.reason


@pytest.mark.parametrize("wanted", [[True, True, False], [True, False, False], [False, False, True], [False, True, True]])
def test_a_step_that_depends_on_two_before_it(wanted: list[bool]) -> None:
    """No verdict, in whatever order the ways have to be taken for ranks to go wrong."""

    def halved(model: Any, optimizer: Any, norm: Any, rank: int) -> None:
        before = getattr(model, "seen", [])
        model.seen = [*before, bool(norm > 1)][-3:]
        if model.seen == wanted:
            model.bias.grad.mul_(0.5)
        optimizer.step()

    def plainly(model: Any, optimizer: Any, norm: Any, rank: int) -> None:
        model.seen = [*getattr(model, "seen", []), bool(norm > 1)][-3:]
        optimizer.step()

    found = verify(halved, plainly)
    assert found.verdict == "UNKNOWN", found.reason
    assert "depends on the way that the step before it took" in found.reason
