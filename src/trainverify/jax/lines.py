"""Where the user wrote an equation, in which pass it runs, and what to call its result."""

from __future__ import annotations

import linecache
import os
import re
from functools import cache
from pathlib import Path
from typing import Any, Final

from jax._src import source_info_util

from trainverify.graph.program import Phase, Source

MOST_LINES: Final = 8  # of a stack of the user's
_ASSIGNED: Final = re.compile(r"\s*([A-Za-z_]\w*)\s*(?::[^=]+)?=[^=]")


@cache
def shown(file: str, folder: str) -> str:
    path = Path(file).resolve()
    return (path.relative_to(folder) if path.is_relative_to(folder) else Path(path.name)).as_posix()


@cache
def installed(file: str) -> bool:
    """Whether a file is a library's: its lines matter only if there are no others."""
    return "site-packages" in file or file.startswith("<") or f"{os.sep}trainverify{os.sep}jax{os.sep}" in file


@cache
def source_of(frames: tuple[tuple[str, int], ...]) -> Source | None:
    """The innermost line, with those that led there."""
    found = None
    for file, line in reversed(frames[:MOST_LINES]):
        found = Source(shown(file, os.getcwd()), line, found)
    return found


@cache
def assigned(file: str, line: int) -> str | None:
    """The variable that a line of source assigns to."""
    found = _ASSIGNED.match(linecache.getline(file, line))
    return found.group(1) if found else None


def where(info: Any) -> tuple[Source | None, str, str | None]:
    """The user's line of an equation, the function it is in, and the variable it assigns to."""
    frames = list(source_info_util.user_frames(info.traceback))
    own = [f for f in frames if not installed(f.file_name)] or frames
    if not own:
        return None, "", None
    first = own[0]
    source = source_of(tuple((f.file_name, f.start_line) for f in own))
    function = first.function_name.rpartition("<locals>.")[2].replace("<lambda>", "lambda")
    return source, "" if function == "<module>" else function, assigned(first.file_name, first.start_line)


def function_line(jaxpr: Any) -> Source | None:
    """Where the function begins that a jaxpr was traced from: `step at train.py:12`."""
    text = str(getattr(getattr(jaxpr, "debug_info", None), "func_src_info", "") or "")
    file, _, line = text.partition(" at ")[2].rpartition(":")
    return source_of(((file, int(line)),)) if file and line.isdigit() else None


def phase_of(info: Any, outer: Phase) -> Phase:
    """Backward within a transposed function; what has no derivative at all is neither that nor the pass before it."""
    stack = str(info.name_stack)
    if outer == "backward" or "transpose(" in stack:
        return "backward"
    return "forward"


__all__ = ["assigned", "function_line", "installed", "phase_of", "source_of", "where"]
