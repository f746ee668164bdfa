"""Captures on disk: a program in our format, and beside it what else is known of the rank.

A capture is used again if everything it depended on is as it was: the command, this version of TrainVerify and of PyTorch, the
environment, and every file that the process read while it captured (sources, configurations), with the names beside them. Code that
depends on anything else (time, network, random files) must not be cached.
"""

from __future__ import annotations

import hashlib
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, make_dataclass, replace
from pathlib import Path
from typing import Any, Final, get_type_hints

import msgspec
import torch

from trainverify import files
from trainverify.graph.program import Program, Source
from trainverify.torch.capture import Captured
from trainverify.torch.launch import Failed, run
from trainverify.torch.lines import is_users

LARGE: Final = 1 << 22  # bytes of a file from which on its size and date count, not its content
MOST: Final = 4000  # files that are kept
VOLATILE: Final = ("_", "PWD", "OLDPWD", "SHLVL", "COLUMNS", "LINES", "TERM", "PYTEST_CURRENT_TEST", "WINDOWID")
_SYSTEM: Final = ("/proc/", "/sys/", "/dev/", "/etc/", "/usr/", "/lib")


_TYPES: Final = {n: t for n, t in get_type_hints(Captured).items() if n != "program"}
Facts: Any = make_dataclass("Facts", list(_TYPES.items()))  # all that a file of our format does not hold about a captured rank


@dataclass(frozen=True)
class Stacks:
    """The lines of a program's ops with the lines that led there, which a file of our format does not hold: each once, and by op."""

    found: list[Source]
    by_op: list[int]  # -1: no line

    @staticmethod
    def of(program: Program) -> Stacks:
        places: dict[tuple[Source, tuple[Source, ...]], int] = {}
        by_op = [-1 if op.source is None else places.setdefault((op.source, op.source.callers), len(places)) for op in program.ops]
        return Stacks([_chain((line, *callers)) for line, callers in places], by_op)

    def put_back(self, program: Program) -> Program:
        ops = [op if i < 0 else replace(op, source=self.found[i]) for op, i in zip(program.ops, self.by_op, strict=True)]
        return replace(program, ops=tuple(ops))


def _chain(lines: Sequence[Source]) -> Source:
    """The first of some lines, with the others as those that led there."""
    found = None
    for line in reversed(lines):
        found = Source(line.file, line.line, found)
    assert found is not None
    return found


Kept: Any = make_dataclass("Kept", [("depends", dict[str, str]), ("facts", Facts), ("stacks", Stacks), ("said", Any)])
# `depends` says of every file and folder what it was; `said` is what a script says about its batch and mesh


@dataclass(frozen=True)
class Found:
    """A result, and what the process that made it read; nothing if that cannot be told."""

    result: Any
    depends: dict[str, str] | None


class Reading:
    """The files that this process opens for reading, from now on."""

    def __init__(self) -> None:
        self.paths: set[str] = set()
        self.began = time.time()
        sys.addaudithook(self._opened)

    def _opened(self, event: str, args: tuple[Any, ...]) -> None:
        if event != "open":
            return
        path, _, flags = args
        if isinstance(path, bytes):
            path = os.fsdecode(path)
        if isinstance(path, str) and isinstance(flags, int) and not flags & (os.O_WRONLY | os.O_RDWR):
            self.paths.add(os.path.abspath(path))

    def depends(self) -> dict[str, str] | None:
        """What was read, as it is now; None if something changed meanwhile."""
        modules = [str(m.__file__) for m in list(sys.modules.values()) if getattr(m, "__file__", None)]
        sources = {p.replace("/__pycache__/", "/").rsplit(".", 2)[0] + ".py" if p.endswith(".pyc") else p for p in self.paths}
        read = {p for p in (*sources, *modules) if not p.startswith(_SYSTEM) and is_users(p) and os.path.isfile(p)}
        if any(os.stat(p).st_mtime > self.began for p in read):
            return None
        return {p: mark(p) for p in sorted({*read, *(os.path.dirname(p) for p in read)})}


def mark(path: str) -> str:
    """What a file or folder is: its content, or its size and date if it is large or installed; the names in a folder."""
    try:
        if os.path.isdir(path):
            names = sorted(n for n in os.listdir(path) if not n.startswith((".", "__pycache__")))
            return hashlib.sha256("\n".join(names).encode()).hexdigest()
        found = os.stat(path)
        if found.st_size > LARGE or "site-packages" in path:
            return f"{found.st_size} {found.st_mtime_ns}"
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError:
        return "absent"


def ours() -> str:
    """This version of TrainVerify, to the letter."""
    import trainverify

    root = Path(trainverify.__file__).parent
    found = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        found.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return found.hexdigest()


def default_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trainverify" / "captures"


def noted(work: Callable[[], Any]) -> Callable[[], Found]:
    """The same work, with what it reads."""

    def run_noted() -> Found:
        reading = Reading()
        result = work()
        return Found(result, reading.depends())

    return run_noted


class Cache:
    """A folder of captures; `key` is all that is known before a capture runs."""

    def __init__(self, folder: Path, *key: object):
        environment = sorted((k, v) for k, v in os.environ.items() if k not in VOLATILE and not k.startswith(("SSH_", "XDG_")))
        parts = (ours(), torch.__version__, platform.python_version(), os.getcwd(), environment, sys.path, key)
        self.folder = folder
        self._key = repr(parts)
        self._marks: dict[str, str] = {}
        self.used = 0

    def notes(self) -> list[str]:
        """For the report, if captures were used again."""
        again = f"{self.used} captures of the same sources and arguments were used again (--no-cache captures anew): {self.folder}"
        return [again] if self.used else []

    def _path(self, which: object) -> Path:
        return self.folder / hashlib.sha256(repr((self._key, which)).encode()).hexdigest()[:32]

    def _mark(self, path: str) -> str:
        if path not in self._marks:
            self._marks[path] = mark(path)
        return self._marks[path]

    def get(self, which: object) -> tuple[Captured, Any] | None:
        """A capture whose files are all as they were, and what was said with it."""
        path = self._path(which)
        try:
            kept = msgspec.json.decode(path.with_suffix(".facts.json").read_bytes(), type=Kept)
            if any(self._mark(p) != was for p, was in kept.depends.items()):
                return None
            program = kept.stacks.put_back(files.read_program(path.with_suffix(".logical.json.gz")))
        except (OSError, ValueError, msgspec.MsgspecError, files.FileError):
            return None
        self.used += 1
        return Captured(program=program, **vars(kept.facts)), kept.said

    def put(self, which: object, captured: Captured, depends: dict[str, str] | None, said: Any = None) -> Captured:
        """Keep a capture, and give it back as it will be read. One whose file would not say the same is not kept."""
        if depends is None:
            return captured
        path = self._path(which)
        stacks = Stacks.of(captured.program)
        kept = Kept(depends, Facts(**{n: getattr(captured, n) for n in _TYPES}), stacks, said)
        try:
            text = msgspec.json.encode(kept)
            self.folder.mkdir(parents=True, exist_ok=True)
            files.write(path.with_suffix(".logical.json.gz"), captured.program)
            program = files.read_program(path.with_suffix(".logical.json.gz"))
            if program != captured.program or msgspec.json.decode(text, type=Kept) != kept:
                path.with_suffix(".logical.json.gz").unlink()
                return captured
            part = path.with_suffix(f".{os.getpid()}.part")
            part.write_bytes(text)
            part.replace(path.with_suffix(".facts.json"))
        except (OSError, TypeError, msgspec.MsgspecError, files.FileError):
            return captured
        self._prune()
        return replace(captured, program=stacks.put_back(program))

    def _prune(self) -> None:
        found = sorted(self.folder.iterdir(), key=lambda p: p.stat().st_mtime)
        for p in found[: max(0, len(found) - MOST)]:
            p.unlink(missing_ok=True)

    def captured(
        self,
        works: Mapping[Any, Callable[[], Any]],
        split: Callable[[Any], tuple[Captured, Any]],
        tell: Callable[[int], None],
        seconds: float = 600.0,
    ) -> list[tuple[Captured, Any] | Failed]:
        """What every work gives, from here or by running it. `split` takes a result apart into a capture and what is said with it."""
        self._marks.clear()
        known = {which: self.get(which) for which in works}
        left = [which for which, found in known.items() if found is None]
        made: Sequence[Any] = run([noted(works[w]) for w in left], seconds=seconds, tell=tell) if left else ()
        results: dict[Any, tuple[Captured, Any] | Failed] = {w: found for w, found in known.items() if found is not None}
        for which, found in zip(left, made, strict=True):
            if isinstance(found, Failed):
                results[which] = found
                continue
            captured, said = split(found.result)
            results[which] = self.put(which, captured, found.depends, said), said
        return [results[w] for w in works]
