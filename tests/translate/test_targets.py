"""`file.py:name`: the function and the settings of the file that is named, and of no other."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainverify.translate.targets import CaptureError, module_of, resolve


@pytest.fixture(autouse=True)
def _modules() -> Iterator[None]:
    """Modules and paths that a test adds are gone after it."""
    modules, path = dict(sys.modules), list(sys.path)
    yield
    sys.modules.clear()
    sys.modules.update(modules)
    sys.path[:] = path


def written(folder: Path, **files: str) -> Path:
    folder.mkdir(exist_ok=True)
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    return folder


def test_settings_are_those_of_the_named_file(tmp_path: Path) -> None:
    """The function comes from another file, which has a batch of its own."""
    other = "batch = 'of the other'\ndef step():\n    pass\n"
    folder = written(tmp_path, other=other, named="from other import *\nbatch = 'of the named'\n")
    assert vars(module_of(f"{folder / 'named.py'}:step"))["batch"] == "of the named"
    assert vars(module_of(f"{folder / 'other.py'}:step"))["batch"] == "of the other"


def test_every_target_has_the_modules_of_its_own_folder(tmp_path: Path) -> None:
    """Both files import a module `parts`, and each has one beside it; one folder lies in the other."""
    step = "from parts import number\ndef step():\n    return number\n"
    outer = written(tmp_path / "outer", train=step, parts="number = 2\n")
    inner = written(outer / "inner", train=step, parts="number = 3\n")
    found = [resolve(f"{folder / 'train.py'}:step")() for folder in (outer, inner, outer, inner)]
    assert found == [2, 3, 2, 3]


def test_a_name_that_is_missing(tmp_path: Path) -> None:
    folder = written(tmp_path, named="")
    with pytest.raises(CaptureError, match="has no 'step'"):
        resolve(f"{folder / 'named.py'}:step")
