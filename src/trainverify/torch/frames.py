"""Whose code a frame runs: PyTorch's files by their path in its folder, functions by code object. Users may name files as they like."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Final

import torch

from trainverify.torch.private import _engine_run_backward

TORCH: Final = str(Path(torch.__file__).resolve().parent) + os.sep
OURS: Final = str(Path(__file__).resolve().parent.parent) + os.sep
ENGINE: Final = _engine_run_backward.__code__  # the function that runs a backward pass


@cache
def torchs(file: str) -> str | None:
    """The path of one of PyTorch's files inside its folder; None for any other file."""
    path = os.path.realpath(file)
    return path.removeprefix(TORCH) if path.startswith(TORCH) else None


@cache
def is_ours(file: str) -> bool:
    return os.path.realpath(file).startswith(OURS)
