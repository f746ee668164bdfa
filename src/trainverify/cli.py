"""The command line. Exit codes: 0 PROVED, 1 REFUTED or INVALID, 2 unreadable input or usage, 3 UNKNOWN, 4 internal error."""

from __future__ import annotations

import importlib.util
import json
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape

from trainverify import files
from trainverify.check import Finding, validate
from trainverify.graph.plan import Plan, PlanError, expand
from trainverify.graph.program import Program, lines
from trainverify.limits import OutOfTime, limited
from trainverify.ops import OPS, declared
from trainverify.ops.describe import describe
from trainverify.ops.table import OpDef, OpError, OpTable
from trainverify.report import Report, finding_json
from trainverify.verify import verify

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__)
out = Console(soft_wrap=True)
err = Console(stderr=True, soft_wrap=True)

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
OpsFile = Annotated[Path | None, typer.Option("--ops", help="A Python file that declares more operators. It is run.")]
Timeout = Annotated[float | None, typer.Option(min=0.001, help="Seconds; then the verdict is UNKNOWN.")]
Memory = Annotated[int | None, typer.Option(min=64, help="Megabytes of address space; then the verdict is UNKNOWN.")]


def fail(message: str, code: int, as_json: bool = False) -> NoReturn:
    if as_json:
        print(json.dumps({"error": message, "exit_code": code}))
    else:
        err.print(f"[bold red]error[/]: {escape(message)}", highlight=False)
    raise typer.Exit(code)


@contextmanager
def guarded(as_json: bool) -> Iterator[None]:
    """Whatever goes wrong ends with one message and the right code, never with a verdict."""
    try:
        yield
    except (typer.Exit, typer.Abort):
        raise
    except files.FileError as error:
        fail(str(error), 2, as_json)
    except OpError as error:
        fail(str(error), 2, as_json)
    except KeyboardInterrupt:
        fail("interrupted; no verdict", 130, as_json)
    except Exception as error:
        if not as_json:
            err.print(escape("".join(traceback.format_exception(error)[-3:])), style="dim", highlight=False)
        fail(f"internal error ({type(error).__name__}: {error}); this is a bug of TrainVerify, not a verdict", 4, as_json)


def table_with(path: Path | None) -> OpTable:
    """The operator table, with the user's own operators."""
    if path is None:
        return OPS
    spec = importlib.util.spec_from_file_location("trainverify_user_ops", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise OpError(f"{path}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise OpError(f"{path}: {type(error).__name__}: {error}") from error
    return OPS.extended(declared(module))


@contextmanager
def progress(as_json: bool) -> Iterator[Callable[[str], None]]:
    """A status line on a terminal, nothing elsewhere."""
    if as_json or not err.is_terminal:
        yield lambda text: None
        return
    with err.status("starting") as status:
        yield lambda text: status.update(escape(text))


def show_findings(findings: list[Finding], as_json: bool, subject: str) -> int:
    """Print findings; the exit code they call for."""
    code = 1 if any(f.severity == "error" for f in findings) else 3 if any(f.severity == "unsupported" for f in findings) else 0
    verdict = {0: "VALID", 1: "INVALID", 3: "UNSUPPORTED"}[code]
    if as_json:
        print(json.dumps({"verdict": verdict, "subject": subject, "exit_code": code, "findings": [finding_json(f) for f in findings]}))
        return code
    out.print(f"[bold {'green' if code == 0 else 'red'}]{verdict}[/] {escape(subject)}", highlight=False)
    for f in findings:
        out.print("  " + str(f), markup=False, highlight=False)
    return code


@app.command("verify")
def verify_command(
    logical: Path,
    plan: Path,
    as_json: AsJson = False,
    ops: OpsFile = None,
    points: Annotated[int, typer.Option(min=1, max=1000, help="Random points to evaluate.")] = 3,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    timeout: Timeout = None,
    memory: Memory = None,
) -> None:
    """Is the training step in PLAN equal to the one in LOGICAL?"""
    with guarded(as_json):
        table = table_with(ops)
        program, other = files.read_program(logical), files.read(plan)
        subject = f"{plan.name} against {logical.name}"
        try:
            with limited(timeout, memory), progress(as_json) as tell:
                report = verify(program, other, table, points, seed, tell)
        except OutOfTime as error:
            report = Report("UNKNOWN", f"time limit: {error}", subject)
        except MemoryError:
            report = Report("UNKNOWN", f"memory limit: more than {memory} MB needed" if memory else "out of memory", subject)
        if as_json:
            print(json.dumps(report.json(), ensure_ascii=False))
        else:
            report.print(out)
        raise typer.Exit(report.exit_code)


@app.command("validate")
def validate_command(
    file: Path,
    logical: Annotated[Path | None, typer.Option(help="The logical program, to check a plan's lineage and outputs too.")] = None,
    as_json: AsJson = False,
    ops: OpsFile = None,
) -> None:
    """Is FILE (a program or a plan) well-formed?"""
    with guarded(as_json):
        table = table_with(ops)
        content = files.read(file)
        program = content if isinstance(content, Program) else None if logical is None else files.read_program(logical)
        found = validate(program, content if isinstance(content, Plan) else None, table)
        raise typer.Exit(show_findings(found, as_json, file.name))


@app.command("show")
def show_command(
    file: Path,
    rank: Annotated[int | None, typer.Option(help="The program of one rank of a plan.")] = None,
    as_json: AsJson = False,
) -> None:
    """A program or plan as text."""
    with guarded(as_json):
        content = files.read(file)
        if isinstance(content, Plan) and rank is not None:
            try:
                content = expand(content, rank)
            except PlanError as error:
                fail(f"{file}: {error}", 2, as_json)
        elif rank is not None and rank != 0:
            fail(f"{file}: a program has one rank, 0", 2, as_json)
        text = list(lines(content)) if isinstance(content, Program) else list(plan_lines(content))
        if as_json:
            print(json.dumps({"file": str(file), "rank": rank, "lines": text}, ensure_ascii=False))
        else:
            out.print("\n".join(text), markup=False, highlight=False)


def plan_lines(plan: Plan) -> Iterator[str]:
    yield f"plan {plan.name} on {plan.mesh}"
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


@app.command("ops")
def ops_command(
    name: Annotated[str | None, typer.Argument(help="One operator in detail.")] = None, as_json: AsJson = False, ops: OpsFile = None
) -> None:
    """The operator table, or the meaning, shape rule and derivative of one operator."""
    with guarded(as_json):
        table = table_with(ops)
        if name is not None:
            definition = table[name]
            if as_json:
                print(json.dumps({**op_json(definition), "description": describe(definition, table)}, ensure_ascii=False))
            else:
                out.print(describe(definition, table), markup=False, highlight=False)
            return
        if as_json:
            print(json.dumps([op_json(d) for d in table], ensure_ascii=False))
            return
        family = None
        for d in sorted(table, key=lambda d: (d.family, d.name)):
            if d.family != family:
                family = d.family
                out.print(f"[bold]{family}[/]")
            out.print(f"  {d.name:22} {d.doc.splitlines()[0] if d.doc else ''}", markup=False, highlight=False)


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


def main() -> None:
    try:
        app(standalone_mode=True)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
