"""`trainverify bench …`: the commands that measure."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from trainverify.bench import needle, scaling, table3
from trainverify.bench.algebra import bench
from trainverify.bench.stages import bench as bench_stages
from trainverify.refusal import Refused
from trainverify.terminal import AsJson, Timeout, change, emit, guarded, out, progress

command = typer.Typer(rich_markup_mode=None, help="Measure what proofs cost.")


@command.command("algebra")
@guarded
def bench_algebra_command(
    as_json: AsJson = False,
    quick: Annotated[bool, typer.Option("--quick", help="Small cases, each once, without memory: seconds instead of minutes.")] = False,
) -> int:
    """Proofs of Llama plans by tensor algebra: time and memory by phase, and growth with layers, micro-batches, ranks and sizes."""
    results = []
    with progress(as_json) as tell:
        for result in bench(quick, progress=tell):
            results.append(result)
            if not as_json:
                wide = Console(width=None if out.is_terminal else 240, highlight=False, file=sys.stdout)
                wide.print(result.table(), "")
    return emit("bench algebra", 0, series=[r.json() for r in results]) if as_json else 0


@command.command("stages")
@guarded
def bench_stages_command(
    as_json: AsJson = False, quick: Annotated[bool, typer.Option("--quick", help="One layer, one device axis: seconds.")] = False
) -> int:
    """Staged proofs of a Llama plan, in the process itself and in worker processes: time and memory."""
    with progress(as_json) as tell:
        rows = list(bench_stages(quick, tell))
    if as_json:
        return emit("bench stages", 0, cases=[vars(r) for r in rows])
    for r in rows:
        out.print(str(r), markup=False, highlight=False)
    return 0


@command.command("table3")
@guarded
def bench_table3_command(
    as_json: AsJson = False,
    only: Annotated[str, typer.Option(metavar="L1,…", help="Some of them.")] = ",".join(table3.NAMES),
    layers: change("So many layers, if not all.") = None,  # type: ignore[valid-type]
    zero: Annotated[int, typer.Option(min=0, max=3, help="ZeRO, as in `verify --zoo`.")] = 1,
    timeout: Timeout = None,
) -> int:
    """The paper's six models at full size, each in a process of its own: verdict, time by phase, memory."""
    names = only.split(",")
    if unknown := [n for n in names if n not in table3.NAMES]:
        raise Refused(f"--only {unknown[0]}: some of {', '.join(table3.NAMES)}")
    with progress(as_json) as tell:
        results = list(table3.bench(names, layers, zero, timeout, tell))
    code = 0 if all(r.run.verdict == "PROVED" for r in results) else 3
    if as_json:
        return emit("bench table3", code, cases=[r.json() for r in results])
    wide = Console(width=None if out.is_terminal else 240, highlight=False, file=sys.stdout)
    wide.print(table3.table(results))
    for r in results:
        if r.run.verdict != "PROVED":
            out.print(f"{r.run.name}: {r.run.reason}", markup=False)
    return code


@command.command("scaling")
@guarded
def bench_scaling_command(
    as_json: AsJson = False,
    only: Annotated[str, typer.Option(metavar="dp,…", help="Some of the variables.")] = ",".join(scaling.NAMES),
    repeat: Annotated[int, typer.Option(min=1, help="Runs of every case, of which the quickest counts.")] = 3,
    quick: Annotated[bool, typer.Option("--quick", help="Few layers, two values of every variable, each once.")] = False,
    file: Annotated[Path | None, typer.Option("--out", metavar="FILE.svg", help="Write the plots there.")] = None,
) -> int:
    """How the time of a whole `verify` grows with batch, sizes, ranks, layers and micro-batches, one at a time (the paper's Figure 7)."""
    names = only.split(",")
    if unknown := [n for n in names if n not in scaling.NAMES]:
        raise Refused(f"--only {unknown[0]}: some of {', '.join(scaling.NAMES)}")
    if file is not None and not os.path.isdir(file.absolute().parent):
        raise Refused(f"{file}: no such folder")
    if file is not None and os.path.isdir(file):
        raise Refused(f"{file}: a folder, not a file")
    results = []
    with progress(as_json) as tell:
        for result in scaling.bench(names, repeat, quick, tell):
            results.append(result)
            if not as_json:
                wide = Console(width=None if out.is_terminal else 240, highlight=False, file=sys.stdout)
                wide.print(result.table(), "")
    if file is not None:
        try:
            file.write_text(scaling.picture(results), "utf-8")
        except OSError as error:
            raise Refused(f"{file}: {error.strerror}") from error
    code = 0 if all(r.proved for r in results) else 3
    return emit("bench scaling", code, series=[r.json() for r in results]) if as_json else code


@command.command("needle")
@guarded
def bench_needle_command(
    as_json: AsJson = False,
    count: Annotated[int, typer.Option(min=1, help="Places.")] = 10,
    seed: Annotated[int, typer.Option(min=0, help="Of the first place.")] = 0,
    layers: change("So many layers, if not all.") = None,  # type: ignore[valid-type]
) -> int:
    """One op changed on one of 8192 ranks, at random places: is it found and named, and in how much time?"""
    found = []
    with progress(as_json) as tell:
        for n in needle.bench(count, seed, layers, tell):
            found.append(n)
            if not as_json:
                said = "named" if n.complete else "not named completely" if n.found else "not found"
                what = "harmless, not counted" if n.harmless else said
                out.print(f"{n.verdict}, {what}, {n.times:g}×, {n.megabytes} MB: {n.text}", markup=False)
    counted = [n for n in found if not n.harmless]
    code = 0 if len(counted) == count and all(n.found and n.complete for n in counted) else 3
    if as_json:
        return emit("bench needle", code, needles=[n.json() for n in found])
    worst = max((n.times for n in counted), default=0.0)
    named = sum(n.found and n.complete for n in counted)
    summary = f"{named} of {len(counted)} found with rank, op, layer and micro-batch; at most {worst:g}× the time of the correct plan"
    out.print(f"{summary} (aim {needle.AIM:g}×)", markup=False)
    return code


@command.command("torch")
@guarded
def bench_torch_command(
    as_json: AsJson = False,
    only: Annotated[
        str, typer.Option(metavar="tp,…", help="Some of tp, fsdp, and with odd vocabularies fsdp-32001, fsdp-128257.")
    ] = "tp,fsdp",
    layers: change("So many layers, if not all.") = None,  # type: ignore[valid-type]
    timeout: Timeout = None,
) -> int:
    """Llama-3-8B as PyTorch code on 8 ranks (DTensor tp + sp, FSDP2): what capturing and proving its training step costs."""
    try:
        from trainverify.bench import captured
    except ImportError as error:
        raise Refused(str(error)) from error
    names = only.split(",")
    if unknown := [n for n in names if n not in captured.NAMES]:
        raise Refused(f"--only {unknown[0]}: some of {', '.join(captured.NAMES)}")
    with progress(as_json) as tell:
        results = list(captured.bench(names, layers, timeout, tell))
    code = 0 if all(r.verdict == "PROVED" for r in results) else 3
    if as_json:
        return emit("bench torch", code, cases=[{**vars(r), "proof_seconds": round(r.total, 2)} for r in results])
    wide = Console(width=None if out.is_terminal else 240, highlight=False, file=sys.stdout)
    wide.print(captured.table(results))
    for r in results:
        if r.verdict != "PROVED":
            out.print(f"{r.name}: {r.reason}", markup=False)
    return code


@command.command("frameworks")
@guarded
def bench_frameworks_command(
    as_json: AsJson = False,
    long: Annotated[bool, typer.Option("--long", help="Also Llama-3-8B on 64 ranks: many minutes.")] = False,
) -> int:
    """Trainers of frameworks that are installed, under every parallelism that is captured: verdict, ops, seconds, shims."""
    try:
        from trainverify.bench import frameworks
    except ImportError as error:
        raise Refused(str(error)) from error
    with progress(as_json) as tell:
        rows = list(frameworks.bench(long, tell))
    code = 0 if all(r.verdict in ("PROVED", "PROVED(sampled)") for r in rows) else 3
    if as_json:
        return emit("bench frameworks", code, cases=[vars(r) for r in rows])
    Console(width=None if out.is_terminal else 240, highlight=False, file=sys.stdout).print(frameworks.table(rows))
    for r in rows:
        if r.verdict != "PROVED":
            out.print(f"{r.framework}, {r.parallelism}: {r.reason}", markup=False)
    return code
