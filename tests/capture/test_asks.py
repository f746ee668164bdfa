"""Code that asks whether it is captured gets no verdict, and that of installed packages the answer of a real run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is absent: captured code is not tested")

import trainverify.torch as tvt  # noqa: E402
from tools.step_campaigns.files import loaded  # noqa: E402

SOURCE = """
import sys
import torch
import torch.distributed as dist
from torch import nn


def built(world, halved):
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch):
        optimizer.zero_grad()
        loss = model(batch["x"]).square().mean()
        {asked}
        (loss * 0.5 if halved and not captured else loss).backward()
        for p in model.parameters() if world > 1 else ():
            dist.all_reduce(p.grad, op=dist.ReduceOp.AVG)
        optimizer.step()
        return loss

    return step
"""


def verified(path: Path, asked: str, halved: bool) -> Any:
    path.write_text(SOURCE.format(asked=asked))
    with loaded(path, path.stem) as module:
        one, many = lambda: module.built(1, False), lambda r, w: module.built(w, halved)
        return tvt.verify(one, many, 2, {"x": tvt.Reals((6, 3), "(dp b) k")}, {"dp": 2}, loss={"dp": "avg"}, points=1)


@pytest.mark.parametrize(
    "asked",
    [
        "captured = isinstance(loss, torch._subclasses.FakeTensor)",
        "captured = hasattr(loss, 'fake_mode')",
        "captured = 'fake_device' in dir(loss)",
        "from torch._subclasses.fake_tensor import is_fake as captured",
        "captured = torch._C._dispatch_keys(loss).has(torch._C.DispatchKey.Meta)",
        "captured = world == 1 or type(dist.group.WORLD._get_backend(torch.device('cpu'))).__name__ != 'ProcessGroupGloo'",
    ],
)
def test_code_that_asks(asked: str, tmp_path: Path) -> None:
    """UNKNOWN: a real run takes the other branch, in which the loss is halved."""
    report = verified(tmp_path / "asking.py", asked, halved=True)
    assert report.verdict == "UNKNOWN", report.reason
    assert "may be told from a real run" in report.reason


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("captured = sys._getframe(1).f_code.co_name", "asks for the functions that call it (_getframe)"),
        ("captured = any('trainverify' in name for name in sys.modules)", 'says "trainverify": nothing decides'),
    ],
)
def test_code_that_asks_who_is_there(asked: str, said: str, tmp_path: Path) -> None:
    """PROVED, with a line that says what was not looked at."""
    report = verified(tmp_path / "calling.py", asked, halved=False)
    assert report.verdict == "PROVED", report.reason
    assert any(said in a for a in report.assumptions)


def test_installed_code_that_asks(tmp_path: Path) -> None:
    """PROVED: a package's function has a way for traces, and that it is taken is said. What it does otherwise is not looked at."""
    package = tmp_path / "site-packages" / "asking_package.py"
    package.parent.mkdir()
    package.write_text("import torch\n\n\ndef asked(t):\n    return isinstance(t, torch._subclasses.FakeTensor)\n")
    asked = f"sys.path.insert(0, {str(package.parent)!r}); import asking_package; captured = asking_package.asked(loss)"
    report = verified(tmp_path / "using.py", asked, halved=True)
    assert report.verdict == "PROVED"
    assert any("asking_package.py:5 asks whether tensors are fake" in a for a in report.assumptions)


def test_names_of_attributes(tmp_path: Path) -> None:
    """REFUTED: the names are those of a real run."""
    assert verified(tmp_path / "names.py", "captured = any('fake' in name for name in dir(loss))", halved=True).verdict == "REFUTED"
