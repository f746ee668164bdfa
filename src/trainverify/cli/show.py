"""`trainverify show`: a program or plan as text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from trainverify import files
from trainverify.graph.plan import Plan, PlanError, expand
from trainverify.graph.program import Program, lines
from trainverify.refusal import Refused
from trainverify.terminal import AsJson, emit, guarded, out


@guarded
def command(
    file: Annotated[Path, typer.Argument(metavar="FILE")],
    rank: Annotated[int | None, typer.Option(metavar="R", help="The program of one rank of a plan.")] = None,
    as_json: AsJson = False,
) -> int:
    """A program or plan as text."""
    content = files.read(file)
    kind = "program" if isinstance(content, Program) else "plan"
    if isinstance(content, Plan) and rank is not None:
        try:
            content = expand(content, rank)
        except PlanError as error:
            raise Refused(f"{file}: {error}") from error
    elif rank is not None and rank != 0:
        raise Refused(f"{file}: a program has one rank, 0")
    text = list(lines(content)) if isinstance(content, Program) else list(plan_lines(content))
    if as_json:
        return emit("show", 0, file=str(file), kind=kind, rank=rank, lines=text)
    for line in text:
        out.print(line, markup=False)
    return 0


def plan_lines(plan: Plan) -> Iterator[str]:
    yield f"plan {plan.name} on {plan.mesh}"
    for text in plan.allow:
        yield f"  allow {text}"
    for name, ranks in plan.groups.items():
        yield f"  group {name}: {ranks_text(ranks)}"
    for f in plan.functions.values():
        yield f"  function {f.name}({', '.join(f.inputs)}) -> {', '.join(f.outputs)}: {len(f.ops)} ops"
    for t in plan.templates:
        yield f"  ranks {ranks_text(t.ranks)} run:"
        for line in lines(t.program):
            yield "    " + line
        for name, column in t.bindings.items():
            shown = ", ".join(map(str, column[:8])) + (f", … ({len(column)})" if len(column) > 8 else "")
            yield f"    ${name} = {shown}"
    for e in plan.edits:
        yield f"  edit on rank {e.rank} at {list(e.path)}: {'; '.join(map(str, e.ops)) or 'deleted'}"
    for lay in plan.lineage:
        yield f"  lineage {lay}"


def ranks_text(ranks: tuple[int, ...]) -> str:
    return ", ".join(map(str, ranks[:16])) + (f", … ({len(ranks)} ranks)" if len(ranks) > 16 else "")
