"""`python -m tools.campaign --count 2000 --seed 0 [--mutants] [--json]`; `--case SEED` shows one.

`--counts` runs plans with counts as literals instead, a correct and a wrong one for every seed. `agree` compares the engines,
`classes` evaluation by classes with a plain one."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from tools.campaign import agree, classes, counts
from tools.campaign.run import Outcome, Summary, campaign, make, run
from trainverify import files


def main() -> int:
    if sys.argv[1:2] == ["agree"]:
        return agree.main(sys.argv[2:])
    if sys.argv[1:2] == ["classes"]:
        return classes.main(sys.argv[2:])
    parser = argparse.ArgumentParser(prog="python -m tools.campaign", description="Random plans and random mistakes in them.")
    parser.add_argument("--count", type=int, default=200, help="cases")
    parser.add_argument("--seed", type=int, default=0, help="first seed")
    parser.add_argument("--mutants", action="store_true", help="plans with one mistake instead of correct ones")
    parser.add_argument("--both", action="store_true", help="so many of each")
    parser.add_argument("--counts", action="store_true", help="plans with counts as literals, a correct and a wrong one for every seed")
    parser.add_argument("--workers", type=int, default=1, help="processes")
    parser.add_argument("--seconds", type=float, default=10.0, help="time limit of a case")
    parser.add_argument("--oracle", type=float, default=1.0, help="share of cases that also run rank by rank at full size")
    parser.add_argument("--json", action="store_true", help="the summary as JSON")
    parser.add_argument("--case", type=int, metavar="SEED", help="one case, in full")
    parser.add_argument("--write", type=Path, metavar="FOLDER", help="with --case: its programs as files")
    args = parser.parse_args()
    if args.counts:
        return count(args.seed, args.count, args.workers, args.seconds, args.json, args.case, args.write)
    if args.case is not None:
        return show(args.case, args.mutants, args.seconds, args.write)
    console = Console(stderr=True)

    def seeds() -> Iterator[tuple[int, bool]]:
        for seed in range(args.seed, args.seed + args.count):
            if args.both or not args.mutants:
                yield seed, False
            if args.both or args.mutants:
                yield seed, True

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("cases", total=args.count * (2 if args.both else 1))

        def done(o: Outcome) -> None:
            progress.advance(task)
            if o.bad is not None:
                shown = f"[red]{o.bad}[/red]: seed {o.seed}{' --mutants' if o.mutant else ''}"
                progress.console.print(shown + ": ", end="")
                progress.console.print(o.reason[:200], markup=False)

        summary = campaign(seeds(), args.workers, args.seconds, args.oracle, done)
    if args.json:
        print(json.dumps(summary.json(), indent=2))
    else:
        table(summary, Console())
    if summary.interrupted:
        console.print("interrupted: these are the cases that were judged")
        return 130
    return 1 if summary.bad else 0


def table(summary: Summary, console: Console) -> None:
    for group, found in summary.verdicts.items():
        if found:
            total = sum(found.values())
            grid = Table(title=f"{group} plans: {total}", title_justify="left")
            grid.add_column("verdict")
            grid.add_column("cases", justify="right")
            grid.add_column("share", justify="right")
            for verdict, n in found.most_common():
                grid.add_row(verdict, str(n), f"{100 * n / total:.1f} %")
            console.print(grid)
            for kind in sorted({k for k, _ in summary.kinds[group]}):
                own = {v: n for (k, v), n in summary.kinds[group].items() if k == kind}
                console.print(f"  {kind}: " + ", ".join(f"{n} {v}" for v, n in sorted(own.items())), markup=False)
            for cause, n in summary.causes[group].most_common(20):
                example = summary.examples[group, cause]
                flag = " --mutants" if example.mutant else ""
                console.print(f"  {n:5}  {cause}   (smallest: seed {example.seed}{flag}, {example.ops} ops)", markup=False)
    if summary.missed:
        console.print(f"mistakes that are UNKNOWN though evaluation at full size sees them: {summary.missed}")
    for o in summary.bad:
        console.print(f"{o.bad}: seed {o.seed}{' --mutants' if o.mutant else ''}: {o.reason[:300]}", markup=False)
    console.print("nothing that must not happen" if not summary.bad else f"{len(summary.bad)} cases that must not happen")


def count(seed: int, cases: int, workers: int, seconds: float, as_json: bool, case: int | None, folder: Path | None) -> int:
    """Plans with counts as literals."""
    if case is not None:
        made, mistake = counts.make(case)
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            files.write(folder / f"{case}.logical.json", made.logical)
            files.write(folder / f"{case}.plan.json", made.right)
            files.write(folder / f"{case}.wrong.json", made.wrong[mistake]())
        outcomes = counts.judge(case, seconds)
        for o in outcomes:
            print(f"{o.group}: {o.verdict}: {counts.shown_case(o)}")
        return 1 if any(o.bad for o in outcomes) else 0
    running: Counter[str] = Counter()

    def done(o: counts.Outcome) -> None:
        running[f"{o.group} {o.verdict}"] += 1
        if o.bad or o.verdict in ("GENERATOR", "TIME"):
            print(f"{o.verdict} of a {o.group} plan: {counts.shown_case(o)}", file=sys.stderr, flush=True)
        if sum(running.values()) % 50 == 0:
            print(
                f"{sum(running.values())} of {2 * cases}: " + ", ".join(f"{n} {k}" for k, n in sorted(running.items())),
                file=sys.stderr,
                flush=True,
            )

    summary = counts.campaign(range(seed, seed + cases), workers, seconds, done)
    print(json.dumps(summary.json(), indent=2) if as_json else "\n".join(summary.lines()))
    if summary.interrupted:
        print("interrupted: these are the cases that were judged", file=sys.stderr)
        return 130
    return 1 if summary.bad or summary.generator else 0


def show(seed: int, mutant: bool, seconds: float, folder: Path | None) -> int:
    case = make(seed, mutant)
    print(case.logical)
    print(case.plan.mesh)
    for t in case.plan.templates:
        print(t.program, f"  ranks {list(t.ranks)}", *(f"  ${n} = {list(c)}" for n, c in t.bindings.items()), sep="\n")
    for lay in case.plan.lineage:
        print(f"  {lay}")
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        files.write(folder / f"{seed}.logical.json", case.logical)
        files.write(folder / f"{seed}.plan.json", case.plan)
    o = run(seed, mutant, seconds)
    print(f"{o.verdict}{f' ({o.bad})' if o.bad else ''}: {o.reason}", o.detail, sep="\n")
    return 1 if o.bad else 0


if __name__ == "__main__":
    sys.exit(main())
