"""`trainverify ops`: the operators, or the meaning of one."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.markup import escape

from trainverify.cli.user_ops import OpsFile, table_with, tried
from trainverify.ops.describe import describe
from trainverify.ops.table import OpDef
from trainverify.primitives.scalars import SCALARS, Scalar
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
    untried = [] if ops is None else tried(ops, table)
    if name is not None:
        if name in SCALARS and name not in table:
            out.print(f"{name}: a scalar function, for operators of your own: F.call({name!r}, …)", markup=False)
            return 0
        if name not in table:
            raise Refused(f"unknown operator {name!r}; `trainverify ops` lists all")
        text = describe(table[name], table)
        if as_json:
            return emit("ops", 0, operators=[{**op_json(table[name]), "description": text}])
        out.print(text, markup=False)
        return 0
    if as_json:
        return emit("ops", 0, operators=[op_json(d) for d in table], scalars=[scalar_json(s) for s in SCALARS.values()])
    family = None
    for d in sorted(table, key=lambda d: (d.family, d.name)):
        if d.family != family:
            family = d.family
            out.print(f"[bold]{escape(family)}[/]")
        out.print(f"  {d.name:22} {d.doc.splitlines()[0] if d.doc else ''}", markup=False)
    out.print("[bold]scalar functions[/] (for operators of your own: F.call(NAME, …))")
    out.print("  " + ", ".join(f"{s.name}/{s.arity}" for s in SCALARS.values()), markup=False)
    for name in untried:
        out.print(f"{name}: not tried; give it an example", markup=False)
    return 0


def scalar_json(s: Scalar) -> dict[str, Any]:
    return {"name": s.name, "arity": s.arity, "takes": s.takes, "defined_if": [f"argument {i} is {what}" for i, what in s.needs]}


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
