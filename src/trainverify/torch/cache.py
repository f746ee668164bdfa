"""Captures on disk: a program in our format, and beside it what else is known of the rank.

A capture is used again if everything it depended on is as it was: the command, this version of TrainVerify and of PyTorch, the
environment, and every file that Python opened for reading while it captured (sources, configurations), with the names beside them and in
folders that it listed. Code that depends on anything else (time, network, files that other processes or C++ read) must not be cached.
Captures are kept only on demand.
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
from trainverify.torch.captured import Captured, Steps
from trainverify.torch.kept_files import ours
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


Kept: Any = make_dataclass("Kept", [("depends", dict[str, str]), ("facts", list[Facts]), ("stacks", list[Stacks]), ("said", Any)])
# `depends` says of every file and folder what it was; `said` is what a script says about its batch and mesh; the rest by step


@dataclass(frozen=True)
class Found:
    """A result, and what the process that made it read; nothing if that cannot be told."""

    result: Any
    depends: dict[str, str] | None


class Reading:
    """The files that this process opens for reading and the folders that it lists, from now on."""

    def __init__(self) -> None:
        self.paths: set[str] = set()
        self.listed: dict[str, str] = {}  # folders, and what they were
        self.began = time.time()
        sys.addaudithook(self._opened)

    def _opened(self, event: str, args: tuple[Any, ...]) -> None:
        if event not in ("open", "os.listdir", "os.scandir"):
            return
        path = args[0] or "."
        if not isinstance(path, str | bytes):
            return
        path = os.path.abspath(os.fsdecode(path))
        if event == "open":
            if args[2] & os.O_ACCMODE != os.O_WRONLY:
                self.paths.add(path)
        elif path not in self.listed:
            self.listed[path] = ""  # `mark` lists it too
            self.listed[path] = mark(path)

    def depends(self) -> dict[str, str] | None:
        """What was read, as it is now; None if something changed meanwhile."""
        modules = [str(m.__file__) for m in list(sys.modules.values()) if getattr(m, "__file__", None)]
        sources = {p.replace("/__pycache__/", "/").rsplit(".", 2)[0] + ".py" if p.endswith(".pyc") else p for p in self.paths}
        read = {p for p in (*sources, *modules) if _counts(p) and os.path.isfile(p)}
        folders = {p: was for p, was in self.listed.items() if _counts(p)}
        if any(os.stat(p).st_mtime > self.began for p in read) or any(mark(p) != was for p, was in folders.items()):
            return None
        return {p: mark(p) for p in sorted({*read, *folders, *(os.path.dirname(p) for p in read)})}


def _counts(path: str) -> bool:
    return not path.startswith(_SYSTEM) and is_users(path)


def mark(path: str) -> str:
    """What a file or folder is: its content, or its size and date if it is large or installed; the names in a folder."""
    try:
        if os.path.isdir(path):
            names = sorted(n for n in os.listdir(path) if n != "__pycache__")
            return hashlib.sha256("\n".join(names).encode()).hexdigest()
        found = os.stat(path)
        if found.st_size > LARGE or "site-packages" in path:
            return f"{found.st_size} {found.st_mtime_ns}"
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError:
        return "absent"


def noted(work: Callable[[], Any]) -> Callable[[], Found]:
    """The same work, with what it reads."""

    def run_noted() -> Found:
        reading = Reading()
        result = work()
        return Found(result, reading.depends())

    return run_noted


def _program(path: Path, step: int) -> Path:
    return path.with_suffix(f".{step}.logical.json.gz")


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
        again = f"{self.used} captures of the same sources and arguments were used again (only with --cache): {self.folder}"
        return [again] if self.used else []

    def _path(self, which: object) -> Path:
        return self.folder / hashlib.sha256(repr((self._key, which)).encode()).hexdigest()[:32]

    def _mark(self, path: str) -> str:
        if path not in self._marks:
            self._marks[path] = mark(path)
        return self._marks[path]

    def get(self, which: object) -> tuple[Steps, Any] | None:
        """A capture whose files are all as they were, and what was said with it."""
        path = self._path(which)
        try:
            kept = msgspec.json.decode(path.with_suffix(".facts.json").read_bytes(), type=Kept)
            if any(self._mark(p) != was for p, was in kept.depends.items()):
                return None
            programs = [s.put_back(files.read_program(_program(path, i))) for i, s in enumerate(kept.stacks)]
        except (OSError, ValueError, msgspec.MsgspecError, files.FileError):
            return None
        self.used += 1
        return tuple(Captured(program=p, **vars(facts)) for p, facts in zip(programs, kept.facts, strict=True)), kept.said

    def put(self, which: object, steps: Steps, depends: dict[str, str] | None, said: Any = None) -> Steps:
        """Keep a capture, and give it back as it will be read. One whose file would not say the same is not kept."""
        if depends is None:
            return steps
        path = self._path(which)
        stacks = [Stacks.of(c.program) for c in steps]
        kept = Kept(depends, [Facts(**{n: getattr(c, n) for n in _TYPES}) for c in steps], stacks, said)
        try:
            text = msgspec.json.encode(kept)
            self.folder.mkdir(parents=True, exist_ok=True)
            programs = []
            for i, c in enumerate(steps):
                files.write(_program(path, i), c.program)
                programs.append(files.read_program(_program(path, i)))
            if programs != [c.program for c in steps] or msgspec.json.decode(text, type=Kept) != kept:
                for i in range(len(steps)):
                    _program(path, i).unlink()
                return steps
            part = path.with_suffix(f".{os.getpid()}.part")
            part.write_bytes(text)
            part.replace(path.with_suffix(".facts.json"))
        except (OSError, TypeError, msgspec.MsgspecError, files.FileError):
            return steps
        self._prune()
        return tuple(replace(c, program=s.put_back(p)) for c, s, p in zip(steps, stacks, programs, strict=True))

    def _prune(self) -> None:
        found = sorted(self.folder.iterdir(), key=lambda p: p.stat().st_mtime)
        for p in found[: max(0, len(found) - MOST)]:
            p.unlink(missing_ok=True)

    def captured(
        self,
        works: Mapping[Any, Callable[[], Any]],
        split: Callable[[Any], tuple[Steps, Any]],
        tell: Callable[[int], None],
        seconds: float = 600.0,
    ) -> list[tuple[Steps, Any] | Failed]:
        """What every work gives, from here or by running it. `split` takes a result apart into a capture and what is said with it."""
        self._marks.clear()
        known = {which: self.get(which) for which in works}
        left = [which for which, found in known.items() if found is None]
        made: Sequence[Any] = run([noted(works[w]) for w in left], seconds=seconds, tell=tell) if left else ()
        results: dict[Any, tuple[Steps, Any] | Failed] = {w: found for w, found in known.items() if found is not None}
        for which, found in zip(left, made, strict=True):
            if isinstance(found, Failed):
                results[which] = found
                continue
            captured, said = split(found.result)
            results[which] = self.put(which, captured, found.depends, said), said
        return [results[w] for w in works]
