"""`trainverify torch`: is PyTorch code on many ranks equal to the same step on one device?"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from trainverify.cli.found_options import OPTIONS, with_found
from trainverify.cli.judged import EngineName, Memory, judged
from trainverify.cli.listed_ops import listed_ops
from trainverify.cli.outputs import NOTHING_MORE, Outputs, with_outputs
from trainverify.cli.user_ops import OpsFile, table_with
from trainverify.refusal import Refused
from trainverify.report import Report
from trainverify.terminal import AsJson, Timeout, guarded, progress
from trainverify.translate.targets import CaptureError
from trainverify.verdicts import refuted_at

if TYPE_CHECKING:
    from trainverify.torch.cache import Cache

Targets = Annotated[
    list[str], typer.Argument(metavar="REFERENCE DISTRIBUTED", help="Two functions, FILE.py:NAME; or `run -- SCRIPT.py ARGS`.")
]
WorldSize = Annotated[int, typer.Option("--world-size", min=1, max=65536, metavar="N", help="Ranks; each is captured in a process.")]
ReferenceArgs = Annotated[
    str | None, typer.Option("--reference-args", metavar="TEXT", help="Of a script: its arguments when it runs alone.")
]
Replayed = Annotated[bool, typer.Option("--replay", help="Also run the code for real (gloo) and compare the translation with it.")]
AcceptChoices = Annotated[
    bool, typer.Option("--accept-choices", help="Of more than three conditions on data, assume that the others hold.")
]
Real = Annotated[
    bool, typer.Option("--real", help="Capture on real random tensors, through gloo: for code that reads data. Its choices are assumed.")
]
AllRanks = Annotated[bool, typer.Option("--all-ranks", help="Capture every rank, also of more than 64.")]
AcceptSampled = Annotated[
    bool, typer.Option("--accept-sampled", help="PROVED(sampled), of captured ranks only, counts as proved: exit code 0.")
]
Cached = Annotated[bool, typer.Option("--cache", help="Keep captures, and use those of the same sources and arguments again.")]
ListOps = Annotated[bool, typer.Option("--list-ops", help="Only list the ops of the step, those without a meaning first.")]
Folder = Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Write both programs to this folder.")]
Also = Annotated[
    list[str] | None,
    typer.Option(metavar="batch=N", help="Where there is no verdict, capture both functions with N rows too; REFUTED there counts."),
]
Device = Annotated[
    str | None,
    typer.Option("--device", metavar="cpu|cuda", help="What the code runs as on, without GPUs. Of scripts: cuda; of functions: cpu."),
]
Points = Annotated[int, typer.Option(min=1, max=1000, help="Random points to evaluate.")]
Seed = Annotated[int, typer.Option(min=0, help="Of the first random point.")]


# Options that do not go with functions, and with a script.
UNFIT: Final = (("--reference-args", *(f"--{n}" for n in OPTIONS)), ("--real", "--also", "--replay"))


@guarded
@with_outputs
@with_found
def command(
    targets: Targets,
    world_size: WorldSize,
    reference_args: ReferenceArgs = None,
    replayed: Replayed = False,
    accept_choices: AcceptChoices = False,
    real: Real = False,
    device: Device = None,
    all_ranks: AllRanks = False,
    accept_sampled: AcceptSampled = False,
    cached: Cached = False,
    also: Also = None,
    list_ops: ListOps = False,
    folder: Folder = None,
    as_json: AsJson = False,
    ops: OpsFile = None,
    points: Points = 3,
    seed: Seed = 0,
    timeout: Timeout = None,
    memory: Memory = None,
    engine: EngineName = "algebra",
    outputs: Outputs = NOTHING_MORE,
    found: Mapping[str, Any] | None = None,
) -> int:
    """Is the training step of PyTorch code on N ranks equal to the one on a single device? Python runs the code, on fake tensors."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # DDP warns that it has no clock for a device that is not there
    try:
        from trainverify.torch import command as capture
        from trainverify.torch.launch import Reads
    except ImportError as error:
        raise Refused(str(error)) from error
    others = _other_rows(targets, real, also or (), found or {})
    named = targets[1 if targets[0] == "run" else -1]
    on, whole = _on(device, targets, replayed), f"the ranks of {named}"
    cache = _cache(ops, targets, world_size, reference_args, on, repr(found)) if cached else None

    def subject(tell: Callable[[str], None], rows: int | None = None) -> capture.Subject:
        table = table_with(ops)
        if targets[0] == "run":
            alone = None if reference_args is None else shlex.split(reference_args)
            return capture.script(targets[1], targets[2:], alone, world_size, table, tell, all_ranks, accept_choices, cache, on, found)
        return capture.functions(targets[0], targets[1], world_size, table, tell, all_ranks, accept_choices, real, cache, rows, on)

    def at(tell: Callable[[str], None], rows: int | None) -> Report:
        return capture.verdict(subject(tell, rows), table_with(ops), points, seed, engine, replayed, folder if rows is None else None, tell)

    def work(tell: Callable[[str], None]) -> Report:
        try:
            report = _first_refuted(at, others, tell)
            notes = (*report.notes, *([] if cache is None else cache.notes()))
            return replace(report, notes=notes, accept_sampled=accept_sampled)
        except Reads as error:
            return Report("UNKNOWN", str(error), whole)
        except CaptureError as error:
            raise Refused(str(error)) from error

    unfit = UNFIT[targets[0] == "run"]
    if list_ops:
        return _listed(lambda tell: capture.operations(subject(tell)), as_json)
    return judged("torch", whole, work, as_json, timeout, memory, outputs=outputs, artifact=named.partition(":")[0], unfit=unfit)


def _cache(ops: Path | None, *key: Any) -> Cache:
    """Captures that are kept of this command, with these operators."""
    from trainverify.torch.cache import Cache, mark
    from trainverify.torch.kept_files import default_folder

    return Cache(default_folder(), (*key, None if ops is None else (str(ops), mark(str(ops)))))


def _on(device: str | None, targets: list[str], replayed: bool) -> str:
    """The device that the code runs as on: scripts on GPUs, functions on the processor, if nothing is said."""
    on = device or ("cuda" if targets[0] == "run" else "cpu")
    if on not in ("cpu", "cuda"):
        raise Refused(f"--device {on}: cpu or cuda")
    if on == "cuda" and replayed:
        raise Refused("--replay runs the code for real, on the CPU: without --device cuda")
    return on


def _listed(operations: Callable[[Callable[[str], None]], list[tuple[str, int, str]]], as_json: bool) -> int:
    try:
        with progress(as_json) as tell:
            found = operations(tell)
    except CaptureError as error:
        raise Refused(str(error)) from error
    return listed_ops("torch", found, as_json)


def _first_refuted(at: Callable[[Callable[[str], None], int | None], Report], others: Sequence[int], tell: Callable[[str], None]) -> Report:
    """The report at the sizes as they are; without a verdict there, that of the first of other numbers of rows at which it is REFUTED."""
    report = at(tell, None)
    for rows in others if report.verdict == "UNKNOWN" else ():
        other = at(tell, rows)
        if other.verdict == "REFUTED":
            return refuted_at(f"batch={rows}", report, other)
    return report


def _other_rows(targets: Sequence[str], real: bool, also: Sequence[str], found: Mapping[str, Any]) -> list[int]:
    """The numbers of rows of --also; refused if options do not fit together."""
    if targets[0] != "run" and len(targets) != 2:
        raise Refused("two functions are needed, FILE.py:NAME FILE.py:NAME, or run -- SCRIPT.py ARGS")
    if targets[0] == "run" and len(targets) < 2:
        raise Refused("run needs a script: trainverify torch run --world-size N -- SCRIPT.py ARGS")
    if targets[0] == "run" and real:
        raise Refused("--real goes with functions, not with a script")
    if targets[0] == "run" and also:
        raise Refused("--also goes with functions; run a script with the arguments of a smaller batch")
    if targets[0] != "run" and found:
        raise Refused(f"--{next(iter(found))} goes with run; functions say it in their file: batch, mesh, loss")
    for text in also:
        name, _, number = text.partition("=")
        if name != "batch" or not number.isdecimal() or int(number) < 1:
            raise Refused(f"--also {text}: batch=N is what it takes, with N rows")
    return [int(text.partition("=")[2]) for text in also]
