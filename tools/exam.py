"""Blind exams of training scripts: the verdict on every variant, held against what real runs said before any was verified.

`python -m tools.exam exams/torch_a --half open` (JAX in its own environment). A sealed half is run once, and reported as it is.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

FOUND: Final = ("REFUTED", "INVALID")
MESH: Final = re.compile(r"^mesh\s*=\s*(\{.*\})", re.MULTILINE)
NUMBER: Final = re.compile(r":\s*(\d+)")


@dataclass(frozen=True)
class Case:
    """One variant of a script, and what it should get."""

    exam: str
    script: Path
    variant: str
    expected: tuple[str, ...]
    lines: tuple[int, ...]
    options: tuple[str, ...]

    @property
    def right(self) -> bool:
        return self.variant.startswith("right")


@dataclass(frozen=True)
class Outcome:
    case: Case
    verdict: str
    said: str
    place: int | None
    seconds: float

    @property
    def wrong(self) -> bool:
        """A verdict that is false: worse than none."""
        return self.verdict in (FOUND if self.case.right else ("PROVED",)) or self.verdict == "internal error"


def cases(folder: Path, half: str) -> Iterator[Case]:
    """The variants of a half, by name."""
    kind = "jax" if (folder / "jax").exists() or "jax" in folder.name else "torch"
    for script in sorted((folder / half).glob("*/script.py")):
        said = _expected(folder, half, script.parent.name)
        options = [str(o) for o in said.get("options", ())]
        if kind == "torch":
            found = MESH.search(script.read_text())
            options += ["--world-size", str(math.prod(int(n) for n in NUMBER.findall(found[1])) if found else said["world_size"])]
        for variant, what in sorted((said.get("variants") or said).items()):
            if isinstance(what, dict) and "expected" in what:
                lines = tuple(int(n) for n in what.get("lines", ()))
                yield Case(kind, script, variant, tuple(what["expected"]), lines, tuple(options))


def _expected(folder: Path, half: str, name: str) -> dict[str, Any]:
    inner = folder / half / "expected.json"
    found: dict[str, Any] = json.loads((inner if inner.exists() else folder / "expected.json").read_text())
    said: dict[str, Any] = found[name] if name in found else found[f"{half}/{name}"]
    return said


def judged(case: Case, seconds: float) -> Outcome:
    """The verdict of the command, as a user would run it."""
    file = case.script.name
    command = [sys.executable, "-m", "trainverify", case.exam, f"{file}:reference", f"{file}:{case.variant}", *case.options, "--json"]
    began = time.monotonic()
    try:
        ran = subprocess.run(command, cwd=case.script.parent, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return Outcome(case, "TIMEOUT", f"{seconds:.0f} s", None, seconds)
    spent = time.monotonic() - began
    try:
        report = json.loads(ran.stdout)
    except ValueError:
        name = "internal error" if ran.returncode == 4 else "REFUSED"
        return Outcome(
            case, name, (ran.stderr or ran.stdout).strip().splitlines()[-1][:300] if ran.stderr or ran.stdout else "", None, spent
        )
    place = re.search(r'"file": "[^"]*script\.py", "line": (\d+)', ran.stdout) or re.search(r"script\.py:(\d+)", ran.stdout)
    return Outcome(case, report["verdict"], str(report.get("reason", ""))[:300], int(place[1]) if place else None, spent)


def show(outcomes: list[Outcome], console: Console) -> None:
    table = Table("script", "variant", "verdict", "right", "line", "s", "because")
    for o in outcomes:
        good = "WRONG" if o.wrong else "yes" if o.verdict in o.case.expected else "no"
        line = "" if o.place is None else f"{o.place}" + (" ✓" if o.place in o.case.lines else "")
        table.add_row(o.case.script.parent.name, o.case.variant, o.verdict, good, line, f"{o.seconds:.0f}", o.said[:120])
    console.print(table)
    right = [o for o in outcomes if o.case.right]
    bugs = [o for o in outcomes if not o.case.right]
    proved = sum(o.verdict == "PROVED" for o in right)
    found = [o for o in bugs if o.verdict in FOUND]
    lines = sum(o.place in o.case.lines for o in found)
    console.print(
        f"correct forms proved: {proved} of {len(right)}; bugs found: {len(found)} of {len(bugs)}, at a planted line: {lines}; "
        f"wrong verdicts: {sum(o.wrong for o in outcomes)}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.exam", description="Verdicts on a blind exam, held against real runs.")
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--half", choices=("open", "sealed"), default="open")
    parser.add_argument("--only", default="", help="scripts whose name contains this")
    parser.add_argument("--seconds", type=float, default=900.0, help="time limit of a verdict")
    parser.add_argument("--workers", type=int, default=1)
    args = parser.parse_args()
    chosen = [c for folder in args.folders for c in cases(folder, args.half) if args.only in c.script.parent.name]
    with ThreadPoolExecutor(args.workers) as pool:
        outcomes = []
        for outcome in pool.map(lambda c: judged(c, args.seconds), chosen):
            outcomes.append(outcome)
            print(outcome.case.script.parent.name, outcome.case.variant, outcome.verdict, outcome.said[:200], file=sys.stderr, flush=True)
    show(outcomes, Console(width=200))
    return 1 if any(o.wrong for o in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
