"""The command: what it reads in the files that it is given."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="PyTorch is absent: captured code is not tested")

from trainverify.cli import run
from trainverify.torch.command import settings_of
from trainverify.torch.inputs import Ids, Reals, with_rows

OTHER = """
import trainverify.torch as tvt
batch = {"x": tvt.Reals((6, 7), "(dp b) k")}
def distributed(rank, world):
    return lambda batch: None
"""
NAMED = """
from other import *
batch = {"x": tvt.Reals((10, 7), "(dp b) k")}
"""


def test_settings_are_those_of_the_named_file(tmp_path: Path) -> None:
    """Rows of `batch`: 10 where the file has its own, 6 where it takes that of the other file."""
    (tmp_path / "other.py").write_text(OTHER)
    for name, text, rows in (("named", NAMED, 10), ("plain", "from other import *\n", 6)):
        (tmp_path / f"{name}.py").write_text(text)
        assert settings_of(f"{tmp_path / name}.py:distributed")["batch"]["x"].shape == (rows, 7)


PAIRS = """
import torch
from torch import nn
import trainverify.torch as tvt

batch = {"q": tvt.Reals((9000, 3)), "k": tvt.Reals((9000, 3))}


def made(less):
    p = nn.Parameter(torch.ones(()))
    optimizer = torch.optim.SGD([p], lr=0.5)

    def step(batch):
        s = batch["q"].shape[0]
        seen = torch.ones(s, s).tril()
        total = ((batch["q"] @ batch["k"].T) * seen * p).sum()
        loss = total / (s * (s + 1) // 2 - less) if less is not None else total / seen.sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def reference():
    return made(None)


def right(rank, world):
    return made(0)


def wrong(rank, world):
    return made(5)
"""


def test_the_same_functions_with_fewer_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Expected: UNKNOWN with 9000 rows, 81 million scores a tensor; with 14 rows too REFUTED if the count is wrong, and UNKNOWN if it is
    right. The verdict names the rows."""
    path = tmp_path / "pairs.py"
    path.write_text(PAIRS)
    alone = ["torch", f"{path}:reference", f"{path}:wrong", "--world-size", "1", "--points", "1"]
    assert run(alone) == 3
    assert capsys.readouterr().out.startswith("UNKNOWN")
    assert run([*alone, "--also", "batch=14"]) == 1
    assert "at batch=14: loss differs on rank 0" in capsys.readouterr().out
    assert run([*alone[:2], f"{path}:right", *alone[3:], "--also", "batch=14"]) == 3
    assert run([*alone, "--also", "rows=14"]) == 2
    assert "--also rows=14: batch=N is what it takes" in capsys.readouterr().err


def test_rows_of_a_batch() -> None:
    batch = {"x": Reals((6, 7), "(dp b) k"), "t": Ids((6,), below=3), "w": Reals((7,)), "s": Reals(())}
    assert {n: s.shape for n, s in with_rows(batch, 10).items()} == {"x": (10, 7), "t": (10,), "w": (7,), "s": ()}
