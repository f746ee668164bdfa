"""Verdicts on a folder of dumps: `python -m tools.nnscaler_verdicts FOLDER [--only TEXT]`.

FOLDER/verdicts.txt has one line for each plan: PLAN LOGICAL VERDICT[,VERDICT] [mean] [FAULT …], names without `.json.gz`. A fault is
CELLS@DEVICES/MICROBATCHES, as in `855@2,3/0,1`. Prints a row for each; exit code 1 if one is not as expected.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from trainverify.files.errors import FileError
from trainverify.nnscaler.dump import read
from trainverify.nnscaler.judge import judge
from trainverify.nnscaler.trainer import Trainer


@dataclass(frozen=True)
class Expected:
    plan: str
    logical: str
    verdicts: tuple[str, ...]
    mean: bool = False
    faults: tuple[str, ...] = ()


def expected(path: Path) -> Iterator[Expected]:
    """The lines of a list of verdicts; `#` starts a comment."""
    for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        mean = words[3:4] == ["mean"]
        faults = tuple(words[4 if mean else 3 :])
        if len(words) < 3 or any("@" not in f or "/" not in f for f in faults):
            raise FileError(path, f"line {number}", "expected PLAN LOGICAL VERDICT[,VERDICT] [mean] [CELLS@DEVICES/MICROBATCHES …]")
        yield Expected(words[0], words[1], tuple(words[2].split(",")), mean, faults)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.nnscaler_verdicts", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--verdicts", type=Path, help="the list, if not FOLDER/verdicts.txt")
    parser.add_argument("--only", default="", help="plans whose names contain this")
    given = parser.parse_args(arguments)
    wrong = 0
    try:
        rows = [r for r in expected(given.verdicts or given.folder / "verdicts.txt") if given.only in r.plan]
        for row in rows:
            began = time.perf_counter()
            files = [given.folder / f"{name}.json.gz" for name in (row.logical, row.plan)]
            report = judge(read(files[0]), read(files[1]), trainer=Trainer("mean" if row.mean else "none"))
            named = tuple(f.key for f in report.at_fault)
            good = report.verdict in row.verdicts and named == row.faults
            wrong += not good
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
            took = time.perf_counter() - began
            mark = "ok   " if good else "WRONG"
            name = row.plan + (" (mean)" if row.mean else "")
            print(f"{mark} {name:48} {report.verdict:8} {took:6.2f} s  {peak:5} MB  {report.reason}", flush=True)
            if named != row.faults:
                print(f"      named {' '.join(named) or 'nothing'}, expected {' '.join(row.faults) or 'nothing'}", flush=True)
    except (FileError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{len(rows) - wrong} of {len(rows)} as expected")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
