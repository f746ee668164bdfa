"""`verify`: capture the reference and every rank, put the plan together, and let the verifier compare them."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from trainverify.check.findings import Finding, names
from trainverify.graph.lineage import Layout, Reduction
from trainverify.graph.mesh import Mesh
from trainverify.graph.plan import Plan, fold
from trainverify.graph.program import Op, Output, Program, attributes
from trainverify.ops import OPS
from trainverify.ops.table import OpTable
from trainverify.prove.attempt import Engine
from trainverify.report import Report
from trainverify.torch.agreement import ABSENT, disagreements, left_over, made_or_kept, numbers, restructured
from trainverify.torch.cache import Cache
from trainverify.torch.capture import STEPS, capture
from trainverify.torch.captured import Captured, Steps, compared_name, condition_name
from trainverify.torch.cuda import CPU, CUDA, hinted
from trainverify.torch.exchange import GIVEN, digest, settled
from trainverify.torch.inputs import Batch
from trainverify.torch.launch import Failed, Reads, Traced, run
from trainverify.torch.lineage import Cuts, Held, Lineages, NoLineage, is_partial
from trainverify.torch.mappings import Row
from trainverify.torch.positions import aligned
from trainverify.torch.sample import NoSample, assumption, chosen, everyone
from trainverify.torch.starts import unlike_parts, unlike_starts
from trainverify.torch.ways import Choices, Processes, Way, all_ways, happens, joined
from trainverify.translate.groups import bind, by_members
from trainverify.translate.groups import joined as groups_of
from trainverify.translate.targets import CaptureError, Target, resolve
from trainverify.verdicts import verify as verify_programs

Loss = str | Mapping[str, Reduction]  # "whole", or over which mesh axes the local losses are summed or averaged
Progress = Callable[[str], None]


def _silent(text: str) -> None:
    pass


@dataclass(frozen=True)
class Pair:
    """Both programs, with what is to be said about them."""

    logical: Program
    plan: Plan
    findings: tuple[Finding, ...] = ()
    assumed: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    captured: tuple[Captured, ...] = field(default=(), compare=False)


def captures(
    reference: Target,
    distributed: Target,
    world_size: int,
    batch: Batch,
    mesh: Mesh,
    ops: OpTable = OPS,
    meanings: Mapping[str, Row] | None = None,
    tell: Progress = _silent,
    seconds: float = 600.0,
    all_ranks: bool = False,
    ranks: Sequence[int] | None = None,
    choices: Sequence[Choices] = ((),) * STEPS,
    accept: bool = False,
    real: bool = False,
    cache: Cache | None = None,
    device: str = CPU,
) -> list[Processes]:
    """Every step of the reference and of all ranks (of many, a sample; or those that are given), each in a process of its own, or from
    `cache`."""
    if ranks is None:
        ranks = range(world_size) if all_ranks else chosen(mesh)

    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store") if real else None

        def one(target: Target, rank: int | None, changing: frozenset[str]) -> Callable[[], Steps]:
            given = (batch, mesh, rank, world_size, ops, meanings, "step", tuple(choices), accept, store)
            return lambda: capture(lambda: resolve(target), *given, device=device, changing=changing)

        if real and device == CUDA:
            raise CaptureError("on real tensors there is no device cuda")
        if real and len(ranks) < world_size:
            raise CaptureError(f"{world_size} ranks: on real tensors all of them run at once")
        tell(f"capturing 1 + {len(ranks)} processes")

        def count(n: int) -> None:
            tell(f"captured {n} of {1 + len(ranks)} processes")

        def of(processes: Sequence[tuple[Target, int | None]], changing: frozenset[str]) -> list[Steps | Failed]:
            works = [one(target, rank, changing) for target, rank in processes]
            if cache is None or real:  # ranks that talk to each other run together
                return run(works, real, seconds, count)
            keys = [(t, r, repr(batch), mesh, choices, accept, device, changing, digest()) for t, r in processes]
            kept = cache.captured(dict(zip(keys, works, strict=True)), lambda result: (result, None), count, seconds)
            return [k if isinstance(k, Failed) else k[0] for k in kept]

        def all_of_them(changing: frozenset[str]) -> list[Steps | Failed]:
            processes: list[tuple[Target, int | None]] = [(reference, None), *((distributed, r) for r in ranks)]
            first, *found = of(processes, changing)
            if len(ranks) == world_size and not real:
                found = settled(lambda: of(processes[1:], changing) if GIVEN.by_rank else found, _steps)
            return [first, *found]

        changing = frozenset[str]()
        while more := _no_tables(found := all_of_them(changing)):
            changing |= more
    return by_step(_captured(found, ranks, device))


def _captured(found: Sequence[Steps | Failed], ranks: Sequence[int], device: str) -> list[Steps]:
    """What the reference and the ranks captured, or the error that ended one of them."""
    good: list[Steps] = []
    for i, result in enumerate(found):
        who = "the reference" if i == 0 else f"rank {ranks[i - 1]}"
        if isinstance(result, Failed):
            where = f" ({result.where})" if result.where else ""
            raise kind_of(result)(f"{who}{where}: {result.kind}: {hinted(result.message, device)}") from Traced(result.trace)
        good.append(result)
    return good


def _steps(result: Steps | Failed) -> Steps | None:
    return None if isinstance(result, Failed) else result


def _no_tables(found: Sequence[Steps | Failed]) -> frozenset[str]:
    """Buffers that were taken for tables of constants, and that a step changes, or that are none in another process."""
    steps = [c for result in found if not isinstance(result, Failed) for c in result]
    kept = {n for c in steps for n in c.program.state}
    return frozenset(n for c in steps for n, changed in c.tables.items() if changed or n in kept)


def by_step(found: Sequence[Steps]) -> list[Processes]:
    """What processes captured, step by step; the first process is the reference."""
    return [(reference, list(ranks)) for reference, *ranks in zip(*found, strict=True)]


def kind_of(failed: Failed) -> type[CaptureError]:
    """Where values are read, or a later step fails, there is no verdict; all else is an error of the input."""
    return Reads if failed.kind in ("ReadsData", "LaterStep") else CaptureError


def pair(reference: Captured, ranks: Sequence[Captured], mesh: Mesh, batch: Batch, cuts: Cuts | None = None, loss: Loss = "whole") -> Pair:
    """The logical program and the plan; ranks that were not captured run what is assumed of them."""
    captured, ranks = ranks, everyone(ranks, mesh)
    logical = replace(reference.program, name="the reference")
    groups = groups_of(c.groups for c in ranks)
    programs = [_with_domains(p, logical) for p in aligned(logical, [c.program for c in ranks])]
    if not isinstance(loss, str):
        programs = [_with_loss(p, mesh, i, loss, groups) for i, p in enumerate(programs)]
    held = [Held(i, p, c.placed) for i, (p, c) in enumerate(zip(programs, ranks, strict=True))]
    lineages = Lineages(logical, held, mesh, batch, cuts or {})
    lineage: list[Layout] = list(lineages.layouts())
    if (left := next((x.logical for x in lineage if x.logical in reference.left and is_partial(x.form)), None)) is not None:
        raise NoLineage(f"{left}, which the step before left there, is a summand on every rank: is zero_grad called in every step?")
    gradients, partial = lineages.gradients()
    notes = []
    if partial:
        logical = _without_gradients(logical, partial)
        programs = [_without_gradients(p, partial) for p in programs]
        which = names(sorted(partial))
        notes.append(f"gradients of {which} are summands until the optimizer adds them up: their updates are compared instead")
    plan = fold("the captured ranks", mesh, programs, groups, (*lineage, *gradients))
    processes = [reference, *captured]
    findings = _summarised([f for c in processes for f in c.findings])
    assumed = [a for c in processes for a in c.assumed]
    if len(captured) < len(ranks):
        assumed.insert(0, assumption(len(captured), len(ranks)))
    if not isinstance(loss, str):
        assumed.append(
            "declared: the loss of the step is the " + ", ".join(f"{op} over {a}" for a, op in loss.items()) + " of what ranks report"
        )
    masks = [n for n in logical.inputs if n not in batch]
    if masks:
        lie = [f"{x.logical}: {x.form}" for x in lineage if x.logical in masks][:1]
        text = "dropout: masks are inputs, the same elements the same on all ranks and in the reference, cut as their activations are"
        assumed.append(f"{text} ({'; '.join([names(masks), *lie])})")
    merged = [m for c in processes for m in c.merged]
    notes += [f"literals that count as one: {m}" for m in dict.fromkeys(merged)]
    return Pair(logical, plan, tuple(findings), tuple(dict.fromkeys(assumed)), tuple(notes), tuple(processes))


def _with_loss(program: Program, mesh: Mesh, rank: int, over: Mapping[str, Reduction], groups: dict[str, tuple[int, ...]]) -> Program:
    """The program with its local loss combined, only to be reported."""
    local = program.output("loss")
    if local is None:
        return program
    tensors, ops, last = dict(program.tensors), list(program.ops), local
    source = next((op.source for op in ops if local in op.outputs), None)
    for axis, op in over.items():
        members = mesh.group(rank, (axis,))
        group = next((n for n, m in groups.items() if m == members), None) or bind(groups, by_members(axis, members), members)
        name = f"loss.{op}.{axis}"
        tensors[name] = tensors[local]
        ops.append(Op("all_reduce", (last,), (name,), attributes({"group": group, "op": op}), "metric", None, source))
        last = name
    outputs = tuple(replace(o, tensor=last) if o.role == "loss" else o for o in program.outputs)
    return replace(program, tensors=tensors, ops=tuple(ops), outputs=outputs)


def _without_consequence(report: Report, logical: Program) -> set[str]:
    """Parameters whose gradients alone differ, or are not there, where the step updates these: only what it leaves behind matters."""
    wrong = {o.name for o in report.obligations if o.status == "different"}
    errors = [f for f in report.findings if f.severity == "error"]
    missing = {n for n in logical.parameters for f in errors if f.code == "TV307" and f.message.endswith(f" has no gradient of {n}")}
    found = {n for n in logical.parameters if f"gradient of {n}" in wrong} | missing
    made = {o: op for op in logical.ops for o in op.outputs}
    new = {n: made.get(str(logical.output("parameter", n))) for n in found}
    changed = all(op is not None and not (op.name == "identity" and op.inputs == (n,)) for n, op in new.items())
    alone = len(found) == len(wrong) if report.verdict == "REFUTED" else report.verdict == "INVALID" and len(missing) == len(errors)
    return found if alone and changed else set()


def _with_domains(program: Program, logical: Program) -> Program:
    """Parts of a state are what the whole one is: not negative, say."""
    known = {n: logical.domains.get(n) for n in program.state if n in logical.state}
    return replace(program, domains={n: d for n in {**program.domains, **known} if (d := known.get(n, program.domains.get(n))) is not None})


def _without_gradients(program: Program, names: set[str]) -> Program:
    kept = tuple(o for o in program.outputs if not (o.role == "gradient" and o.of in names))
    return replace(program, outputs=kept)


def _without_conditions(reference: Captured, ranks: Sequence[Captured]) -> tuple[Captured, list[Captured]] | None:
    """Conditions that are one function of one number everywhere follow from that number: without themselves, or without it."""
    if not reference.branches:
        return None
    unwanted = set()
    for i, branch in enumerate(reference.branches):
        alike = branch.of is not None and all(c.branches[i].of and c.branches[i].function == branch.function for c in ranks)
        unwanted.add(condition_name(i) if alike else compared_name(i))

    def less(c: Captured) -> Captured:
        kept = tuple(o for o in c.program.outputs if not (o.role == "metric" and o.of in unwanted))
        return replace(c, program=replace(c.program, outputs=kept))

    return less(reference), [less(c) for c in ranks]


def _summarised(findings: Sequence[Finding]) -> list[Finding]:
    """Findings about the same op at the same line once, with how often and what they reach."""
    kinds: dict[Any, list[Finding]] = {}
    for f in findings:
        what, _, why = f.message.partition(": ")
        key = (f.code, f.severity, why or what, f.source)
        kinds.setdefault(key, []).append(f)
    found = []
    for (_, _, why, _), same in kinds.items():
        first = same[0]
        if len(same) > 1 and first.message != why:
            reached = first.message.partition(": ")[0]
            first = replace(first, message=f"{why} (reaches {reached} and {len(same) - 1} more)", tensor=None)
        found.append(first)
    return found


def verify(
    reference: Target,
    distributed: Target,
    world_size: int,
    batch: Batch,
    mesh: Mapping[str, int] | Mesh | None = None,
    *,
    cuts: Cuts | None = None,
    loss: Loss = "whole",
    ops: OpTable = OPS,
    meanings: Mapping[str, Row] | None = None,
    points: int = 3,
    seed: int = 0,
    engine: Engine = "algebra",
    progress: Progress = _silent,
    seconds: float = 600.0,
    all_ranks: bool = False,
    accept_choices: bool = False,
    real: bool = False,
    device: str = CPU,
) -> Report:
    """Is the training step that ranks run the reference's? Both functions build a model and return its step.

    `mesh` names the axes of the ranks, the last one varying fastest. `cuts` says how plain tensors are cut that are smaller on a rank
    than in the reference; DTensors say it themselves. `loss` says over which axes the ranks' losses have to be combined.
    Of more than 64 ranks a sample is captured, and the verdict is PROVED(sampled) at best; with `all_ranks` all of them are.
    Up to three conditions on data are captured both ways; with `accept_choices` more of them are taken to be true, and assumed to be.
    With `real` the code runs on real random tensors, ranks at once through gloo: for code that reads data. The verdict then is about the
    choices that this run made, which are listed as assumptions.
    With `device="cuda"` the code runs as on GPUs, which need not be there, and the batch lies on the current one.
    """
    named = mesh if isinstance(mesh, Mesh) else Mesh(mesh or {"dp": world_size})
    if named.size != world_size:
        raise ValueError(f"{named} has {named.size} ranks, not {world_size}")

    def run_way(choices: Sequence[Choices]) -> list[Processes]:
        given = (reference, distributed, world_size, batch, named, ops, meanings, progress, seconds)
        return captures(*given, all_ranks=all_ranks, choices=choices, accept=accept_choices, real=real, device=device)

    def judge_way(way: Way) -> Report:
        return judge(way.reference, way.ranks, named, batch, cuts, loss, ops, points, seed, engine, progress)

    try:
        return joined([(way, judge_way(way)) for way in all_ways(run_way)])
    except Reads as error:
        return Report("UNKNOWN", str(error), f"the captured step on {named} against the reference")


def judge(
    reference: Captured,
    ranks: Sequence[Captured],
    mesh: Mesh,
    batch: Batch,
    cuts: Cuts | None = None,
    loss: Loss = "whole",
    ops: OpTable = OPS,
    points: int = 3,
    seed: int = 0,
    engine: Engine = "algebra",
    progress: Progress = _silent,
) -> Report:
    subject = f"the captured step on {mesh} against the reference"
    way = Way(reference, tuple(ranks))
    if (unlike := way.disagreement()) is not None:
        return Report("UNKNOWN", unlike, subject)
    ledgers = {c.rank if c.rank is not None else i: c.ledger for i, c in enumerate(ranks)}
    early = _summarised([f for c in (reference, *ranks) for f in c.findings] + _used_alike(ranks))
    early += disagreements([c.groups for c in ranks], ledgers)
    early += [_with_line(f, reference.used) for f in numbers(reference.ledger, ledgers)]
    early += unlike_starts(reference.ledger.starts, starts := {rank: led.starts for rank, led in ledgers.items()})
    early += [*made_or_kept(reference, ranks), *left_over(reference, ranks), *_losses(reference, ranks)]
    stopped = _stopped(subject, early, (reference, *ranks))
    if stopped is not None:
        counted = "" if len(ranks) == mesh.size else f"{len(ranks)} of {mesh.size} ranks captured; "
        return replace(stopped, reason=counted + stopped.reason)
    try:
        made = pair(reference, ranks, mesh, batch, cuts, loss)
    except NoLineage as error:
        return Report("UNKNOWN", f"lineage: {error}", subject, tuple(early))
    except NoSample as error:
        return Report("UNKNOWN", f"{len(ranks)} of {mesh.size} ranks captured: {error}", subject, tuple(early))
    early += unlike_parts(reference.ledger.starts, starts, made.plan.lineage, mesh)
    if (stopped := _stopped(subject, early, (reference, *ranks))) is not None:
        return stopped
    told = _without_conditions(reference, ranks)
    less = made if told is None else pair(*told, mesh, batch, cuts, loss)
    report = verify_programs(less.logical, less.plan, ops, points, seed, progress, engine)
    unread = _without_consequence(report, less.logical)
    if unread and not any(a.startswith("in step") for c in (reference, *ranks) for a in c.assumed):
        one, *others = (replace(c, program=_without_gradients(c.program, unread)) for c in less.captured)
        left = pair(one, others, mesh, batch, cuts, loss)
        again = verify_programs(left.logical, left.plan, ops, points, seed, progress, engine)
        if again.verdict == "PROVED":
            text = f"gradients of {names(sorted(unread))} differ on ranks before the update, and what the step leaves behind does not"
            report = replace(again, notes=(*again.notes, text))
    report = _only_if_reached(report, way, made, ops)
    changed = list(restructured(reference, ranks))
    if changed and report.verdict.startswith("PROVED"):
        report = replace(report, verdict="UNKNOWN", reason=changed[0].message)
    if len(ranks) < mesh.size:
        report = _of_a_sample(report, {c.rank for c in ranks if c.rank is not None}, mesh.size)
    return replace(
        report,
        findings=(*report.findings, *made.findings, *(f for f in (*early, *changed) if f not in made.findings)),
        assumptions=(*_shorter(report.assumptions), *made.assumed),
        notes=(*report.notes, *made.notes),
    )


def _only_if_reached(report: Report, way: Way, made: Pair, ops: OpTable) -> Report:
    """A refutation only where some data leads to it, and where ranks read what the reference does. Findings get their lines."""
    reference, ranks = way.reference, way.ranks
    if report.verdict == "REFUTED" and way.choices and not happens(made.logical, made.plan, ops, way.choices):
        report = replace(report, verdict="UNKNOWN", reason=f"{report.reason}; no data was found that leads there")
    if report.verdict == "REFUTED" and any(c.chosen != reference.chosen for c in ranks):  # other values were read: rounding, or other data
        report = replace(report, verdict="UNKNOWN", reason=f"{report.reason}; ranks and the reference read other values in this run")
    codes = {f.code for f in report.findings if f.severity == "error"}
    if codes == {"TV205"} and any(c.ledger.overlapping for c in ranks):
        text = "messages are waited for after others that were started later: whether ranks wait for each other for ever is not decided"
        report = replace(report, verdict="UNKNOWN", reason=text, findings=())
    errors = [f.message for f in report.findings if f.severity == "error"]
    if errors and all(m.startswith("all_reduce over ") for m in errors):
        text = "ranks call the same collectives, and one of them is translated in other pieces on one rank than on another"
        report = replace(report, verdict="UNKNOWN", reason=f"{text}: {errors[0]}", findings=())
    return replace(report, findings=tuple(_with_line(f, reference.used) for f in report.findings))


def _of_a_sample(report: Report, captured: set[int], world: int) -> Report:
    """A verdict that says of how many ranks it is one. What goes wrong on a rank that is only assumed shows nothing."""
    counted = f"{len(captured)} of {world} ranks captured"
    report = replace(report, findings=(*report.findings, Finding("TV506", counted, severity="warning")))
    if report.verdict == "PROVED":
        return replace(report, verdict="PROVED(sampled)", reason=f"{counted}, nothing is shown of the others; {report.reason}")
    if report.verdict == "PROVED(reduced)":  # neither option alone accepts a proof that is both
        return replace(report, verdict="UNKNOWN", reason=f"{counted}, and what is shown of these is so at reduced sizes; {report.reason}")
    places = [report.place.rank] if report.place is not None else [f.rank for f in report.findings if f.severity == "error"]
    if report.verdict in ("REFUTED", "INVALID") and (not places or any(r is None or r not in captured for r in places)):
        return replace(
            report, verdict="UNKNOWN", reason=f"{counted}, and what differs may be due to what is assumed of others; {report.reason}"
        )
    return replace(report, reason=f"{counted}; {report.reason}")


def _used_alike(ranks: Sequence[Captured]) -> list[Finding]:
    """DDP's gradient of a parameter that a rank does not use depends on whether others do: all must use the same ones."""
    by_rank = {c.rank: c for c in ranks}
    for c in ranks:
        for name, members in c.groups.items():
            found = {tuple(u for g, u in by_rank[m].unused if g == name) for m in members if m in by_rank}
            if len(found) > 1:
                text = "ranks use different parameters (find_unused_parameters): what DDP does then is not followed"
                return [Finding("TV504", text, c.rank, None, None, None, "unsupported")]
    return []


def _losses(reference: Captured, ranks: Sequence[Captured]) -> list[Finding]:
    """A loss that only the reference reports, or only ranks do."""
    has, have = reference.program.output("loss") is not None, any(c.program.output("loss") is not None for c in ranks)
    if has == have:
        return []
    one, other = ("the reference", "those of ranks do not") if has else ("a rank", "that of the reference does not")
    hint = "return the loss from the steps of both, or from neither: then only what the step leaves behind is compared"
    return [Finding("TV307", f"the step of {one} returns a loss, and {other}", None, None, None, hint, "unsupported")]


def _with_line(f: Finding, used: Mapping[str, Any]) -> Finding:
    """Of a gradient that a rank does not have, or a step that it does not count, the line where the reference uses its gradient."""
    if f.code not in ("TV307", "TV508") or f.source is not None:
        return f
    names = [n for n in used if f.message.endswith(f" {n}") or str(f.tensor).startswith(f"{n}.")]
    return replace(f, source=used[names[0]] if names else None)


def _shorter(assumptions: Sequence[str]) -> list[str]:
    """The same about many tensors in one line."""
    many = [a for a in assumptions if a.endswith("holds nonnegative")]
    if len(many) < 3:
        return list(assumptions)
    rest = [a for a in assumptions if a not in many]
    first = many[0].removeprefix("input ").removesuffix(" holds nonnegative")
    return [*rest, f"{len(many)} tensors of optimizer state are not negative: {first} and its like"]


def _stopped(subject: str, findings: Sequence[Finding], captured: Sequence[Captured]) -> Report | None:
    """A verdict that needs no comparison: something is wrong, or something has no meaning here."""
    hidden = any(f.code == "TV505" and f.severity == "unsupported" for f in findings)  # what is missing may be there
    errors = [f for f in findings if f.severity == "error" and not (hidden and f.message.endswith(ABSENT))]
    if errors:
        return Report("INVALID", f"{errors[0].message}" + (f" ({errors[0].source})" if errors[0].source else ""), subject, tuple(findings))
    unsupported = [f for f in findings if f.severity == "unsupported"]
    if not unsupported:
        return None
    counts: Counter[str] = Counter()
    lines: dict[str, Any] = {}
    for c in captured:
        for name, m in c.missing.items():
            counts[name] += m.count
            lines.setdefault(name, m)
    listed = [f"{n} ({c} times, first at {lines[n].source}: {lines[n].reason})" for n, c in counts.most_common(5)]
    first = unsupported[0]
    reason = f"without a mapping: {'; '.join(listed)}" if listed else first.message + (f" ({first.source})" if first.source else "")
    return Report("UNKNOWN", reason, subject, tuple(findings))


__all__ = ["Loss", "Output", "Pair", "by_step", "captures", "judge", "kind_of", "pair", "verify"]
