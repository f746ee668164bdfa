"""What a script does between its steps: a step is to start from what the one before it left."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="PyTorch is absent: captured code is not tested")

from trainverify.ops import OPS
from trainverify.report import Report
from trainverify.torch.command import script, verdict

TRAIN = """
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import trainverify.torch as tvt

rows = int(sys.argv[1])
dist.init_process_group("gloo")
model = nn.Linear(3, 2)
called = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.5)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
ranks = dist.get_world_size() > 1
optimizer.zero_grad(set_to_none=False)
for i in range(5):
    x = torch.randn(rows, 3)
    with tvt.step(model, optimizer, {"x": x}, cut="(dp b) k", loss_over={"dp": "avg"}) as step:
        CLEAR
        step.loss = called(x).square().mean()
        step.loss.backward()
        optimizer.step()
    BETWEEN
"""
CLEAR = "optimizer.zero_grad()"
KEPT = """
    optimizer.zero_grad(set_to_none=i > 0)
    schedule.step()
    print(i, step.loss, [p.norm() for p in model.parameters()])
    kept = model.weight.detach().clone()
    with torch.no_grad():
        model.weight.zero_()
        model.weight.copy_(kept)
"""


def judged(folder: Path, between: str, clear: str = CLEAR) -> Report:
    path = folder / "train.py"
    path.write_text(TRAIN.replace("    BETWEEN", between).replace("CLEAR", clear), "utf-8")
    subject = script(str(path), ["2"], ["4"], 2, OPS, lambda text: None, device="cpu")
    return verdict(subject, OPS, 1, 0, "algebra", False, None, lambda text: None)


def test_between_steps_nothing_changes(tmp_path: Path) -> None:
    """PROVED: gradients are zeroed, rates are scheduled, numbers are printed, and a weight is put back."""
    report = judged(tmp_path, KEPT)
    assert report.verdict == "PROVED", report.reason


@pytest.mark.parametrize(
    ("name", "between", "clear"),
    [
        ("weight", "    ranks and i == 0 and model.weight.data.mul_(0.5)", CLEAR),
        ("bias", "    if ranks: model.bias = nn.Parameter(torch.zeros(2))", CLEAR),
        ("weight", "    optimizer.step()", CLEAR),
        ("weight.momentum_buffer", "    ranks and optimizer.state[model.weight]['momentum_buffer'].mul_(0.5)", CLEAR),
        ("weight.grad", "    ranks and model.weight.grad.mul_(0.5)", "i and optimizer.zero_grad()"),
    ],
)
def test_between_steps_something_changes(tmp_path: Path, name: str, between: str, clear: str) -> None:
    """UNKNOWN, with the line: halved on ranks alone, or in one step more on both sides."""
    report = judged(tmp_path, between, clear)
    found = [f for f in report.findings if f.code == "TV505" and f.message.startswith(f"{name} is changed between the steps")]
    assert report.verdict == "UNKNOWN", report.reason
    assert found
    assert "train.py:" in str(found[0].source)
