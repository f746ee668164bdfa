"""Is this distributed training step the single-device model it was made from?

Exit codes: 0 PROVED (validate: VALID), 1 REFUTED or INVALID, 2 unreadable input or usage,
3 UNKNOWN, 4 internal error, 130 interrupted.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import inspect
import json
import os
import shlex
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import typer
from rich.markup import escape

from trainverify import files
from trainverify.axes.reduction import NotABoundary
from trainverify.build.tape import BuildError
from trainverify.campaign import zoo as mutants
from trainverify.check import Finding, validate
from trainverify.files.errors import one_line
from trainverify.graph.plan import Plan, PlanError, expand
from trainverify.graph.program import Program, lines
from trainverify.limits import Ended, OutOfTime, allowed_megabytes, default_megabytes, isolated, limited, seldom_collected
from trainverify.measurements import measurements
from trainverify.nnscaler.dump import read as read_dump
from trainverify.nnscaler.judge import judge
from trainverify.nnscaler.trainer import Trainer, optimizer_of
from trainverify.ops import OPS, declared
from trainverify.ops.describe import describe
from trainverify.ops.table import OpDef, OpError, OpTable
from trainverify.prove.algebra.discover import Found
from trainverify.prove.attempt import Engine
from trainverify.prove.staged.own import StageShapes
from trainverify.prove.staged.reduce import Shape
from trainverify.prove.staged.scope import NoStages
from trainverify.report import Report, finding_json
from trainverify.terminal import (
    INTERNAL,
    INTERRUPTED,
    USAGE,
    AsJson,
    Output,
    Refused,
    Timeout,
    attempt,
    change,
    emit,
    err,
    fail,
    guarded,
    open_streams,
    out,
    progress,
)
from trainverify.verdicts import lineage, reduction, verify
from trainverify.zoo.parallel.degrees import ContextKind, Degrees, Normalise, Schedule, Sharding
from trainverify.zoo.recipes import FAMILIES, Wish, described, family_of

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False, help=__doc__)
app.add_typer(measurements, name="bench")
OpsFile = Annotated[
    Path | None, typer.Option("--ops", metavar="FILE", help="A Python file that declares more operators. Python runs it: trust it first.")
]
EngineName = Annotated[
    Engine, typer.Option("--engine", help="Tensor algebra at full size, stages and a solver at reduced sizes, both, or what is needed.")
]
Workers = Annotated[int, typer.Option(min=0, max=256, metavar="N", help="Processes that prove stages; 0: this one.")]
AcceptReduced = Annotated[bool, typer.Option("--accept-reduced", help="PROVED(reduced) counts as proved: exit code 0.")]
Memory = Annotated[int | None, typer.Option(min=1, metavar="MB", help="Of address space; beyond it the verdict is UNKNOWN.")]


def table_with(path: Path | None) -> OpTable:
    """The operator table, with the user's own operators."""
    if path is None:
        return OPS
    if not os.path.isfile(path):
        raise Refused(f"{path}: {'not a regular file' if os.path.exists(path) else 'No such file or directory'}")
    name = "trainverify_user_ops"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise Refused(f"{path}: not a Python file; its name must end in .py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        with redirect_stdout(sys.stderr):
            spec.loader.exec_module(module)
        more = declared(module)
        table = OPS.extended(more)
    except KeyboardInterrupt:
        raise
    except OpError as error:
        raise Refused(f"{path}: {error}") from error
    except (Exception, SystemExit) as error:
        raise Refused(f"{path}: {_line_of(error, path)}{type(error).__name__}: {error}") from error
    if not more:
        raise Refused(f"{path}: declares no operator")
    return table


def _line_of(error: BaseException, path: Path) -> str:
    """Where in the user's file it happened."""
    found = [f.lineno for f in traceback.extract_tb(error.__traceback__) if os.path.abspath(f.filename) == os.path.abspath(path)]
    return f"line {found[-1]}: " if found else ""


@app.callback(invoke_without_command=False)
def options(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, help="Print the version and exit.", callback=lambda v: _version(v))
    ] = False,
) -> None:
    pass


options.__doc__ = __doc__


def _version(wanted: bool) -> None:
    if wanted:
        print(f"trainverify {importlib.metadata.version('trainverify')}")
        raise typer.Exit(0)


def _number(text: str) -> Any:
    return Annotated[int, typer.Option(min=1, metavar="N", help=text)]


def _choice(kind: Any, text: str) -> Any:
    return Annotated[kind, typer.Option(help=text)]


# Options that say how a model of the zoo is divided, and what differs from its preset: the same for every command.
ZOO: dict[str, tuple[Any, Any]] = {
    "dp": (_number("Data-parallel ranks."), 1),
    "tp": (_number("Tensor-parallel ranks."), 1),
    "pp": (_number("Pipeline stages."), 1),
    "microbatches": (_number("Micro-batches of a data-parallel rank."), 1),
    "sp": (_choice(bool, "Sequence parallel: activations between tensor-parallel regions are cut."), False),
    "cp": (_number("Context-parallel ranks."), 1),
    "cp_kind": (_choice(ContextKind, "How attention sees the whole sequence."), "ring"),
    "ep": (_number("Expert-parallel ranks, some of the data-parallel ones."), 1),
    "zero": (Annotated[int, typer.Option(min=0, max=3, help="ZeRO: 1 optimizer state, 2 also gradients, 3 also parameters.")], 0),
    "shards": (_choice(Sharding, "What ZeRO cuts: a dimension that divides, padded chunks, or flat buckets."), "parameter"),
    "schedule": (_choice(Schedule, "Order of passes on pipeline stages."), "1f1b"),
    "chunks": (change("Chunks of layers on a stage (interleaved: 2)."), None),
    "stages": (Annotated[str | None, typer.Option(metavar="N,N,…", help="Layers of every stage; spread evenly by default.")], None),
    "normalise": (_choice(Normalise, "Where a loss per token is divided by the number of tokens."), "gradients"),
    "layers": (change("Layers, if not all."), None),
    "batch": (change("Rows of the whole batch; one per data-parallel rank and micro-batch by default."), None),
    "sequence": (change("Positions of a row."), None),
    "vocabulary": (change("Ids, if the preset's number does not divide."), None),
    "capacity": (change("Places of an expert for each sequence; without it no token is dropped."), None),
    "loss": (_choice(Literal["per_token", "per_sequence", "sum"] | None, "What a batch's loss is."), None),
    "packed": (_choice(bool, "Several documents in a row: segments and positions are inputs."), False),
    "master": (_choice(bool, "Weights in bf16, the optimizer updates f32 copies."), False),
}


def with_zoo(command: Callable[..., int]) -> Callable[..., int]:
    """A command whose `model` is a wish (None without a name): the options of a wish are added to its own."""
    own = {n: p for n, p in inspect.signature(command).parameters.items() if n != "model"}
    hints = get_type_hints(command, include_extras=True)
    given = "zoo" if "zoo" in own else "name"

    @functools.wraps(command)
    def complete(**values: Any) -> int:
        chosen = {n: values.pop(n) for n in ZOO}
        name = values[given]
        asked = [n for n, (_, default) in ZOO.items() if chosen[n] != default]
        if name is None and asked:
            raise Refused(f"--{asked[0].replace('_', '-')} goes with a model of the zoo")
        return command(model=None if name is None else wish(name, chosen), **values)

    keyword = inspect.Parameter.KEYWORD_ONLY
    more = [inspect.Parameter(n, keyword, default=default, annotation=kind) for n, (kind, default) in ZOO.items()]
    plain = [p.replace(kind=keyword, annotation=hints[n]) for n, p in own.items()]
    vars(complete)["__signature__"] = inspect.Signature([*plain, *more], return_annotation=int)
    complete.__annotations__ = {n: hints[n] for n in own} | {n: kind for n, (kind, _) in ZOO.items()} | {"return": int}
    del vars(complete)["__wrapped__"]
    return complete


def wish(name: str, chosen: dict[str, Any]) -> Wish:
    names = ("layers", "batch", "sequence", "vocabulary", "capacity", "loss", "packed", "master")
    changes = {n: chosen.pop(n) for n in names}
    stages, chunks = chosen.pop("stages"), chosen.pop("chunks")
    try:
        counts = None if stages is None else tuple(int(n) for n in stages.split(","))
    except ValueError:
        raise Refused(f"--stages {stages}: numbers of layers separated by commas") from None
    several = 2 if chosen["schedule"] == "interleaved" else 1
    return Wish(name, Degrees(**chosen, stages=counts, chunks=chunks or several), **changes)


def built(model: Wish) -> tuple[Program, Plan]:
    try:
        family_of(model.name)
    except BuildError as error:
        raise Refused(str(error)) from error
    try:
        return model.build()
    except BuildError as error:
        raise Refused(f"{model.name}: {error}") from error


@app.command("zoo")
@guarded
@with_zoo
def zoo_command(
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


@app.command("verify")
@guarded
@with_zoo
def verify_command(
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
) -> int:
    """Is the training step in PLAN equal to the one in LOGICAL?"""
    if model is not None and logical is not None:
        raise Refused("either two files or --zoo NAME")
    if model is None and (logical is None or plan is None):
        raise Refused("two files are needed, LOGICAL and PLAN, or --zoo NAME; see trainverify verify --help")
    subject = f"the plan against {zoo}" if logical is None or plan is None else f"{plan.name} against {logical.name}"

    def inputs(tell: Callable[[str], None]) -> tuple[Program, Plan | Program]:
        if logical is not None and plan is not None:
            return both(logical, plan)
        assert model is not None
        tell(f"building {model.name}")
        return built(model)

    def work(tell: Callable[[str], None]) -> Report:
        table = table_with(ops)
        return verify(*inputs(tell), table, points, seed, tell, engine, workers, accept_reduced)

    return judged("verify", subject, work, as_json, timeout, memory, here=engine != "algebra")  # Ctrl-C reports stages


@app.command("nnscaler")
@guarded
def nnscaler_command(
    logical: Annotated[Path, typer.Argument(metavar="LOGICAL", help="A dump of the plan for one device.")],
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="A dump of the plan to verify.")],
    as_json: AsJson = False,
    ops: OpsFile = None,
    correction: Annotated[str, typer.Option(help="`mean`: the trainer divides gradients by replicas × micro-batches.")] = "none",
    optimizer: Annotated[str | None, typer.Option(help="Complete the step with `sgd` or `adamw`.")] = None,
    lr: Annotated[float | None, typer.Option(help="Of the optimizer: learning rate (sgd 0.1, adamw 0.001).")] = None,
    momentum: Annotated[float | None, typer.Option(min=0.0, help="Of sgd (0.9).")] = None,
    beta1: Annotated[float | None, typer.Option(min=0.0, max=1.0, help="Of adamw (0.9).")] = None,
    beta2: Annotated[float | None, typer.Option(min=0.0, max=1.0, help="Of adamw (0.999).")] = None,
    eps: Annotated[float | None, typer.Option(min=0.0, help="Of adamw (1e-8).")] = None,
    weight_decay: Annotated[float | None, typer.Option(min=0.0, help="Of the optimizer (sgd 0, adamw 0.01).")] = None,
    clip: Annotated[float | None, typer.Option(min=0.0, help="Complete the step with clipping at this norm of all gradients.")] = None,
    zero: Annotated[
        int, typer.Option(min=0, metavar="GROUPS", help="ZeRO: optimizer state is cut within each of so many groups of ranks; 0: no ZeRO.")
    ] = 0,
    points: Annotated[int, typer.Option(min=1, max=1000, help="Random points to evaluate.")] = 3,
    seed: Annotated[int, typer.Option(min=0, help="Of the first random point.")] = 0,
    timeout: Timeout = None,
    memory: Memory = None,
) -> int:
    """Is the training step of an nnScaler plan equal to that of the plan for one device? Both are dumps (nnsdump/1)."""
    if correction not in ("none", "mean"):
        raise Refused(f"--correction {correction}: none or mean")
    if zero and optimizer is None:
        raise Refused("--zero cuts the state of an optimizer: give --optimizer too")
    try:
        update = optimizer_of(optimizer, lr=lr, momentum=momentum, beta1=beta1, beta2=beta2, eps=eps, weight_decay=weight_decay)
    except ValueError as error:
        raise Refused(str(error)) from error
    trainer = Trainer(correction, update, clip, zero)  # type: ignore[arg-type]

    def work(tell: Callable[[str], None]) -> Report:
        table = table_with(ops)
        return judge(read_dump(logical), read_dump(plan), table, trainer, points, seed, tell)

    return judged("nnscaler", f"{plan.name} against {logical.name}", work, as_json, timeout, memory)


@app.command("torch")
@guarded
def torch_command(
    targets: Annotated[
        list[str], typer.Argument(metavar="REFERENCE DISTRIBUTED", help="Two functions, FILE.py:NAME; or `run -- SCRIPT.py ARGS`.")
    ],
    world_size: Annotated[int, typer.Option("--world-size", min=1, max=65536, metavar="N", help="Ranks; each is captured in a process.")],
    reference_args: Annotated[
        str | None, typer.Option("--reference-args", metavar="TEXT", help="Of a script: its arguments when it runs alone.")
    ] = None,
    replayed: Annotated[
        bool, typer.Option("--replay", help="Also run the code for real (gloo) and compare the translation with it.")
    ] = False,
    accept_choices: Annotated[
        bool, typer.Option("--accept-choices", help="Of more than three conditions on data, assume that the others hold.")
    ] = False,
    real: Annotated[
        bool,
        typer.Option("--real", help="Capture on real random tensors, through gloo: for code that reads data. Its choices are assumed."),
    ] = False,
    all_ranks: Annotated[bool, typer.Option("--all-ranks", help="Capture every rank, also of more than 64.")] = False,
    accept_sampled: Annotated[
        bool, typer.Option("--accept-sampled", help="PROVED(sampled), of captured ranks only, counts as proved: exit code 0.")
    ] = False,
    cached: Annotated[bool, typer.Option("--cache/--no-cache", help="Use captures of the same sources and arguments again.")] = True,
    list_ops: Annotated[bool, typer.Option("--list-ops", help="Only list the ops of the step, those without a meaning first.")] = False,
    folder: Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Write both programs to this folder.")] = None,
    as_json: AsJson = False,
    ops: OpsFile = None,
    points: Annotated[int, typer.Option(min=1, max=1000, help="Random points to evaluate.")] = 3,
    seed: Annotated[int, typer.Option(min=0, help="Of the first random point.")] = 0,
    timeout: Timeout = None,
    memory: Memory = None,
    engine: EngineName = "algebra",
) -> int:
    """Is the training step of PyTorch code on N ranks equal to the one on a single device? Python runs the code, on fake tensors."""
    try:
        from trainverify.torch import command
        from trainverify.torch.cache import Cache, default_folder, mark
        from trainverify.torch.launch import Reads
        from trainverify.translate.targets import CaptureError
    except ImportError as error:
        raise Refused(str(error)) from error
    if targets[0] != "run" and len(targets) != 2:
        raise Refused("two functions are needed, FILE.py:NAME FILE.py:NAME, or run -- SCRIPT.py ARGS")
    if targets[0] == "run" and len(targets) < 2:
        raise Refused("run needs a script: trainverify torch run --world-size N -- SCRIPT.py ARGS")

    key = (targets, world_size, reference_args, None if ops is None else (str(ops), mark(str(ops))))
    cache = Cache(default_folder(), key) if cached else None

    def subject(tell: Callable[[str], None]) -> command.Subject:
        table = table_with(ops)
        if targets[0] == "run":
            if real:
                raise Refused("--real goes with functions, not with a script")
            alone = None if reference_args is None else shlex.split(reference_args)
            return command.script(targets[1], targets[2:], alone, world_size, table, tell, all_ranks, accept_choices, cache)
        return command.functions(targets[0], targets[1], world_size, table, tell, all_ranks, accept_choices, real, cache)

    def work(tell: Callable[[str], None]) -> Report:
        try:
            report = command.verdict(subject(tell), table_with(ops), points, seed, engine, replayed, folder, tell)
            if cache is not None and cache.used:
                used = f"{cache.used} captures of the same sources and arguments were used again (--no-cache captures anew): {cache.folder}"
                report = replace(report, notes=(*report.notes, used))
            return replace(report, accept_sampled=accept_sampled)
        except Reads as error:
            return Report("UNKNOWN", str(error), f"the ranks of {targets[-1]}")
        except CaptureError as error:
            raise Refused(str(error)) from error

    if list_ops:
        with progress(as_json) as tell:
            try:
                found = command.operations(subject(tell))
            except CaptureError as error:
                raise Refused(str(error)) from error
        code = 3 if any(status != "mapped" for _, _, status in found) else 0
        if as_json:
            return emit("torch", code, ops=[{"op": n, "count": k, "status": status} for n, k, status in found])
        for n, k, status in found:
            out.print(f"{k:6} {n:50} {status}", markup=False)
        return code
    return judged("torch", f"the ranks of {targets[-1]}", work, as_json, timeout, memory)


@app.command("jax")
@guarded
def jax_command(
    reference: Annotated[str, typer.Argument(metavar="REFERENCE", help="The step on one device, FILE.py:NAME.")],
    distributed: Annotated[
        str, typer.Argument(metavar="DISTRIBUTED", help="The step of the ranks, or a function of `mesh` that makes it.")
    ],
    mesh: Annotated[str | None, typer.Option("--mesh", metavar="AXES", help="Axes of the mesh and their sizes: dp=8,tp=4.")] = None,
    replayed: Annotated[bool, typer.Option("--replay", help="Also run JAX on host devices and compare the translation with it.")] = False,
    hlo: Annotated[
        bool, typer.Option("--hlo", help="Compile for host devices (up to 64) and read XLA's program after SPMD partitioning.")
    ] = False,
    list_ops: Annotated[
        bool, typer.Option("--list", help="Only list the primitives of both steps, those without a meaning first.")
    ] = False,
    folder: Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Write both programs to this folder.")] = None,
    as_json: AsJson = False,
    ops: OpsFile = None,
    points: Annotated[int, typer.Option(min=1, max=1000, help="Random points to evaluate.")] = 3,
    seed: Annotated[int, typer.Option(min=0, help="Of the first random point.")] = 0,
    timeout: Timeout = None,
    memory: Memory = None,
    engine: EngineName = "algebra",
) -> int:
    """Is the training step that JAX runs on a mesh equal to the one on a single device? Python traces the code; nothing is run."""
    try:
        from trainverify.jax import command
    except ImportError as error:
        raise Refused(str(error)) from error
    traced = (reference, distributed, mesh, table_with(ops))

    def work(tell: Callable[[str], None]) -> Report:
        try:
            if hlo or replayed:
                command.host_devices(mesh)
            return command.verdict(command.subject(*traced, tell, hlo), traced[3], points, seed, engine, replayed, folder, tell)
        except command.CaptureError as error:
            raise Refused(str(error)) from error
        except command.Unmapped as error:
            return Report("UNKNOWN", str(error), f"the ranks of {distributed}")

    if list_ops:
        with progress(as_json) as tell:
            try:
                if hlo:
                    command.host_devices(mesh)
                found = command.operations(command.subject(*traced, tell, hlo))
            except (command.CaptureError, command.Unmapped) as error:
                raise Refused(str(error)) from error
        code = 3 if any(status != "mapped" for _, _, status in found) else 0
        if as_json:
            return emit("jax", code, ops=[{"op": n, "count": k, "status": status} for n, k, status in found])
        for n, k, status in found:
            out.print(f"{k:6} {n:50} {status}", markup=False)
        return code
    return judged("jax", f"the ranks of {distributed}", work, as_json, timeout, memory)


def judged(
    command: str,
    subject: str,
    work: Callable[[Callable[[str], None]], Report],
    as_json: bool,
    timeout: float | None,
    memory: int | None,
    here: bool = False,
) -> int:
    """Print the report that `work` makes within the limits; its exit code. `here`: in this process, if nothing else was asked for."""
    own = (
        isinstance(sys.stdout, Output) or sys.stdout is sys.__stdout__
    )  # else a caller that replaced it would not get what a process of its own prints
    limit = memory if memory is not None else allowed_megabytes() if own else None

    def show(report: Report) -> int:
        if as_json:
            emit(command, **report.json())
        else:
            report.print(out)
        return report.exit_code

    def attempted(over: Callable[[], None]) -> int:
        try:
            with limited(timeout, memory), progress(as_json) as tell:
                report = work(tell)
        except OutOfTime as error:
            report = Report("UNKNOWN", f"time limit: {error}", subject)
        except MemoryError:
            report = Report("UNKNOWN", beyond(memory, limit), subject)
        over()
        return show(report)

    if timeout is None and memory is None and (here or limit is None):
        return attempted(lambda: None)
    result = isolated(lambda over: attempt(lambda: attempted(over), as_json), timeout)
    if not isinstance(result, Ended):
        return result
    if result.overtime:
        return show(Report("UNKNOWN", f"time limit: no verdict within {timeout:g} s", subject))
    how = "" if result.signal is None else f" (signal {result.signal})"
    if memory is not None or (limit is not None and (result.signal == signal.SIGKILL or 2 * result.megabytes > limit)):
        return show(Report("UNKNOWN", f"{beyond(memory, limit)}{how}", subject))
    return fail(f"internal error, no verdict: the process ended{how}", INTERNAL, as_json)


def beyond(memory: int | None, limit: int | None) -> str:
    """`memory` is what was asked for, `limit` what there was."""
    if memory is not None:
        return f"memory limit: more than {memory} MB of address space needed"
    return "out of memory" if limit is None else f"out of memory: more than {limit} MB of address space needed; --memory MB allows more"


def both(logical: Path, plan: Path) -> tuple[Program, Plan | Program]:
    """The two files; a plan in the place of the program is most likely an exchange."""
    try:
        return files.read_program(logical), files.read(plan)
    except files.FileError as error:
        if error.where == "kind" and error.path == str(logical):
            raise Refused(f"{error} (the logical program comes first: verify LOGICAL PLAN)") from error
        raise


@app.command("lineage")
@guarded
def lineage_command(logical: Path, plan: Path, as_json: AsJson = False, ops: OpsFile = None) -> int:
    """Which logical tensor every tensor of PLAN is, and how it lies on the mesh: discovered, not declared."""
    table = table_with(ops)
    program, other = both(logical, plan)
    with progress(as_json) as tell:
        found = lineage(program, other, table, tell)
    wrong = [f for f in found if isinstance(f, Finding)]
    if wrong:
        return show_findings(wrong, as_json, plan.name)
    rows = [f for f in found if isinstance(f, Found)]
    if as_json:
        shown = [{**vars(f), "factor": str(f.factor)} for f in rows]
        return emit("lineage", 0, subject=plan.name, tensors=shown)
    for f in rows:
        out.print(str(f), markup=False, highlight=False)
    return 0


@app.command("reduce")
@guarded
def reduce_command(
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


@app.command("validate")
@guarded
def validate_command(
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
    return show_findings(validate(program, content, table), as_json, file.name, notes)


def show_findings(findings: list[Finding], as_json: bool, subject: str, notes: Sequence[str] = ()) -> int:
    """Print findings; the exit code they call for."""
    code = 1 if any(f.severity == "error" for f in findings) else 3 if any(f.severity == "unsupported" for f in findings) else 0
    verdict, colour = {0: ("VALID", "green"), 1: ("INVALID", "red"), 3: ("UNSUPPORTED", "yellow")}[code]
    if as_json:
        return emit("validate", code, verdict=verdict, subject=subject, findings=[finding_json(f) for f in findings], notes=list(notes))
    out.print(f"[bold {colour}]{verdict}[/] {escape(subject)}")
    for f in findings:
        out.print("  " + str(f).replace("\n", "\n  "), markup=False)
    for n in notes:
        out.print(n, markup=False, style="dim")
    return code


@app.command("show")
@guarded
def show_command(
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
@guarded
def ops_command(
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


@app.command("mutate")
@guarded
@with_zoo
def mutate_command(
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
        logical, plan = mutants.small(model) if tiny else built(model)
    except (BuildError, ValueError) as error:
        raise Refused(str(error)) from error

    def told(o: mutants.Outcome) -> None:
        """At once: a run that is ended loses nothing."""
        if as_json:
            print(json.dumps({"command": "mutate", "mutant": o.json()}), flush=True)
        else:
            out.print(f"{o.seed} {o.verdict} in {o.seconds:.1f} s: {o.kind}: {one_line(o.reason)}", markup=False)
            sys.stdout.flush()

    with progress(as_json) as tell:
        tell("judging mutants")
        summary = mutants.run(logical, plan, count, seed, seconds, tiny, told, timeout)
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


def run(arguments: Sequence[str]) -> int:
    """The exit code of a command line."""
    as_json = "--json" in arguments
    return attempt(lambda: _run(arguments, as_json), as_json)


def _run(arguments: Sequence[str], as_json: bool) -> int:
    try:
        code = app(list(arguments), prog_name="trainverify", standalone_mode=False)
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except Exception as error:
        if not hasattr(error, "format_message"):  # what the parser raises for wrong usage
            raise
        context = getattr(error, "ctx", None)
        path = "trainverify" if context is None else context.command_path
        return fail(f"{error.format_message().rstrip('.')}; see {path} --help", USAGE, as_json)
    if not isinstance(code, int):  # every command returns its code; 0 is never a default
        return fail("internal error, no verdict: a command without an exit code", INTERNAL, as_json)
    return code


def main() -> None:
    open_streams()
    asked = any(a.startswith("--memory") for a in sys.argv)
    with limited(None, None if asked else default_megabytes()), seldom_collected():
        code = run(sys.argv[1:])
    sys.exit(code)


if __name__ == "__main__":
    main()
