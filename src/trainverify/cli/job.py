"""What commands on jobs of frameworks share: their options, and the verdict with its shims checked or accepted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trainverify.cli.judged import judged
from trainverify.ops import OPS
from trainverify.prove.attempt import Engine
from trainverify.refusal import Refused
from trainverify.report import Report

if TYPE_CHECKING:
    from trainverify.frameworks.job import Job

AllRanks = Annotated[bool, typer.Option("--all-ranks", help="Capture every rank, also of more than 16.")]
AcceptSampled = Annotated[
    bool, typer.Option("--accept-sampled", help="PROVED(sampled), of captured ranks only, counts as proved: exit code 0.")
]
AcceptShims = Annotated[
    bool,
    typer.Option(
        "--accept-shims", help="Take the shims as they are. Else a tiny real run checks them, if there is one; others make UNKNOWN."
    ),
]
Cached = Annotated[bool, typer.Option("--cache", help="Keep captures, and use those of the same sources and arguments again.")]
Out = Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Write both programs to this folder.")]
Points = Annotated[int, typer.Option(min=1, max=1000, help="Random points to evaluate.")]
Seed = Annotated[int, typer.Option(min=0, help="Of the first random point.")]


@dataclass(frozen=True)
class Asked:
    """How a job is to be verified."""

    points: int
    seed: int
    engine: Engine
    out: Path | None
    all_ranks: bool
    accept_sampled: bool
    accept_shims: bool
    cached: bool


def verified(
    command: str, title: str, make: Callable[[], Job], asked: Asked, as_json: bool, timeout: float | None, memory: int | None
) -> int:
    """Print the verdict on the job that `make` reads off the user's options."""

    def work(tell: Callable[[str], None]) -> Report:
        from trainverify.frameworks.job import How, verdict
        from trainverify.frameworks.trust import checked
        from trainverify.torch.cache import Cache
        from trainverify.torch.kept_files import default_folder
        from trainverify.translate.targets import CaptureError

        try:
            job = make()
            cache = Cache(default_folder(), command, job.framework) if asked.cached else None
            check = None if asked.accept_shims else partial(checked, table=OPS, tell=tell)
            how = How(asked.points, asked.seed, asked.engine, asked.out, asked.all_ranks)
            report = verdict(job, OPS, tell, how, cache, check)
        except CaptureError as error:
            raise Refused(str(error)) from error
        notes = (*report.notes, *([] if cache is None else cache.notes()))
        return replace(report, notes=notes, accept_sampled=asked.accept_sampled)

    return judged(command, title, work, as_json, timeout, memory)
