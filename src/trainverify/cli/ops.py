"""`trainverify ops`: the operators, or the meaning of one."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.markup import escape

from trainverify.cli.user_ops import OpsFile, table_with
from trainverify.ops.describe import describe
from trainverify.ops.table import OpDef
from trainverify.refusal import Refused
from trainverify.terminal import AsJson, emit, guarded, out


@guarded
def command(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="One operator in detail.")] = None,
    as_json: AsJson = False,
    ops: OpsFile = None,
) -> int:
    """The operators, or the meaning, shapes and derivative of one."""
    table = table_with(ops)
    if name is not None:
        if name not in table:
            raise Refused(f"unknown operator {name!r}; `trainverify ops` lists all")
        text = describe(table[name], table)
        if as_json:
            return emit("ops", 0, operators=[{**op_json(table[name]), "description": text}])
        out.print(text, markup=False)
        return 0
    if as_json:
        return emit("ops", 0, operators=[op_json(d) for d in table])
    family = None
    for d in sorted(table, key=lambda d: (d.family, d.name)):
        if d.family != family:
            family = d.family
            out.print(f"[bold]{escape(family)}[/]")
        out.print(f"  {d.name:22} {d.doc.splitlines()[0] if d.doc else ''}", markup=False)
    return 0


def op_json(d: OpDef) -> dict[str, Any]:
    return {
        "name": d.name,
        "family": d.family,
        "arity": {"min": d.required, "max": None if d.variadic else len(d.tensors)},
        "tensors": list(d.tensors),
        "variadic": d.variadic,
        "attributes": {a.name: a.describe() for a in d.attributes},
        "doc": d.doc,
    }
