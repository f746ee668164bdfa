"""Pairs of a logical program and a plan as files, each once, by what is in it. `pytest --keep-plans FOLDER` keeps those of the suite."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from trainverify import files
from trainverify.files.encode import encode, text
from trainverify.files.errors import Bad
from trainverify.graph.plan import Plan
from trainverify.graph.program import Program
from trainverify.ops import OPS
from trainverify.ops.table import OpTable

MOST: Final = 30_000  # ops, as they are written, of the largest pair that is kept
LOGICAL, PLAN = ".logical.json.gz", ".plan.json.gz"


def keep(folder: Path, logical: Program, plan: Plan, ops: OpTable, whose: str) -> None:
    """Writes a pair if it is new. `left out` lists, process by process, those that are not written, and why."""
    why = ""
    if ops != OPS:
        why = "operators of its own"
    elif _ops(logical) + sum(_ops(t.program) for t in plan.templates) + sum(len(f.ops) for f in plan.functions.values()) > MOST:
        why = f"more than {MOST} ops"
    else:
        try:
            name = _name(logical, plan)
            if not (folder / (name + PLAN)).exists():
                files.write(folder / (name + LOGICAL), logical)
                files.write(folder / (name + PLAN), plan)
                _note(folder, "kept", f"{name} {whose}")
        except (files.FileError, Bad) as error:
            why = f"no file can hold it: {error.reason}"
    if why:
        _note(folder, "left out", f"{why}\t{whose}")


def kept(folder: Path) -> list[str]:
    """Names of all pairs, those with the smallest files first."""
    return [p.name.removesuffix(PLAN) for p in sorted(folder.glob("*" + PLAN), key=lambda p: (p.stat().st_size, p.name))]


def read(folder: Path, name: str) -> tuple[Program, Plan]:
    return files.read_program(folder / (name + LOGICAL)), files.read_plan(folder / (name + PLAN))


def left_out(folder: Path) -> Iterator[tuple[str, str]]:
    """What was not kept: why, and whose it is."""
    for path in sorted(folder.glob("left out.*.txt")):
        for line in dict.fromkeys(path.read_text("utf-8").splitlines()):
            why, _, whose = line.partition("\t")
            yield why, whose


def _ops(program: Program) -> int:
    return len(program.ops) + sum(len(f.ops) for f in program.functions.values())


def _name(logical: Program, plan: Plan) -> str:
    digest = hashlib.sha256()
    for content in (logical, plan):
        for piece in text(encode(content)):
            digest.update(piece)
        digest.update(b"\0")
    return digest.hexdigest()[:16]


def _note(folder: Path, kind: str, line: str) -> None:
    with (folder / f"{kind}.{os.getpid()}.txt").open("a", encoding="utf-8") as f:
        f.write(line + "\n")
