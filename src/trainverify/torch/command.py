"""`trainverify torch`: what the command line does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from trainverify import files
from trainverify.graph.mesh import Mesh
from trainverify.graph.program import Domain
from trainverify.ops.table import OpTable
from trainverify.prove.attempt import Engine
from trainverify.report import Report
from trainverify.torch.cache import Cache
from trainverify.torch.captured import Captured, Steps
from trainverify.torch.cuda import CPU, CUDA, Fake, hinted
from trainverify.torch.exchange import GIVEN, digest, settled
from trainverify.torch.found_step import MARK
from trainverify.torch.inputs import Batch, Flags, Ids, Reals, with_rows
from trainverify.torch.judge import by_step, captures, judge, kind_of, pair
from trainverify.torch.launch import Failed, Reads, run
from trainverify.torch.loading import repeated
from trainverify.torch.mappings import MAPPINGS
from trainverify.torch.replay import replay
from trainverify.torch.sample import ALL_RANKS, chosen
from trainverify.torch.script import capture_script
from trainverify.torch.sharing import Declared, left_out, ranged, share
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
    inferred: tuple[str, ...] = ()  # of a step that was found: what is assumed of it
    loss_declared: bool = True  # else it is assumed to be an average, and compared only if that holds


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


@dataclass(frozen=True)
class Scripted:
    """A script, and how its processes are captured."""

    path: str
    arguments: Sequence[str]
    alone: Sequence[str]
    world: int
    table: OpTable
    tell: Progress
    accept: bool
    cache: Cache | None
    device: str

    def captured(
        self, ranks: Sequence[int | None], choices: Sequence[Choices], joined: Any = None, ignored: Mapping[str, int] | None = None
    ) -> list[tuple[Steps, Any, Any]]:
        """What these ranks do; None is the reference, which gets the batches of all ranks if these are `joined`."""

        def work(r: int | None) -> Callable[[], tuple[Steps, Any, Any]]:
            given = (self.path, self.alone, 0, 1, True) if r is None else (self.path, self.arguments, r, self.world, False)
            return lambda: capture_script(
                *given, self.table, tuple(choices), self.accept, self.device, joined if r is None else None, ignored
            )

        works = [work(r) for r in ranks]

        def count(n: int) -> None:
            self.tell(f"captured {n} of {len(works)} processes")

        results: Sequence[tuple[Steps, Any, Any] | Failed]
        if self.cache is None:
            results = run(works, tell=count)
        else:
            more = (digest(), "" if joined is None else repr(joined), repr(ignored or {}))
            keys = [(self.path, "only" if r is None else r, choices, self.accept, self.device, *more) for r in ranks]
            kept = self.cache.captured(dict(zip(keys, works, strict=True)), lambda made: (made[0], plain(made[1], made[2])), count)
            results = [k if isinstance(k, Failed) else (k[0], *spelled(k[1])) for k in kept]
        return [_made(r, result, self.device) for r, result in zip(ranks, results, strict=True)]

    def all_ranks(self, first: Any, choices: Sequence[Choices], ignored: Mapping[str, int] | None = None) -> list[tuple[Steps, Any, Any]]:
        """What ranks do with the objects that they give each other; the first was captured before any other gave one."""

        def captured() -> list[tuple[Steps, Any, Any]]:
            anew = GIVEN.by_rank or ignored
            return [*([] if anew else [first]), *self.captured(range(0 if anew else 1, self.world), choices, None, ignored)]

        return settled(captured, lambda made: made[0])

    def found(self, first: Any, choices: Sequence[Choices], declared: Declared) -> tuple[list[Any], Mesh, Batch, dict[str, Any]]:
        """All processes of a script whose step was found, the reference first: it gets what the ranks loaded."""
        if self.world > ALL_RANKS:
            raise CaptureError(f"of more than {ALL_RANKS} ranks the step is not found: {MARK}")
        ranks = self.all_ranks(first, choices)
        ignored, seen = left_out([said for _, _, said in ranks], declared)
        if not seen:
            ranks = self.all_ranks(first, choices, ignored)
        shared = share([said for _, _, said in ranks], declared)
        joined = {
            "shapes": shared.shapes,
            "lengths": first[2]["lengths"],
            "ends": first[2]["ends"],
            "ranks": self.world,
        }
        (one,) = self.captured([None], choices, joined, ignored)
        batch, told = ranged(one[1], shared, one[0][0].program, [said for _, _, said in ranks], declared)
        domains = {n: d for n, s in batch.items() if (d := s.domain) is not None}
        every = [tuple(_with_domains(c, domains) for c in steps) for steps, _, _ in (one, *ranks)]
        loss = declared.loss or (dict.fromkeys(shared.axes, "avg") or "whole")
        said = {"cuts": {}, "loss": loss, "assumed": (*shared.assumed, *told), "declared": declared.loss is not None}
        return every, shared.mesh, batch, said


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
    declared: Mapping[str, Any] | None = None,
) -> Subject:
    """A script as it is: as the ranks of the world, and once as the only rank. The first of them says what the mesh is, if the script
    marks its step.

    All of it again for every combination of branches on data."""
    job = Scripted(path, arguments, arguments if reference is None else reference, world, table, tell, accept, cache, device)
    told: list[tuple[Mesh, Batch, dict[str, Any]]] = []

    def run_way(choices: Sequence[Choices]) -> list[Processes]:
        (first,) = job.captured([0], choices)
        said = first[2]
        if "loads" in said:
            processes, mesh, batch, said = job.found(first, choices, Declared(**declared or {}))
            told.append((mesh, batch, said))
            return by_step(processes)
        if declared:
            raise CaptureError(f"--{next(iter(declared))} goes with a step that is found; tvt.step has an argument for it")
        mesh = Mesh(said["mesh"] or {"dp": world})
        if mesh.size != world:
            raise CaptureError(f"{mesh} has {mesh.size} ranks, --world-size says {world}")
        ranks = range(world) if all_ranks else chosen(mesh)
        (one,) = job.captured([None], choices)
        told.append((mesh, one[1], said))
        marked = job.all_ranks(first, choices) if len(ranks) == world else [first, *job.captured(ranks[1:], choices)]
        if len(marked) == world and (same := repeated(mesh, one[1], [s for _, _, s in marked])) is not None:
            raise Reads(same)
        return by_step([one[0], *(c for c, _, _ in marked)])

    every = all_ways(run_way)
    mesh, specs, said = told[0]
    found = Subject(every[0].reference, every[0].ranks, mesh, specs, said["cuts"], said["loss"], None, every)
    return replace(found, inferred=tuple(said.get("assumed", ())), loss_declared=said.get("declared", True))


def _with_domains(c: Captured, domains: Mapping[str, Domain]) -> Captured:
    """A program whose ids have the range that is known now."""
    known = {n: d for n, d in domains.items() if n in c.program.domains}
    return replace(c, program=replace(c.program, domains={**c.program.domains, **known}))


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

    def judged(loss: Any) -> Report:
        asked = (s.mesh, s.batch, s.cuts, loss, table, points, seed, engine, tell)
        return joined([(w, judge(w.reference, w.ranks, *asked)) for w in found_ways])

    report = judged(s.loss) if s.loss_declared else loss_inferred(s.loss, judged)
    report = replace(report, assumptions=(*report.assumptions, *s.inferred))
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


def loss_inferred(loss: Any, judged: Callable[[Any], Report]) -> Report:
    """The report with the losses of ranks combined in the way that holds: as an average, a sum, or each the whole one.

    How they are combined is a convention, which nothing else in the step depends on: what else differs where the loss does not, differs
    however they are combined. Where none of these holds, the report is that of the average."""
    first = judged(loss)
    axes = () if isinstance(loss, str) else tuple(loss)
    for other in (dict.fromkeys(axes, "sum"), "whole") if axes and differs_in_loss_alone(first) else ():
        report = judged(other)
        if report.verdict.startswith("PROVED"):
            note = "inferred: the losses of ranks are taken as they combine to the reference's; their average differs (--loss declares it)"
            whole = ("inferred: every rank reports the whole loss",) if other == "whole" else ()
            report = _as_inferred(report)
            return replace(report, assumptions=(*report.assumptions, *whole), notes=(*report.notes, note))
        if report.verdict == "REFUTED" and not any(o.status == "different" and o.name == "loss" for o in report.obligations):
            return _as_inferred(report)
    if axes and differs_in_loss_alone(first):
        hint = f"an average of the losses of ranks, their sum and the whole of each were tried: --loss {axes[0]}=avg declares one"
        reason = f"only the loss differs, which was taken as an average; {first.reason}"
        return replace(first, verdict="UNKNOWN", reason=reason, notes=(*first.notes, hint))
    return _as_inferred(first)


def _as_inferred(report: Report) -> Report:
    """How losses are combined was not declared by the user."""
    changed = [a.replace("declared: the loss", "inferred: the loss") for a in report.assumptions]
    return replace(report, assumptions=tuple(changed))


def differs_in_loss_alone(report: Report) -> bool:
    return report.verdict == "REFUTED" and {o.name for o in report.obligations if o.status == "different"} == {"loss"}


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
