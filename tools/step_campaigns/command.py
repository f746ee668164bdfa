"""The command of a campaign."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from rich.console import Console

from tools.step_campaigns.outcomes import Outcome, Program
from tools.step_campaigns.run import Judged, campaign
from tools.step_campaigns.table import show


def main(name: str, what: str, program: Callable[[int], Program], judged: Judged) -> int:
    """The command `python -m NAME`."""
    parser = argparse.ArgumentParser(prog=f"python -m {name}", description=what)
    parser.add_argument("--count", type=int, default=200, help="programs; every second one has a planted mistake")
    parser.add_argument("--seed", type=int, default=0, help="first seed")
    parser.add_argument("--workers", type=int, default=1, help="processes that judge, each beside a process or two that run programs")
    parser.add_argument("--seconds", type=float, default=300.0, help="time limit of a verdict")
    parser.add_argument("--only", type=int, metavar="SEED", help="one program, with its verdict in full")
    parser.add_argument("--show", type=int, metavar="SEED", help="the source of one program; nothing is run")
    parser.add_argument("--verbose", action="store_true", help="a line for every program")
    args = parser.parse_args()
    if args.show is not None:
        made = program(args.show)
        print(f"# seed {made.seed}: {made.family}; {', '.join(made.names)}; {made.mistake or 'no mistake'}\n{made.source}", end="")
        return 0
    seeds = range(args.seed, args.seed + args.count) if args.only is None else [args.only]
    outcomes: list[Outcome] = []
    console = Console(stderr=True)
    try:
        for outcome in campaign(judged, seeds, args.workers, args.seconds):
            outcomes.append(outcome)
            if outcome.bad or args.verbose or args.only is not None:
                console.print(
                    f"[{len(outcomes)}/{len(seeds)}] {outcome.bad or outcome.kind}: {outcome.line} ({outcome.verdict.seconds:.1f} s)",
                    markup=False,
                    soft_wrap=True,
                )
    except KeyboardInterrupt:
        console.print("interrupted: these are the programs that were judged")
    show(sorted(outcomes, key=lambda o: o.program.seed), Console(width=200))
    return 1 if any(o.bad for o in outcomes) else 0
