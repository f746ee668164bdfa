"""`trainverify mutate`: random single mistakes in a plan of the zoo, and the verdict on each."""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from typing import Annotated

import typer
from rich.markup import escape

from trainverify.build.tape import BuildError
from trainverify.cli.zoo_options import built, with_zoo
from trainverify.mutate import run as mutants
from trainverify.refusal import Refused, one_line
from trainverify.terminal import INTERRUPTED, emit, err, guarded, out, progress
from trainverify.zoo.recipes import Wish, family_of
from trainverify.zoo.tiny import tiny as at_tiny_widths


@guarded
@with_zoo
def command(
    zoo: Annotated[str, typer.Option(metavar="NAME", help="A model, divided as the options say.")],
    model: Wish | None = None,
    count: Annotated[int, typer.Option(min=1, help="Mutants.")] = 20,
    seed: Annotated[int, typer.Option(min=0, help="Of the first mutant.")] = 0,
    tiny: Annotated[bool, typer.Option("--tiny", help="Tiny widths: PROVED mutants are also simulated rank by rank at full size.")] = False,
    seconds: Annotated[float, typer.Option(min=0.1, help="Time limit of a mutant.")] = 60.0,
    timeout: Annotated[
        float | None, typer.Option(min=0.001, metavar="SECONDS", help="After the mutant at which it is reached, report those judged.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object for every mutant, one per line, and one for all.")] = False,
) -> int:
    """Random single mistakes anywhere in a plan: what is said of each. A PROVED one that evaluation contradicts is a bug (exit code 1)."""
    assert model is not None
    try:
        family_of(model.name)
        small = at_tiny_widths(model) if tiny else None
        logical, plan = built(model) if small is None else (small.logical, small.plan)
    except (BuildError, ValueError) as error:
        raise Refused(str(error)) from error
    if small is None:
        with suppress(BuildError, ValueError):  # the plan does not fit tiny widths
            small = at_tiny_widths(model)

    def told(o: mutants.Outcome) -> None:
        """At once: a run that is ended loses nothing."""
        if as_json:
            print(json.dumps({"command": "mutate", "mutant": o.json()}), flush=True)
        else:
            out.print(f"{o.seed} {o.verdict} in {o.seconds:.1f} s: {o.kind}: {one_line(o.reason)}", markup=False)
            sys.stdout.flush()

    with progress(as_json) as tell:
        tell("judging mutants")
        summary = mutants.run(logical, plan, count, seed, seconds, tiny, told, timeout, None if tiny else small)
    code = 1 if summary.bad else INTERRUPTED if summary.stopped == "interrupted" else 0
    if as_json:
        return emit("mutate", code, zoo=zoo, mesh=str(plan.mesh), count=count, seed=seed, **summary.json())
    shown = ", ".join(f"{n} {v}" for v, n in sorted(summary.verdicts.items()))
    of = f" of {count}" if summary.stopped else ""
    why = f" ({summary.stopped})" if summary.stopped else ""
    unchecked = f"; {summary.unchecked} PROVED not checked in time" if summary.unchecked else ""
    share = f"without a verdict {100 * summary.unknown:.1f} %"
    out.print(f"{summary.judged}{of} mutants of {zoo} on {plan.mesh}{why}: {shown}; {share}{unchecked}", markup=False)
    for cause, n in summary.causes.most_common():
        out.print(f"  {n} × {cause}", markup=False)
    for o in summary.bad:
        err.print(f"[bold red]BUG[/] {escape(f'{o.bad}: seed {o.seed}: {o.reason}: {o.text}')}")
    return code
