"""Digests of calls that agreed with their mapping, kept from run to run: of the call, PyTorch's version and ours to the letter."""

from __future__ import annotations

import contextlib
import hashlib
import os
from functools import lru_cache
from pathlib import Path
from typing import Final

import numpy as np
import torch

from trainverify.torch.kept_files import default_folder, ours

AGREED: Final[set[str]] = set()  # in this process, in those that it started, and in earlier ones
LENGTH: Final = 64  # of a digest


@lru_cache(1)
def versions() -> str:
    return hashlib.sha256(repr((ours(), torch.__version__, np.__version__)).encode()).hexdigest()


def digest(*parts: object) -> str:
    return hashlib.sha256(repr((versions(), parts)).encode()).hexdigest()


def _file() -> Path:
    return default_folder().parent / "calls" / f"{versions()[:16]}.txt"


def recall() -> None:
    """What was remembered by now. Half a line, of a run that was ended, is no digest."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        AGREED.update(line for line in _file().read_text("ascii").split("\n") if len(line) == LENGTH)


def remember(digests: set[str]) -> None:
    """Add digests, for other processes too."""
    new = sorted(digests - AGREED)
    AGREED.update(new)
    if new:
        with contextlib.suppress(OSError):  # a folder that cannot be written costs time, no more
            _file().parent.mkdir(parents=True, exist_ok=True)
            with os.fdopen(os.open(_file(), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "a") as out:
                out.write("".join(f"{d}\n" for d in new))


__all__ = ["AGREED", "digest", "recall", "remember"]
