"""Loading the file of a program."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType


@contextlib.contextmanager
def loaded(path: Path, name: str) -> Iterator[ModuleType]:
    """A file as a module of its own; the environment and the default type are as before afterwards."""
    before = dict(os.environ)
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
        yield module
    finally:
        sys.modules.pop(name, None)
        for key in set(os.environ) - set(before):
            del os.environ[key]
        os.environ.update(before)
