"""`trainverify nnscaler`: is an nnScaler plan equal to the plan for one device?"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from trainverify.cli.judged import Memory, judged
from trainverify.cli.outputs import NOTHING_MORE, Outputs, with_outputs
from trainverify.cli.user_ops import OpsFile, table_with
from trainverify.nnscaler.dump import read as read_dump
from trainverify.nnscaler.judge import judge
from trainverify.nnscaler.trainer import Trainer, optimizer_of
from trainverify.refusal import Refused
from trainverify.report import Report
from trainverify.terminal import AsJson, Timeout, guarded


@guarded
@with_outputs
def command(
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
    outputs: Outputs = NOTHING_MORE,
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

    return judged("nnscaler", f"{plan.name} against {logical.name}", work, as_json, timeout, memory, outputs=outputs, artifact=str(plan))
