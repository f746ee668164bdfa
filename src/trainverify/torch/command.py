"""`trainverify torch`: what the command line does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from trainverify import files
from trainverify.graph.mesh import Mesh
from trainverify.ops.table import OpTable
from trainverify.prove.attempt import Engine
from trainverify.report import Report
from trainverify.torch.cache import Cache
from trainverify.torch.captured import Captured, Steps
from trainverify.torch.cuda import CPU, CUDA, Fake, hinted
from trainverify.torch.inputs import Batch, Flags, Ids, Reals, with_rows
from trainverify.torch.judge import by_step, captures, judge, kind_of, pair
from trainverify.torch.launch import Failed, Reads, run
from trainverify.torch.loading import repeated
from trainverify.torch.mappings import MAPPINGS
from trainverify.torch.replay import replay
from trainverify.torch.sample import chosen
from trainverify.torch.script import capture_script
from trainverify.torch.ways import Choices, Processes, Way, all_ways, joined
from trainverify.translate.targets import CaptureError, module_of

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Subject:
    """What was captured, and how it is to be read."""

    reference: Captured
    ranks: tuple[Captured, ...]
    mesh: Mesh
    batch: Batch
    cuts: Mapping[str, Any]
    loss: Any
    targets: tuple[str, str] | None = None
    ways: tuple[Way, ...] = ()  # all combinations of branches on data; the first one is above


def settings_of(target: str, device: str = CPU) -> dict[str, Any]:
    """`batch`, `mesh`, `cuts` and `loss` in the file of a target, read in a process of its own."""

    def read() -> dict[str, Any]:
        if device == CUDA:
            Fake(1).install()
        space = vars(module_of(target))
        return {n: space.get(n) for n in ("batch", "mesh", "cuts", "loss")}

    (found,) = run([read])
    if isinstance(found, Failed):
        raise CaptureError(f"{target}: {found.where + ': ' if found.where else ''}{found.kind}: {found.message}")
    return found


def functions(
    reference: str,
    distributed: str,
    world: int,
    table: OpTable,
    tell: Progress,
    all_ranks: bool = False,
    accept: bool = False,
    real: bool = False,
    cache: Cache | None = None,
    rows: int | None = None,
    device: str = CPU,
) -> Subject:
    """Two functions of files; the file of the second says what the batch is. `rows` replaces the number of its rows."""
    said = settings_of(distributed, device)
    if not isinstance(said["batch"], Mapping):
        raise CaptureError(f"{distributed.rpartition(':')[0]} has no `batch`: a dictionary from names to tvt.Ids, tvt.Reals or tvt.Flags")
    mesh = Mesh(said["mesh"] or {"dp": world})
    if mesh.size != world:
        raise CaptureError(f"{mesh} has {mesh.size} ranks, --world-size says {world}")

    batch: Batch = said["batch"] if rows is None else with_rows(said["batch"], rows)

    def run_way(choices: Sequence[Choices]) -> list[Processes]:
        given = (reference, distributed, world, batch, mesh, table, None, tell)
        return captures(*given, all_ranks=all_ranks, choices=choices, accept=accept, real=real, cache=cache, device=device)

    found = all_ways(run_way)
    one, ranks, targets = found[0].reference, found[0].ranks, (reference, distributed)
    return Subject(one, ranks, mesh, batch, said["cuts"] or {}, said["loss"] or "whole", targets, found)


def script(
    path: str,
    arguments: Sequence[str],
    reference: Sequence[str] | None,
    world: int,
    table: OpTable,
    tell: Progress,
    all_ranks: bool = False,
    accept: bool = False,
    cache: Cache | None = None,
    device: str = CUDA,
) -> Subject:
    """A script as it is: once as the only rank, then as the ranks of the world. The first of them says what the mesh is.

    All of it again for every combination of branches on data."""
    alone = arguments if reference is None else reference
    told: list[tuple[Mesh, Any, Any]] = []

    def captured(ranks: Sequence[int | None], choices: Sequence[Choices]) -> list[tuple[Steps, Any, Any]]:
        def work(r: int | None) -> Callable[[], tuple[Steps, Any, Any]]:
            given = (path, alone, 0, 1, True) if r is None else (path, arguments, r, world, False)
            return lambda: capture_script(*given, table, tuple(choices), accept, device)

        works = [work(r) for r in ranks]

        def count(n: int) -> None:
            tell(f"captured {n} of {len(works)} processes")

        results: Sequence[tuple[Steps, Any, Any] | Failed]
        if cache is None:
            results = run(works, tell=count)
        else:
            keys = [(path, "only" if r is None else r, choices, accept, device) for r in ranks]
            kept = cache.captured(dict(zip(keys, works, strict=True)), lambda made: (made[0], plain(made[1], made[2])), count)
            results = [k if isinstance(k, Failed) else (k[0], *spelled(k[1])) for k in kept]
        return [_made(r, result, device) for r, result in zip(ranks, results, strict=True)]

    def run_way(choices: Sequence[Choices]) -> list[Processes]:
        (one, specs, _), first = captured([None, 0], choices)
        said = first[2]
        mesh = Mesh(said["mesh"] or {"dp": world})
        if mesh.size != world:
            raise CaptureError(f"{mesh} has {mesh.size} ranks, --world-size says {world}")
        ranks = range(world) if all_ranks else chosen(mesh)
        told.append((mesh, specs, said))
        every = [first, *captured(ranks[1:], choices)]
        if len(every) == world and (same := repeated(mesh, specs, [s for _, _, s in every])) is not None:
            raise Reads(same)
        return by_step([one, *(c for c, _, _ in every)])

    every = all_ways(run_way)
    mesh, specs, said = told[0]
    return Subject(every[0].reference, every[0].ranks, mesh, specs, said["cuts"], said["loss"], None, every)


def _made(rank: int | None, result: Any, device: str) -> Any:
    """What a process captured, or the error that ended it."""
    if isinstance(result, Failed):
        who = "the only rank" if rank is None else f"rank {rank}"
        raise kind_of(result)(f"{who}{f' ({result.where})' if result.where else ''}: {result.kind}: {hinted(result.message, device)}")
    return result


KINDS: Final = {"Ids": Ids, "Reals": Reals, "Flags": Flags}


def plain(specs: Batch, settings: Mapping[str, Any]) -> Any:
    """What a script says about its batch and mesh, as lists and dictionaries."""
    return [{n: [type(s).__name__, {**vars(s), "shape": list(s.shape)}] for n, s in specs.items()}, dict(settings)]


def spelled(said: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The same as objects."""
    specs, settings = said
    return {n: KINDS[kind](**{**fields, "shape": tuple(fields["shape"])}) for n, (kind, fields) in specs.items()}, settings


def verdict(
    subject: Subject, table: OpTable, points: int, seed: int, engine: Engine, replayed: bool, folder: Path | None, tell: Progress
) -> Report:
    """The report, after writing the programs and replaying them if that is asked for."""
    s = subject
    if folder is not None:
        made = pair(s.reference, s.ranks, s.mesh, s.batch, s.cuts, s.loss)
        folder.mkdir(parents=True, exist_ok=True)
        files.write(folder / "reference.logical.json.gz", made.logical)
        files.write(folder / "ranks.plan.json.gz", made.plan)
    found_ways = s.ways or (Way(s.reference, s.ranks),)
    judged = [(w, judge(w.reference, w.ranks, s.mesh, s.batch, s.cuts, s.loss, table, points, seed, engine, tell)) for w in found_ways]
    report = joined(judged)
    if not replayed or report.verdict in ("UNKNOWN", "INVALID"):
        return report
    if s.targets is None:
        raise CaptureError("--replay goes with functions, not with a script")
    if len(s.ranks) < s.mesh.size:
        raise CaptureError("--replay runs every rank for real: use it with a small --world-size")
    tell("running for real")
    made = pair(s.reference, s.ranks, s.mesh, s.batch, s.cuts, s.loss)
    found = replay(*s.targets, s.mesh.size, s.batch, made, table, seed)
    if found.agrees:
        return replace(report, notes=(*report.notes, str(found)))
    return replace(report, verdict="UNKNOWN", reason=f"the translation is not what runs: {found}")


def operations(subject: Subject) -> list[tuple[str, int, str]]:
    """Every op of the step: its name, how often it runs on all ranks, and `mapped` or why it has no meaning here."""
    counts: Counter[str] = Counter()
    why: dict[str, str] = {}
    for c in (subject.reference, *subject.ranks):
        counts.update(c.calls)
        for name, m in c.missing.items():
            why.setdefault(name, f"{m.reason} ({m.source})")
    return [(n, k, why.get(n, "mapped")) for n, k in sorted(counts.items(), key=lambda x: (x[0] not in why, x[0]))]


def mapped() -> list[str]:
    """All ATen ops with a row."""
    return sorted(MAPPINGS)


__all__ = ["Subject", "functions", "mapped", "operations", "script", "verdict"]
