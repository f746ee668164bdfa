"""Functions of the user's files, by `file.py:name`."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

Target = Callable[..., Any] | str


class CaptureError(Exception):
    """The user's code could not be run, or not be captured; the text says where."""


def resolve(target: Target) -> Callable[..., Any]:
    """A function, or `file.py:name`: Python runs that file."""
    if not isinstance(target, str):
        return target
    file, _, name = target.rpartition(":")
    path = Path(file)
    if not file or not path.is_file():
        raise CaptureError(f"{target}: expected file.py:function")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise CaptureError(f"{file}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    sys.path.insert(0, str(path.resolve().parent))
    spec.loader.exec_module(module)
    if not hasattr(module, name):
        raise CaptureError(f"{file} has no {name!r}")
    found: Callable[..., Any] = getattr(module, name)
    return found
