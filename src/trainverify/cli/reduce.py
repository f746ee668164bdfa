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
from trainverify.prove.staged.reduce import Shape
from trainverify.refusal import Refused
from trainverify.terminal import AsJson, emit, fail, guarded, out
from trainverify.verdicts import reduction


@guarded
def command(
    file: Annotated[Path, typer.Argument(metavar="FILE")],
    logical: Annotated[Path | None, typer.Option(metavar="FILE", help="The logical program; a plan needs it.")] = None,
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
        found = reduction(program, content, table)
    except NotABoundary as error:
        return fail(f"{file}: not reduced: {error}", 3, as_json)
    wrong = [f for f in found if isinstance(f, Finding)]
    if wrong:
        return show_findings(wrong, as_json, file.name)
    rows = [f for f in found if isinstance(f, Shape)]
    if as_json:
        return emit("reduce", 0, subject=file.name, tensors=[vars(r) for r in rows])
    for row in rows:
        out.print(str(row), markup=False, highlight=False)
    return 0
