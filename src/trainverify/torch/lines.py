"""Where the user wrote what runs: the innermost frame that is neither PyTorch's, Python's nor ours; modules by name.

A backward op has no frame of the user's, unless an `autograd.Function` runs: its node has the number that the forward op's line was
noted under.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any, Final

import torch
import typing_extensions

from trainverify.graph.program import Source
from trainverify.torch.frames import ENGINE, OURS, TORCH, is_ours
from trainverify.torch.wrappers import Wrappers
from trainverify.translate.emit import Place
from trainverify.translate.names import clean

_PYTHON: Final = str(Path(sysconfig.get_paths()["stdlib"]).resolve()) + os.sep
_DEPRECATED: Final = str(Path(typing_extensions.__file__).resolve())  # the wrapper of deprecated functions
MOST_LINES: Final = 12  # of a stack of the user's


@cache
def is_users(file: str) -> bool:
    if file.startswith("<"):
        return False
    path = str(Path(file).resolve())
    inside = path == _DEPRECATED or path.startswith((TORCH, OURS)) or (path.startswith(_PYTHON) and "site-packages" not in path)
    return not inside


def may_be_users(file: str) -> bool:
    """The same of code that was made from text (`exec`) and has no file: whose it is, nothing says."""
    return is_users(file) or (file.startswith("<") and not file.startswith(("<frozen", "<__array")))


@cache
def shown(file: str, folder: str) -> str:
    path = Path(file).resolve()
    if path.is_relative_to(folder):
        return path.relative_to(folder).as_posix()
    installed = path.parts.index("site-packages") + 1 if "site-packages" in path.parts else -1
    return Path(*path.parts[installed:]).as_posix()


@cache
def source(lines: tuple[tuple[str, int], ...]) -> Source | None:
    """The innermost of some lines, with those that led there; of very many, those next to both ends."""
    found = None
    for file, line in reversed(lines if len(lines) <= MOST_LINES else (*lines[: MOST_LINES // 2], *lines[-MOST_LINES // 2 :])):
        found = Source(shown(file, os.getcwd()), line, found)
    return found


def user_frame(frame: FrameType | None, passed: list[FrameType] | None = None) -> tuple[Source | None, bool]:
    """The innermost user's line with those that led there, and whether it only called `backward`: then it says nothing.

    Frames of PyTorch's on the way are added to `passed`."""
    passed_engine, lines = False, []
    while frame is not None:
        code = frame.f_code
        if is_ours(code.co_filename) and code.co_name in ("capture", "capture_script"):
            break  # what follows called the capture, and none of it is the step's
        if is_users(code.co_filename):
            lines.append((code.co_filename, frame.f_lineno))
        elif not lines:
            passed_engine = passed_engine or code is ENGINE
            if passed is not None and not is_ours(code.co_filename):
                passed.append(frame)
        frame = frame.f_back
    return source(tuple(lines)), passed_engine


class Lines:
    """The place of what runs now."""

    def __init__(self) -> None:
        self.names: dict[int, str] = {}  # id of a module → its name
        self.stack: list[str] = []
        self.noted: dict[int, Place] = {}  # sequence number of an autograd node → place of the forward op
        self.optimizing = False
        self.wrappers = Wrappers(lambda: user_frame(sys._getframe(1))[0])

    def name_modules(self, root: torch.nn.Module, prefix: str = "") -> None:
        for name, module in root.named_modules(prefix=prefix):
            self.names.setdefault(id(module), clean(name))

    def hooks(self) -> list[Any]:
        """Global hooks that keep track of the module that runs; call `remove` on each at the end."""
        from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

        def enter(module: torch.nn.Module, args: Any) -> None:
            self.stack.append(self.names.get(id(module), ""))

        def leave(module: torch.nn.Module, args: Any, result: Any) -> None:
            if self.stack:
                self.stack.pop()

        return [register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True)]

    def here(self) -> Place:
        passed: list[FrameType] = []
        source, backward = user_frame(sys._getframe(1), passed)
        for asked in reversed(self.wrappers.of(passed)):
            source, backward = Source(asked.file, asked.line, asked.caller if source is None else source), False
        node = torch._C._current_autograd_node()
        if node is not None:
            number = int(node._sequence_nr())
            noted = self.noted.get(number, Place())
            line = source if source is not None and not backward else noted.source or source
            return Place(line, noted.module, "backward")
        module = next((m for m in reversed(self.stack) if m), "")
        place = Place(source, module, "optimizer" if self.optimizing else "forward")
        if torch.is_grad_enabled():
            self.noted.setdefault(int(torch.autograd._get_sequence_nr()) - 1, place)
        return place
