"""`trainverify sweep`: a whole matrix of configurations, verified on all cores or on a cluster."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from trainverify import files
from trainverify.sweep.cache import Row, default_folder
from trainverify.sweep.cluster import on_cluster
from trainverify.sweep.matrix import cases
from trainverify.sweep.run import How, sweep
from trainverify.sweep.written import counted, exit_code, junit, page
from trainverify.terminal import AsJson, Timeout, emit, guarded, out, progress


@guarded
def command(
    matrix: Annotated[Path, typer.Argument(metavar="MATRIX.toml", help="Models, parallelisms and options; see docs/sweep.md.")],
    workers: Annotated[int, typer.Option(min=1, max=256, metavar="N", help="Processes.")] = 2,
    cluster: Annotated[str | None, typer.Option(metavar="ADDRESS", help="A scheduler of Dask, such as tcp://host:8786.")] = None,
    cache: Annotated[Path | None, typer.Option(metavar="DIR", help="Where verdicts are kept.")] = None,
    no_cache: Annotated[bool, typer.Option("--no-cache", help="Verify all, keep nothing.")] = False,
    points: Annotated[int, typer.Option(min=1, max=1000, help="Random points to evaluate.")] = 1,
    timeout: Timeout = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write the table as a page.")] = None,
    junit_file: Annotated[Path | None, typer.Option("--junit", metavar="FILE", help="Also write JUnit XML.")] = None,
    as_json: AsJson = False,
) -> int:
    """Every configuration of a matrix: one table, one exit code. Verdicts are kept, and used again while nothing changed."""
    all_cases = cases(matrix)
    how = How(None if no_cache else cache or default_folder(), points, timeout)
    began = time.perf_counter()
    found: dict[str, Row] = {}
    with progress(as_json) as tell:
        rows = sweep(all_cases, how, workers) if cluster is None else on_cluster(cluster, all_cases, how)
        for row in rows:
            found[row.name] = row
            tell(f"{len(found)} of {len(all_cases)}: {row.headline} {row.name}")
    ordered = [found[c.name] for c in all_cases]
    if html is not None:
        files.write_text(html, page(matrix.name, ordered))
    if junit_file is not None:
        files.write_text(junit_file, junit(ordered))
    seconds, code = time.perf_counter() - began, exit_code(ordered)
    if as_json:
        return emit(
            "sweep",
            code,
            rows=[asdict(r) | {"verdict": r.headline} for r in ordered],
            counts=counted(ordered),
            total_seconds=round(seconds, 3),
        )
    Console(width=None if out.is_terminal else 1000, highlight=False, file=sys.stdout).print(table(ordered))
    kept = sum(r.cached for r in ordered)
    total = ", ".join(f"{n} {v}" for v, n in counted(ordered).items())
    out.print(f"{total}; {len(ordered)} configurations in {seconds:.1f} s, {kept} verdicts from the cache")
    return code


def table(rows: list[Row]) -> Table:
    found = Table(box=None, pad_edge=False)
    for column in ("verdict", "configuration", "time", "why"):
        found.add_column(column)
    for r in rows:
        why = " · ".join(t for t in ("" if r.verdict == "PROVED" else r.reason, r.place, r.note) if t)
        found.add_row(r.headline, escape(r.name), "kept" if r.cached else f"{r.seconds:.1f} s", escape(why))
    return found
