"""`trainverify verify`: is a plan equal to its logical program?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trainverify import files
from trainverify.build.tape import BuildError
from trainverify.cli.judged import EngineName, Memory, judged
from trainverify.cli.outputs import NOTHING_MORE, Outputs, with_outputs
from trainverify.cli.user_ops import OpsFile, table_with
from trainverify.cli.zoo_options import built, with_zoo
from trainverify.completion.steps import several_steps
from trainverify.graph.plan import Plan
from trainverify.graph.program import Program
from trainverify.graph.rebuilt import Rebuilt
from trainverify.refusal import Refused
from trainverify.report import Report
from trainverify.terminal import AsJson, Timeout, guarded
from trainverify.verdicts import verify

if TYPE_CHECKING:
    from trainverify.zoo.recipes import Wish

Workers = Annotated[int, typer.Option(min=0, max=256, metavar="N", help="Processes that prove stages; 0: this one.")]
AcceptReduced = Annotated[bool, typer.Option("--accept-reduced", help="PROVED(reduced) counts as proved: exit code 0.")]

Allow = Annotated[
    list[str] | None,
    typer.Option("--allow", metavar="NAME[:OPTION=VALUE,…]", help="An approximation that the plan may make; see docs/approximations.md."),
]


@guarded
@with_outputs
@with_zoo
def command(
    logical: Annotated[Path | None, typer.Argument(metavar="LOGICAL", help="The training step on one device.")] = None,
    plan: Annotated[Path | None, typer.Argument(metavar="PLAN", help="What every rank runs, or a program to compare.")] = None,
    zoo: Annotated[str | None, typer.Option(metavar="NAME", help="Instead of files: a model, divided as the options say.")] = None,
    model: Wish | None = None,
    as_json: AsJson = False,
    ops: OpsFile = None,
    points: Annotated[int, typer.Option(min=1, max=1000, help="Random points to evaluate.")] = 3,
    seed: Annotated[int, typer.Option(min=0, help="Of the first random point.")] = 0,
    timeout: Timeout = None,
    memory: Memory = None,
    engine: EngineName = "algebra",
    workers: Workers = 1,
    accept_reduced: AcceptReduced = False,
    fail_fast: Annotated[bool, typer.Option("--fail-fast", help="Stop at the first difference, without the search for its cause.")] = False,
    steps: Annotated[int, typer.Option(min=1, max=16, metavar="N", help="Compare N training steps, one after the other.")] = 1,
    allow: Allow = None,
    outputs: Outputs = NOTHING_MORE,
) -> int:
    """Is the training step in PLAN equal to the one in LOGICAL?"""
    if model is not None and logical is not None:
        raise Refused("either two files or --zoo NAME")
    if model is None and (logical is None or plan is None):
        raise Refused("two files are needed, LOGICAL and PLAN, or --zoo NAME; see trainverify verify --help")
    if str(logical) == str(plan) == "-":
        raise Refused("standard input can be one of the two files")
    subject = f"the plan against {zoo}" if logical is None or plan is None else f"{plan.name} against {logical.name}"

    def inputs(tell: Callable[[str], None]) -> tuple[Program, Plan | Program]:
        if logical is not None and plan is not None:
            return both(logical, plan)
        assert model is not None
        tell(f"building {model.name}")
        return built(model)

    def work(tell: Callable[[str], None]) -> Report:
        table = table_with(ops)
        one, many = inputs(tell)
        try:
            one, many = several_steps(one, steps), several_steps(many, steps)
        except BuildError as error:
            raise Refused(f"--steps {steps}: {error}") from error
        also = smaller(model) if model is not None and steps == 1 else ()
        return verify(one, many, table, points, seed, tell, engine, workers, accept_reduced, fail_fast, allow=allow or (), also=also)

    return judged(
        "verify",
        subject,
        work,
        as_json,
        timeout,
        memory,
        here=engine != "algebra",
        outputs=outputs,
        artifact=None if plan is None else str(plan),
    )  # Ctrl-C reports stages


def smaller(model: Wish) -> Sequence[Rebuilt]:
    """The same model and plan at tiny widths."""
    from trainverify.zoo.tiny import rebuilt

    return rebuilt(model)


def both(logical: Path, plan: Path) -> tuple[Program, Plan | Program]:
    """The two files; a plan in the place of the program is most likely an exchange."""
    try:
        return files.read_program(logical), files.read(plan)
    except files.FileError as error:
        if error.where == "kind" and error.path == str(logical):
            raise Refused(f"{error} (the logical program comes first: verify LOGICAL PLAN)") from error
        raise
