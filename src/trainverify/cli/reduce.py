"""`trainverify reduce`: the shapes of a program or plan at the reduced sizes of staged proofs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trainverify import files
from trainverify.axes.reduction import NotABoundary
from trainverify.check import Finding
from trainverify.cli.findings import show_findings
from trainverify.cli.user_ops import OpsFile, table_with
from trainverify.graph.plan import Plan
from trainverify.graph.program import Program
from trainverify.prove.staged.own import StageShapes
from trainverify.prove.staged.reduce import Shape
from trainverify.prove.staged.scope import NoStages
from trainverify.refusal import Refused
from trainverify.terminal import AsJson, emit, fail, guarded, out
from trainverify.verdicts import reduction


@guarded
def command(
    file: Annotated[Path, typer.Argument(metavar="FILE")],
    logical: Annotated[Path | None, typer.Option(metavar="FILE", help="The logical program; a plan needs it.")] = None,
    stages: Annotated[bool, typer.Option("--stages", help="Stage by stage, each with the shapes that it needs by itself.")] = False,
    as_json: AsJson = False,
    ops: OpsFile = None,
) -> int:
    """The shapes of FILE (a program or a plan) at the reduced sizes of staged proofs."""
    table = table_with(ops)
    content = files.read(file)
    if isinstance(content, Plan) and logical is None:
        raise Refused(f"{file}: a plan is reduced together with its logical program; --logical FILE")
    program = content if isinstance(content, Program) else files.read_program(logical or file)
    try:
        found = reduction(program, content, table, stages)
    except (NoStages, NotABoundary) as error:
        return fail(f"{file}: not reduced: {error}", 3, as_json)
    wrong = [f for f in found if isinstance(f, Finding)]
    if wrong:
        return show_findings(wrong, as_json, file.name)
    rows = [f for f in found if isinstance(f, Shape)]
    cut = [f for f in found if isinstance(f, StageShapes)]
    if as_json:
        shown = [{"stage": s.text, "alike": s.alike, "tensors": [{**vars(t), "own": own} for t, own in s.tensors]} for s in cut]
        return emit("reduce", 0, subject=file.name, **({"stages": shown} if stages else {"tensors": [vars(r) for r in rows]}))
    for line in (str(r) for r in rows) if not stages else (line for s in cut for line in s.lines()):
        out.print(line, markup=False, highlight=False)
    return 0
