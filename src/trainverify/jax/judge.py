"""`verify`: trace the step on one device and the one that the ranks run, translate both, and let the verifier compare them."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

from jax.extend.core import jaxprs_in_params

from trainverify.check.findings import Finding, names
from trainverify.graph.mesh import Mesh
from trainverify.graph.plan import Plan
from trainverify.graph.program import Program, Source
from trainverify.jax.beside import Beside
from trainverify.jax.beside import run as run_beside
from trainverify.jax.content import with_content
from trainverify.jax.corrections import in_all
from trainverify.jax.devices import Question, answered, questions, unanswered
from trainverify.jax.effects import side_effects
from trainverify.jax.hlo.dump import Partitioned, partitioned
from trainverify.jax.invariants import declared
from trainverify.jax.literals import Float32Literals
from trainverify.jax.meanings import MEANINGS
from trainverify.jax.meshes import abstract, of_context, our_mesh, real_mesh, within
from trainverify.jax.pair import (
    Meanings,
    Ranks,
    Translated,
    lengths_of,
    logical_program,
    partitioned_plan,
    ranks_plan,
    with_all_constants,
    with_constants,
    with_whole,
)
from trainverify.jax.randomness import streams_of
from trainverify.jax.replicas import is_difference, with_none
from trainverify.jax.roundings import is_large, only_rounded
from trainverify.jax.shrink import smaller
from trainverify.jax.steps import LATER
from trainverify.jax.trace import Traced, TraceError, argument_names, trace
from trainverify.ops import OPS
from trainverify.ops.table import OpTable
from trainverify.prove.attempt import Engine
from trainverify.report import Report
from trainverify.translate.emit import Unmapped
from trainverify.translate.targets import CaptureError
from trainverify.verdicts import verify as verify_programs

Progress = Callable[[str], None]
Reader = Literal["jaxpr", "hlo"]


def _silent(text: str) -> None:
    pass


@dataclass(frozen=True)
class Pair:
    """Both programs, with what is to be said about them."""

    logical: Program
    plan: Plan
    reference: Traced
    distributed: Traced
    parts: tuple[Translated, ...]  # of the reference, then of every program that ranks run
    ranks: Ranks
    findings: tuple[Finding, ...] = ()
    assumed: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    mesh: Mesh | None = None  # with the names that the user gave its axes


def takes_mesh(fn: Callable[..., Any]) -> bool:
    """Whether a function makes the step for a mesh, rather than being the step."""
    try:
        return [p.name for p in inspect.signature(fn).parameters.values()] == ["mesh"]
    except (TypeError, ValueError):
        return False


def mesh_of(jaxpr: Any) -> Mesh | None:
    """The mesh of the first shard_map."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "shard_map":
            return Mesh(dict(eqn.params["mesh"].shape))
        for inner in jaxprs_in_params(eqn.params):
            if (found := mesh_of(inner)) is not None:
                return found
    return None


def traced(who: str, fn: Callable[..., Any], args: Sequence[Any], roles: Sequence[str] | None, heads: Sequence[str]) -> Traced:
    try:
        return trace(fn, args, roles, heads)
    except TraceError as error:
        raise CaptureError(f"{who}: {error}") from error
    except Unmapped as error:
        raise Unmapped(f"{who}: {error}") from error
    except Exception as error:  # whatever the user's code or JAX raises
        raise CaptureError(f"{who}: JAX does not trace it: {type(error).__name__}: {error}") from error


def made_for(maker: Callable[..., Any], mesh: Mesh, real: bool) -> Callable[..., Any]:
    """The step that a function of a mesh makes."""
    given = real_mesh(mesh) if real else abstract(mesh)
    try:
        step = maker(given)
    except CaptureError:
        raise
    except Exception as error:  # whatever the user's code or JAX raises
        hint = "" if real else "; the mesh has no devices here, with --hlo (reader='hlo') it has those of the host"
        raise CaptureError(f"the function of the mesh raises {type(error).__name__}: {error}{hint}") from error
    if not callable(step):
        raise CaptureError(f"the function of the mesh returns {type(step).__name__}, not a step")
    return cast(Callable[..., Any], step)


@dataclass(frozen=True)
class _Steps:
    """Both steps as they were traced, and what their code asked about devices meanwhile."""

    reference: Traced
    distributed: Traced
    step: Callable[..., Any]  # the distributed one
    mesh: Mesh
    asked: tuple[Question, ...]


def _both_traced(
    reference: Callable[..., Any],
    distributed: Callable[..., Any],
    args: Sequence[Any],
    named: Mesh | None,
    roles: Sequence[str] | None,
    reader: Reader,
) -> _Steps:
    real = reader == "hlo"
    heads = argument_names(reference, len(args))  # of both: their arguments belong together by position
    with questions() as asked:
        # before the other one is made: that may change what both read
        one = within(named, real, lambda: traced("the reference", reference, args, roles, heads))
        if takes_mesh(distributed):
            if named is None:
                raise CaptureError("the distributed function takes a mesh: say mesh={'dp': 2}")
            distributed = made_for(distributed, named, real)
        many = within(named, real, lambda: traced("the distributed step", distributed, args, roles, heads))
    mapped = mesh_of(many.jaxpr.jaxpr)
    if reader == "jaxpr" and mapped is None:
        raise CaptureError(
            "the distributed step has no shard_map: what its devices run is XLA's choice; read that with --hlo (reader='hlo')"
        )
    named = named or mapped
    if named is None:
        raise CaptureError("no mesh was given, and the distributed step has no shard_map that says it")
    return _Steps(one, many, distributed, named, tuple(asked))


def pair(
    reference: Callable[..., Any],
    distributed: Callable[..., Any],
    args: Sequence[Any],
    mesh: Any = None,
    roles: Sequence[str] | None = None,
    ops: OpTable = OPS,
    meanings: Meanings | None = None,
    progress: Progress = _silent,
    reader: Reader = "jaxpr",
) -> Pair:
    """The logical program and the plan."""
    progress("tracing")
    steps = _both_traced(reference, distributed, args, our_mesh(mesh) if mesh is not None else of_context(), roles, reader)
    one, many, named, real = steps.reference, steps.distributed, steps.mesh, reader == "hlo"
    literal, meanings = Float32Literals(), {**MEANINGS, **(meanings or {})}
    if reader == "hlo":
        progress("compiling")
        partitions = within(named, real, lambda: compiled(steps.step, args, named))
    progress("translating")
    logical = logical_program(one, ops, literal, meanings)
    one, many = declared(one, logical.nonnegative), declared(many, logical.nonnegative)
    logical = logical_program(one, ops, literal, meanings) if logical.nonnegative else logical
    findings = [*_unlike(one, many), *unanswered(steps.asked, named), *side_effects("the reference", one.jaxpr.jaxpr, meanings)]
    findings += side_effects("the distributed step", many.jaxpr.jaxpr, meanings)
    lengths = lengths_of(logical.program)
    if reader == "hlo":
        ranks = partitioned_plan(many, partitions, named, lengths, ops, literal)
    else:
        ranks = ranks_plan(many, named, lengths, ops, literal, meanings)
        if longest := streams_of(p.draws for p in (logical, *ranks.parts)):
            logical = logical_program(one, ops, literal, meanings, longest)
            ranks = ranks_plan(many, named, lengths, ops, literal, meanings, None, longest)
    parts = (logical, *ranks.parts)
    whole = with_whole(with_constants(logical.program, ranks.parts), ranks.moved)
    line = next((m for m in ranks.maps if m is not None), None)
    findings += [*_moved(ranks.moved, line), *_unknown(parts), *_other_keys(logical, ranks.parts)]
    progress("running every call beside its mapping")
    beside = run_beside({k: c for p in parts for k, c in p.noted.items()}, smaller)
    findings += _differing(beside.differs)
    whole = with_none(whole, [p.program for p in ranks.parts])
    whole, plan = in_all(whole, with_all_constants(ranks.plan, parts))
    return Pair(
        *(whole, plan, one, many, parts, ranks, tuple(findings)),
        assumed=(*_assumed(many, parts), *answered(steps.asked)),
        notes=(*_notes(parts, ranks, literal), *_run_notes(beside)),
        mesh=named,
    )


def _moved(names: Iterable[str], line: Source | None) -> list[Finding]:
    text = "{} comes out cut otherwise than it went in"
    return [Finding("TV510", text.format(n), None, n, line, "out_specs that are the in_specs", "warning") for n in names]


def _differing(calls: Iterable[tuple[str, str]]) -> list[Finding]:
    text = "{} is not translated to what JAX computes: {}"
    return [Finding("TV504", text.format(*c), None, None, None, None, "unsupported") for c in calls]


def compiled(step: Callable[..., Any], args: Sequence[Any], mesh: Mesh) -> Partitioned:
    try:
        return partitioned(step, args, mesh)
    except (CaptureError, Unmapped):
        raise
    except Exception as error:  # whatever JAX or XLA raises
        raise CaptureError(f"the distributed step: XLA does not compile it: {type(error).__name__}: {error}") from error


def _unlike(one: Traced, many: Traced) -> list[Finding]:
    """Arguments and results that are not those of the reference."""
    found = []
    known = {r: n for n, r in enumerate(many.results)}
    order = [known[r] for r in one.results] if known.keys() == set(one.results) else range(len(many.results))
    results = [many.jaxpr.out_avals[n] for n in order]
    for what, a, b in (("argument", one.jaxpr.in_avals, many.jaxpr.in_avals), ("result", one.jaxpr.out_avals, results)):
        if len(a) != len(b):
            found.append(Finding("TV509", f"{len(b)} {what}s, the reference has {len(a)}"))
            continue
        for k, (x, y) in enumerate(zip(a, b, strict=True)):
            if x.shape != y.shape or x.dtype != y.dtype:
                name = many.arguments[k].name if what == "argument" else str(one.results[k].of or one.results[k].role)
                found.append(Finding("TV509", f"{what} {name} is {y.str_short()}, in the reference {x.str_short()}", None, name))
    return found


def _unknown(parts: Sequence[Translated]) -> list[Finding]:
    found = []
    for part in parts:
        if not part.unknown:
            continue
        for name, m in part.missing.items():
            found.append(Finding("TV504", f"{name} ({m.count} times): {m.reason}", None, None, m.source, None, "unsupported"))
        output, why = part.unknown[0]
        found.append(Finding("TV504", f"{output} has no value: {why}", None, None, None, None, "unsupported"))
    return list(dict.fromkeys(found))


def _other_keys(logical: Translated, ranks: Sequence[Translated]) -> list[Finding]:
    """Results that are keys have no numbers to compare: they have to be derived in the same way."""
    wrong = [n for n, key in logical.keys.items() if any(p.keys.get(n) != key for p in ranks)]
    return [Finding("TV504", f"{n}: a random key that ranks derive otherwise", None, None, None, None, "unsupported") for n in wrong]


def _assumed(many: Traced, parts: Sequence[Translated]) -> tuple[str, ...]:
    integers = any(p.program.tensors[o].kind == "int" for p in parts for op in p.program.ops for o in op.outputs if op.inputs)
    found = ["integers of 32 and 64 bits that depend on data, or are made of real numbers, do not wrap around"] if integers else []
    if any(p.constants for p in parts):
        found.append("arrays that the code closes over are inputs, the same wherever their content is")
    if any(a.domain is not None and a.domain.kind == "nonnegative" and a.shape.dtype.kind in "iu" for a in many.arguments):
        found.append("integers that count steps stay below 2^24")
    if any(p.finite for p in parts):
        found.append("computed values are finite: isfinite of them is true")
    if kinds := sorted({n.partition(".")[0].partition("(")[0] for p in parts for n in p.draws}):
        shown = names(kinds)
        found.append(f"random numbers ({shown}) are the same wherever key, type and shape are the same, and otherwise unrelated")
    if many.donated:
        found.append(f"donated: {names(list(many.donated))}; no one reads the old arrays after the step")
    found += [f"declared: {n} computes what the function given for it computes" for n in sorted({u for p in parts for u in p.used})]
    return tuple(found)


def _notes(parts: Sequence[Translated], ranks: Ranks, literal: Float32Literals) -> tuple[str, ...]:
    found = [f"literals that count as one: {m}" for m in literal.merged()]
    if taken := literal.taken():
        found.append(f"literals: {names(taken)}")
    if ranks.between:
        found.append(f"outside of shard_map on whole arrays (how XLA cuts them is its choice): {names(list(ranks.between))}")
    left = sorted({n for p in parts if not p.unknown for n in p.missing})
    if left:
        found.append(f"left out, as no result depends on it: {names(left)}")
    if keys := [n for n, key in parts[0].keys.items() if all(p.keys.get(n) == key for p in parts)]:
        found.append(f"random keys that are derived in the same way: {names(keys)}")
    found.append(LATER)
    found.append("what XLA makes of the program (fusion, combined collectives) is not covered")
    return tuple(found)


def _run_notes(beside: Beside) -> list[str]:
    found = [f"{beside.agreed} distinct calls of primitives agree with JAX on random values"]
    if beside.unchecked:
        shown = [f"{call}: {why}" for call, why in beside.unchecked[:8]]
        more = [f"and {len(beside.unchecked) - 8} more"] if len(beside.unchecked) > 8 else []
        found.append(f"not run beside JAX: {'; '.join([*shown, *more])}")
    return found


def verify(
    reference: Callable[..., Any],
    distributed: Callable[..., Any],
    args: Sequence[Any],
    mesh: Any = None,
    roles: Sequence[str] | None = None,
    *,
    ops: OpTable = OPS,
    meanings: Meanings | None = None,
    points: int = 3,
    seed: int = 0,
    engine: Engine = "algebra",
    progress: Progress = _silent,
    reader: Reader = "jaxpr",
) -> Report:
    """Is the step that the devices of a mesh run the reference's? Both are functions of whole arrays; shapes are enough.

    `distributed` contains shard_map, or is a function of `mesh` that makes such a step. `roles` says what each result is: loss, metric,
    parameters, state or gradients; by default a result with the structure of an argument is its new value, and a scalar the loss.
    With `reader="hlo"` the step is compiled for host devices, and the plan is XLA's program after SPMD partitioning.
    """
    try:
        made = pair(reference, distributed, args, mesh, roles, ops, meanings, progress, reader)
    except Unmapped as error:
        return Report("UNKNOWN", str(error), "the traced step against the reference")
    return judge(made, ops, points, seed, engine, progress)


def judge(
    made: Pair, ops: OpTable = OPS, points: int = 3, seed: int = 0, engine: Engine = "algebra", progress: Progress = _silent
) -> Report:
    subject = f"{made.plan.name} on {made.plan.mesh} against {made.logical.name}"
    stopped = _stopped(subject, made)
    if stopped is not None:
        return stopped
    report = verify_programs(made.logical, made.plan, ops, points, seed, progress, engine)
    report = with_content(_without_replicas(report), made.logical, made.plan, made.parts, ops)
    report = _with_line(_with_roundings(report, made, ops), made.plan)
    return replace(
        report,
        findings=(*report.findings, *made.findings),
        assumptions=(*report.assumptions, *made.assumed),
        notes=(*report.notes, *made.notes),
    )


def _with_line(report: Report, plan: Plan) -> Report:
    """A literal, or an input, stands where it is used first."""
    place = report.place
    if place is None or place.line is not None:
        return report
    for t in plan.templates:
        if place.rank in t.ranks:
            used = next((op for op in t.program.ops if place.tensor in op.inputs and op.source is not None), None)
            if used is not None:
                op = None if place.op is None else replace(place.op, source=used.source)
                return replace(report, place=replace(place, op=op, used=used.source))
    return report


def _without_replicas(report: Report) -> Report:
    """Where replicas differ nothing is certain about what is made of them: which of them XLA uses is its choice."""
    if report.verdict != "REFUTED" or not any(is_difference(o.name) and o.status == "different" for o in report.obligations):
        return report
    return replace(report, verdict="UNKNOWN", reason="results of a shard_map with check_vma=False that are called replicated differ")


def _with_roundings(report: Report, made: Pair, ops: OpTable) -> Report:
    """A difference that float32 literals explain is none."""
    d = report.difference
    if report.verdict != "REFUTED" or d is None or is_large(d.got, d.want, d.gap) or not only_rounded(made.logical, made.plan, ops):
        return report
    return replace(report, verdict="UNKNOWN", reason=f"literal rounding: {report.reason} by no more than float32 literals explain")


def _stopped(subject: str, made: Pair) -> Report | None:
    """A verdict that needs no comparison: something is wrong, or something has no meaning here."""
    errors = [f for f in made.findings if f.severity == "error"]
    if errors:
        return Report("INVALID", errors[0].message, subject, made.findings, assumptions=made.assumed, notes=made.notes)
    if not any(f.severity == "unsupported" for f in made.findings):
        return None
    counts: Counter[str] = Counter()
    first: dict[str, Any] = {}
    for p in made.parts:
        if p.unknown:
            for name, m in p.missing.items():
                counts[name] += m.count
                first.setdefault(name, m)
    listed = [f"{n} ({c} times, first at {first[n].source}: {first[n].reason})" for n, c in counts.most_common(5)]
    unknown = next((f"{u[0]} has no value: {u[1]}" for p in made.parts for u in p.unknown), None)
    differs = next(f.message for f in made.findings if f.severity == "unsupported")
    reason = f"without a mapping: {'; '.join(listed)}" if listed else unknown or differs
    return Report("UNKNOWN", reason, subject, made.findings, assumptions=made.assumed, notes=made.notes)


__all__ = ["Pair", "judge", "pair", "verify"]
