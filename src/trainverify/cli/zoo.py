"""`trainverify zoo`: list the models, build one, write it to files."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from trainverify import files
from trainverify.check import validate
from trainverify.cli.zoo_options import built, with_zoo
from trainverify.refusal import Refused
from trainverify.report import finding_json
from trainverify.terminal import AsJson, emit, guarded, out, progress
from trainverify.zoo.recipes import FAMILIES, Wish, described


@guarded
@with_zoo
def command(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="A model; without it all are listed.")] = None,
    model: Wish | None = None,
    folder: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Write DIR/NAME.logical.json.gz and DIR/NAME.plan.json.gz.")
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Models at real sizes, and plans for them: build one, check that it is well-formed, write it to files."""
    if model is None or name is None:
        if folder is not None:
            raise Refused("--out goes with a model of the zoo")
        return zoo_list(as_json)
    if folder is not None and os.path.exists(folder) and not os.path.isdir(folder):
        raise Refused(f"{folder}: not a folder")
    with progress(as_json) as tell:
        tell(f"building {name}")
        began = time.perf_counter()
        logical, plan = built(model)
        seconds = time.perf_counter() - began
        tell("checking the plan")
        findings = validate(logical, plan)
        files_made: list[str] = []
        if folder is not None:
            tell("writing")
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise Refused(f"{folder}: {error.strerror}") from error
            for kind, content in (("logical", logical), ("plan", plan)):
                files.write(folder / f"{name}.{kind}.json.gz", content)
                files_made.append(str(folder / f"{name}.{kind}.json.gz"))
    ops = sum(len(t.program.ops) * len(t.ranks) for t in plan.templates)
    text = sum(len(t.program.ops) for t in plan.templates)
    code = 1 if any(f.severity == "error" for f in findings) else 0
    if as_json:
        shown = [finding_json(f) for f in findings]
        return emit(
            "zoo", code, name=name, mesh=str(plan.mesh), ranks=plan.size, ops=ops, files=files_made, findings=shown, seconds=seconds
        )
    out.print(f"{name} on {plan.mesh}: {plan.size} ranks, {len(plan.templates)} programs of {text} ops, {ops} ops in all", markup=False)
    out.print(f"built in {seconds:.1f} s, {len(logical.ops)} ops on one device, {len(findings)} findings", markup=False)
    for f in findings:
        out.print("  " + str(f), markup=False)
    for path in files_made:
        out.print(f"wrote {path}", markup=False)
    return code


def zoo_list(as_json: bool) -> int:
    if as_json:
        models = [{"name": n, "family": f.title, "plans": f.plan is not None, "sizes": described(n)} for f in FAMILIES for n in f.presets]
        return emit("zoo", 0, models=models)
    for family in FAMILIES:
        out.print(f"[bold]{escape(family.title)}[/]")
        for name in family.presets:
            out.print(f"  {name:16} {described(name)}", markup=False)
    return 0
