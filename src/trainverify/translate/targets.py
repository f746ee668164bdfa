"""Functions of the user's files, by `file.py:name`."""

from __future__ import annotations

import importlib.util
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

Target = Callable[..., Any] | str


class CaptureError(Exception):
    """The user's code could not be run, or not be captured; the text says where."""


def resolve(target: Target) -> Callable[..., Any]:
    """A function, or `file.py:name`: Python runs that file."""
    if not isinstance(target, str):
        return target
    found: Callable[..., Any] = getattr(module_of(target), target.rpartition(":")[2])
    return found


def module_of(target: str) -> ModuleType:
    """The file of `file.py:name`, run anew. Settings are this file's, also if the function comes from another one."""
    file, _, name = target.rpartition(":")
    path = Path(file)
    if not file or not path.is_file():
        raise CaptureError(f"{target}: expected file.py:function")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise CaptureError(f"{file}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    folder = path.resolve().parent
    _forget_namesakes(folder)
    sys.modules[path.stem] = module
    sys.path.insert(0, str(folder))
    try:
        spec.loader.exec_module(module)
    except MemoryError:
        raise
    except (Exception, SystemExit) as error:  # whatever the user's file raises
        raise CaptureError(f"{file} cannot be imported: {type(error).__name__}: {error}") from error
    if not hasattr(module, name):
        raise CaptureError(f"{file} has no {name!r}")
    return module


def _forget_namesakes(folder: Path) -> None:
    """Of modules in this folder: what another target imported under their names. Python would take that for them."""
    installed = tuple(sysconfig.get_paths()[k] for k in ("stdlib", "purelib", "platlib"))
    others = set()
    for name, module in sys.modules.items():
        file = getattr(module, "__file__", None)
        own = [p for p in (folder / f"{name}.py", folder / name / "__init__.py") if p.is_file()]
        if own and file and name != "__main__" and not file.startswith(installed) and Path(file).resolve() not in own:
            others.add(name)
    for name in list(sys.modules):
        if name.partition(".")[0] in others:
            del sys.modules[name]
