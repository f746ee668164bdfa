"""`trainverify validate`: is a program or plan well-formed?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trainverify import files
from trainverify.check import ill_formed, validate
from trainverify.cli.findings import show_findings
from trainverify.cli.user_ops import OpsFile, table_with
from trainverify.graph.program import Program
from trainverify.refusal import Refused
from trainverify.terminal import AsJson, guarded


@guarded
def command(
    file: Annotated[Path, typer.Argument(metavar="FILE")],
    logical: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The logical program, to check a plan's lineage and outputs too.")
    ] = None,
    as_json: AsJson = False,
    ops: OpsFile = None,
) -> int:
    """Is FILE (a program or a plan) well-formed?"""
    table = table_with(ops)
    content = files.read(file)
    if isinstance(content, Program):
        if logical is not None:
            raise Refused(f"{file}: a program; --logical goes with a plan")
        return show_findings(validate(content, None, table), as_json, file.name)
    program = None if logical is None else files.read_program(logical)
    notes = ["lineage and outputs were not checked: that needs --logical"] if program is None else []
    if program is not None and content.allow and not ill_formed(program, table):
        from trainverify.approximate import as_declared

        found = as_declared(program, content, table)
        program, content = found.logical, found.plan
        notes = [f"checked against the logical program with {', '.join(c.name for c in found.changes)}, which the plan declares"]
    return show_findings(validate(program, content, table), as_json, file.name, notes)
