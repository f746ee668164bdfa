"""`trainverify jax`: is the training step that JAX runs on a mesh equal to the one on a single device?"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from trainverify.cli.judged import EngineName, Memory, judged
from trainverify.cli.listed_ops import listed_ops
from trainverify.cli.outputs import NOTHING_MORE, Outputs, with_outputs
from trainverify.cli.user_ops import OpsFile, table_with
from trainverify.refusal import Refused
from trainverify.report import Report
from trainverify.terminal import AsJson, Timeout, guarded, progress


@guarded
@with_outputs
def command(
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
    outputs: Outputs = NOTHING_MORE,
) -> int:
    """Is the training step that JAX runs on a mesh equal to the one on a single device? Python traces the code; nothing is run."""
    try:
        from trainverify.jax import command as traces
    except ImportError as error:
        raise Refused(str(error)) from error
    traced = (reference, distributed, mesh, table_with(ops))

    def work(tell: Callable[[str], None]) -> Report:
        try:
            if hlo or replayed:
                traces.host_devices(mesh)
            return traces.verdict(traces.subject(*traced, tell, hlo), traced[3], points, seed, engine, replayed, folder, tell)
        except traces.CaptureError as error:
            raise Refused(str(error)) from error
        except traces.Unmapped as error:
            return Report("UNKNOWN", str(error), f"the ranks of {distributed}")

    if not list_ops:
        return judged(
            "jax", f"the ranks of {distributed}", work, as_json, timeout, memory, outputs=outputs, artifact=distributed.partition(":")[0]
        )
    with progress(as_json) as tell:
        try:
            if hlo:
                traces.host_devices(mesh)
            found = traces.operations(traces.subject(*traced, tell, hlo))
        except (traces.CaptureError, traces.Unmapped) as error:
            raise Refused(str(error)) from error
    return listed_ops("jax", found, as_json)
