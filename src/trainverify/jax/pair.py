"""Both programs of a pair: the logical one from a jaxpr on one device, the plan from what runs on every rank of a mesh."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np

from trainverify.graph.lineage import Layout
from trainverify.graph.mesh import Mesh
from trainverify.graph.plan import Plan, Template
from trainverify.graph.program import EMPTY, Domain, Output, Program, Source, refs
from trainverify.graph.types import TensorType
from trainverify.jax.beside import Call
from trainverify.jax.control import CONTROL
from trainverify.jax.corrections import reported
from trainverify.jax.emit import Constant, Fact, RankEmitter
from trainverify.jax.hlo.dump import Partitioned
from trainverify.jax.hlo.run import HloInterpreter
from trainverify.jax.infinities import agrees, covers, exchanged, joined
from trainverify.jax.interpret import Interpreter, Item, Missing
from trainverify.jax.invariants import counted, never_negative_state
from trainverify.jax.meshes import plain
from trainverify.jax.places import Free, Sharded, Spec, as_sharded, layout, local_shape, whole
from trainverify.jax.randomness import Stream, argument_key, draw_domain
from trainverify.jax.replicas import differences
from trainverify.jax.rewrites import rewritten
from trainverify.jax.trace import Argument, Result, Traced
from trainverify.jax.values import DTYPES, Divergent, Key, Opaque, Value
from trainverify.jax.whole import WholeInterpreter
from trainverify.ops import OPS
from trainverify.ops.table import OpTable
from trainverify.translate.emit import Place, Unmapped
from trainverify.translate.groups import joined as joined_groups
from trainverify.translate.integers import RANGES, holds
from trainverify.translate.literals import Literals

COUNTED: Final = 2**24 - 1  # steps: an assumption of the verdict
MOST_PROGRAMS: Final = 256  # that ranks may run different ones of
Meanings = Mapping[str, Callable[..., Any]]


@dataclass(frozen=True)
class Translated:
    """A program, with what has no meaning in it."""

    program: Program
    unknown: tuple[tuple[str, str], ...]  # outputs without a value, and why
    missing: Mapping[str, Missing]
    calls: Mapping[str, int]
    constants: Mapping[str, Constant]
    used: tuple[str, ...] = ()  # meanings
    finite: bool = False  # whether it asks if computed values are finite
    draws: Mapping[str, Stream] = field(default_factory=dict)  # random numbers
    keys: Mapping[str, Key] = field(default_factory=dict)  # results that are random keys
    nonnegative: tuple[str, ...] = ()  # state that is never negative if it starts so, and is not said to be
    noted: Mapping[Any, Call] = field(default_factory=dict)  # calls of primitives, to be run beside their mapping


@dataclass(frozen=True)
class Ranks:
    """The plan, with what has no meaning in it."""

    plan: Plan
    parts: tuple[Translated, ...]
    specs: Mapping[str, Spec]  # how arguments lie
    between: tuple[str, ...]  # primitives that run on whole arrays, outside of shard_map
    moved: tuple[str, ...] = ()  # arguments whose new value lies in another way
    maps: tuple[Source | None, ...] = field(default=(), compare=False)  # the lines of all shard_maps


def argument_type(a: Argument) -> TensorType | None:
    name = str(a.shape.dtype)
    return TensorType(tuple(a.shape.shape), DTYPES[name]) if name in DTYPES else None


def unfollowed(a: Argument) -> Opaque:
    """An argument that is no tensor here: a key, or something without a meaning."""
    return argument_key(a.name, a.shape.dtype, a.shape.shape) or Opaque(f"argument {a.name} of type {a.shape.dtype}")


def _alone(arguments: Sequence[Argument]) -> None:
    """Refuse an argument that has the name of one of several keys, "rng[0]" beside keys "rng": keys are known by their names only."""
    found = Counter(a.name for a in arguments)
    for a in arguments:
        key = argument_key(a.name, a.shape.dtype, a.shape.shape)
        found.update({n.partition("#")[0] for n in key.names} - {a.name} if key is not None else ())
    if twice := [n for n, count in found.items() if count > 1]:
        raise Unmapped(f"{twice[0]} is an argument, and one of several random keys: give one of them another name")


def _sources(e: RankEmitter, arguments: Sequence[Argument]) -> None:
    e.reserved.update(a.name for a in arguments)  # ranks declare them where they are used first
    _alone(arguments)
    for a in arguments:
        if a.domain is None and "int" in str(a.shape.dtype) and str(a.shape.dtype) in DTYPES:
            raise Unmapped(f"argument {a.name} holds integers: say which, with tvj.Ids(shape, below) or tvj.Count()")
        if a.domain is not None and a.domain.kind == "ids" and a.domain.size is not None:
            e.bounds[a.name] = 0, a.domain.size - 1
            if str(a.shape.dtype) in DTYPES and not holds(DTYPES[str(a.shape.dtype)], e.bounds[a.name]):
                raise Unmapped(f"{a.name}: ids below {a.domain.size} as {a.shape.dtype}")
        elif a.domain is not None and a.domain.kind == "nonnegative":
            widest = RANGES.get(DTYPES.get(str(a.shape.dtype), ""), (0, COUNTED + 1))[1]
            e.bounds[a.name] = 0, min(COUNTED, widest - 1)
            e.nonnegative.add(a.name)


def _program(e: RankEmitter, name: str, arguments: Sequence[Argument], outputs: Sequence[Output]) -> Program:
    """The finished program; arrays that the code closes over are inputs of it."""
    inputs = [*(a.name for a in arguments if a.kind == "input"), *e.constants, *e.draws]
    parameters = [a.name for a in arguments if a.kind == "parameter"]
    state = [a.name for a in arguments if a.kind == "state"]
    domains = {a.name: a.domain for a in arguments if a.domain is not None}
    domains |= {n: d for n in e.draws if (d := draw_domain(e, n)) is not None}
    for n, c in e.constants.items():
        if e.tensors[n].kind == "int":
            most, least = (int(c.data.max()), int(c.data.min())) if c.data.size else (0, 0)
            domains[n] = Domain("ids", most + 1) if least >= 0 else Domain("nonnegative")
    return _with_phases(e.program(name, inputs, parameters, state, outputs, domains))


def _with_phases(program: Program) -> Program:
    """What is neither differentiated nor a derivative, after the last derivative, is the optimizer's."""
    last = max((n for n, op in enumerate(program.ops) if op.phase == "backward"), default=None)
    if last is None:
        return program
    ops = tuple(replace(op, phase="optimizer") if n > last and op.phase == "forward" else op for n, op in enumerate(program.ops))
    return replace(program, ops=ops)


def logical_program(
    traced: Traced,
    ops: OpTable = OPS,
    literal: Literals | None = None,
    meanings: Meanings | None = None,
    streams: Mapping[str, int] = EMPTY,
) -> Translated:
    """The step on one device."""
    e = RankEmitter(Mesh(), (0,), ops, rewritten=rewritten)
    e.streams = streams
    _sources(e, traced.arguments)
    i = Interpreter(e, literal or Literals(), CONTROL, meanings=meanings)
    given: list[Item] = []
    for a in traced.arguments:
        kind = argument_type(a)
        given.append(unfollowed(a) if kind is None else e.declare(a.name, kind))
    found = i.closed(traced.jaxpr, given)
    outputs, unknown = _outputs(e, traced.results, found)
    if not unknown:  # else there is no verdict
        counted(e, traced.arguments, outputs)
    held = never_negative_state(e, traced.arguments, outputs)
    outputs += reported(e)
    program = _program(e, "the reference", _declared(e, traced.arguments), outputs)
    return replace(_translated(i, program, unknown), nonnegative=held)


def _translated(i: Interpreter, program: Program, unknown: Sequence[tuple[str, str]]) -> Translated:
    e, used = i.e, tuple(sorted(i.used))
    calls, keys = e.kept.get("calls", {}), e.kept.get("keys", {})
    return Translated(program, tuple(unknown), i.missing, Counter(i.calls), e.constants, used, "finite" in e.kept, e.draws, keys, (), calls)


def _declared(e: RankEmitter, arguments: Sequence[Argument]) -> list[Argument]:
    return [a for a in arguments if a.name in e.tensors]


def _outputs(e: RankEmitter, results: Sequence[Result], found: Sequence[Item]) -> tuple[list[Output], list[tuple[str, str]]]:
    outputs: list[Output] = []
    unknown: list[tuple[str, str]] = []
    for r, value in zip(results, found, strict=True):
        shown = str(Output("", r.role, r.of))
        if isinstance(value, Key):
            e.kept.setdefault("keys", {})[shown] = value
            continue
        if isinstance(value, Opaque):
            unknown.append((shown, value.reason))
            continue
        assert not isinstance(value, Free | Sharded)
        try:
            outputs.append(Output(e.tensor(value), r.role, r.of))
        except Unmapped as error:
            unknown.append((shown, str(error)))
    return outputs, unknown


def ranks_plan(
    traced: Traced,
    mesh: Mesh,
    lengths: Sequence[int] = (),
    ops: OpTable = OPS,
    literal: Literals | None = None,
    meanings: Meanings | None = None,
    facts: Mapping[str, Fact] | None = None,
    streams: Mapping[str, int] = EMPTY,
) -> Ranks:
    """What every rank of the mesh runs. Ranks that go different ways run programs of their own."""
    todo: list[tuple[int, ...]] = [tuple(range(mesh.size))]
    hints: dict[str, Spec] = {}
    done: list[tuple[Template, Translated, WholeInterpreter, dict[str, tuple[int, ...]], tuple[str, ...]]] = []
    literal = literal or Literals()
    while todo:
        ranks = todo.pop(0)
        if len(todo) + len(done) > MOST_PROGRAMS:
            raise Unmapped(f"ranks run more than {MOST_PROGRAMS} different programs")
        try:
            made = _unit(traced, mesh, ranks, lengths, ops, literal, meanings, hints, facts, streams)
            if not hints and made[2].hints:  # results that show how arguments lie that only whole arrays are made of
                hints = made[2].hints
                made = _unit(traced, mesh, ranks, lengths, ops, literal, meanings, hints, facts, streams)
            done.append(made)
        except Divergent as error:
            answers = np.broadcast_to(error.answers, (len(ranks),))
            todo += [tuple(r for r, v in zip(ranks, answers, strict=True) if v == k) for k in sorted(set(answers.tolist()))]
    if (worse := _worse([made[2].e for made in done])) is not None:
        return ranks_plan(traced, mesh, lengths, ops, literal, meanings, worse, streams)
    groups = joined_groups(g for *_, g, _ in done)
    first = done[0][2]
    lineage: list[Layout] = [layout(n, n, s, mesh) for n, s in first.lies.items()]
    lineage += [
        layout(n, n, ((),) * c.data.ndim, mesh) for n, c in sorted({k: v for _, t, *_ in done for k, v in t.constants.items()}.items())
    ]
    plan = Plan("the ranks", plain(mesh), tuple(t for t, *_ in done), groups, tuple(lineage))
    parts = tuple(t for _, t, *_ in done)
    return Ranks(plan, parts, first.lies, tuple(sorted(first.cuts)), done[0][4], tuple(first.maps))


def _closed_over(parts: Sequence[Translated], mesh: Mesh) -> list[Layout]:
    """Arrays that the code closes over lie whole on every rank."""
    ranks = {n: c.data.ndim for p in parts for n, c in p.constants.items()}
    return [layout(n, n, ((),) * rank, mesh) for n, rank in sorted(ranks.items())]


def _worse(emitters: Sequence[RankEmitter]) -> dict[str, Fact] | None:
    """What has to be taken for granted about values that ranks with other programs send; None if what was taken for granted holds."""
    if len(emitters) == 1:
        return None
    traffic = [exchanged(e) for e in emitters]
    facts = joined(traffic)
    assumed = emitters[0].facts
    alike = assumed is None and all(agrees(e, t, facts) for e, t in zip(emitters, traffic, strict=True))
    if alike or (assumed is not None and covers(assumed, facts)):
        return None
    return facts if assumed is None else joined([facts, assumed])


def _unit(
    traced: Traced,
    mesh: Mesh,
    ranks: tuple[int, ...],
    lengths: Sequence[int],
    ops: OpTable,
    literal: Literals,
    meanings: Meanings | None,
    hints: Mapping[str, Spec],
    facts: Mapping[str, Fact] | None,
    streams: Mapping[str, int],
) -> tuple[Template, Translated, WholeInterpreter, dict[str, tuple[int, ...]], tuple[str, ...]]:
    """The program of ranks that go the same way."""
    e = RankEmitter(mesh, ranks, ops, lengths, rewritten)
    e.streams = streams
    e.facts = facts
    _sources(e, traced.arguments)
    i = WholeInterpreter(e, literal, CONTROL, meanings=meanings, hints=hints)
    given: list[Item] = []
    for a in traced.arguments:
        kind = argument_type(a)
        given.append(unfollowed(a) if kind is None else Free(a.name, kind))
    found = i.closed(traced.jaxpr, given)
    for item in given:  # an argument without a use still has a place
        if isinstance(item, Free):
            i.placed(item)
    if i.maps and i.maps[-1] is not None:
        e.place = Place(i.maps[-1])
    values, moved = _landed(i, traced, found)
    outputs, unknown = _outputs(e, traced.results, values)
    outputs += [*_as_cut(e, traced.results, found, moved), *reported(e), *differences(e)]
    program = _program(e, "rank", _declared(e, traced.arguments), outputs)
    bindings = {n: c for c, n in e.columns.items()}
    used = {n for op in program.ops for _, v in op.attrs for n in (r.name for r in refs(v))}
    template = Template(program, ranks, {n: c for n, c in bindings.items() if n in used})
    return template, _translated(i, program, unknown), i, e.groups, moved


def _landed(i: WholeInterpreter, traced: Traced, found: Sequence[Item]) -> tuple[list[Value], tuple[str, ...]]:
    """Results where they are compared: new values as the old ones lie, everything else whole on every rank."""
    values: list[Value] = []
    moved: list[str] = []
    for r, item in zip(traced.results, found, strict=True):
        value = i.placed(item)
        if isinstance(value, Opaque):
            values.append(value)
        elif r.role in ("parameter", "state", "gradient") and r.of in i.lies:
            if isinstance(value, Sharded) and value.spec != i.lies[r.of]:
                moved.append(str(r.of))
                if r.of not in i.mapped:
                    i.hints[r.of] = value.spec
            values.append(as_sharded(i.e, value, i.lies[r.of], trusted=True))
        elif isinstance(value, Sharded):
            values.append(whole(i.e, value, trusted=True))  # compared on every rank
        else:
            values.append(value)
    return values, tuple(moved)


def _as_cut(e: RankEmitter, results: Sequence[Result], found: Sequence[Item], moved: Sequence[str]) -> Iterator[Output]:
    """New values that lie in another way than the old ones: every rank's version of the whole array is compared."""
    for r, value in zip(results, found, strict=True):
        if r.of in moved and isinstance(value, Sharded):
            yield Output(e.tensor(whole(e, value, trusted=True)), "metric", all_of(str(r.of)))


def all_of(name: str) -> str:
    return f"the whole new {name}"


def partitioned_plan(
    traced: Traced,
    made: Partitioned,
    mesh: Mesh,
    lengths: Sequence[int] = (),
    ops: OpTable = OPS,
    literal: Literals | None = None,
    facts: Mapping[str, Fact] | None = None,
) -> Ranks:
    """What XLA runs on every device, after SPMD partitioning."""
    if made.module.partitions != mesh.size:
        raise Unmapped(f"XLA made {made.module.partitions} partitions for {mesh}")
    todo: list[tuple[int, ...]] = [tuple(range(mesh.size))]
    done: list[tuple[Template, Translated, HloInterpreter]] = []
    while todo:
        ranks = todo.pop(0)
        if len(todo) + len(done) > MOST_PROGRAMS:
            raise Unmapped(f"ranks run more than {MOST_PROGRAMS} different programs")
        try:
            done.append(_partition(traced, made, mesh, ranks, lengths, ops, literal or Literals(), facts))
        except Divergent as error:
            answers = np.broadcast_to(error.answers, (len(ranks),))
            todo += [tuple(r for r, v in zip(ranks, answers, strict=True) if v == k) for k in sorted(set(answers.tolist()))]
    if (worse := _worse([i.e for *_, i in done])) is not None:
        return partitioned_plan(traced, made, mesh, lengths, ops, literal, worse)
    groups = joined_groups(i.e.groups for *_, i in done)
    specs = {a.name: s for a, s in zip(traced.arguments, made.inputs, strict=True)}
    lineage = [layout(n, n, s, mesh) for n, s in specs.items() if n in done[0][0].program.tensors]
    lineage += [
        layout(n, n, ((),) * c.data.ndim, mesh) for n, c in sorted({k: v for _, t, _ in done for k, v in t.constants.items()}.items())
    ]
    plan = Plan("the partitions", plain(mesh), tuple(t for t, *_ in done), groups, tuple(lineage))
    return Ranks(plan, tuple(t for _, t, _ in done), specs, (), moved_results(traced, made))


def moved_results(traced: Traced, made: Partitioned) -> tuple[str, ...]:
    """Arguments whose new value lies in another way."""
    specs = {a.name: s for a, s in zip(traced.arguments, made.inputs, strict=True)}
    return tuple(str(r.of) for r, s in zip(traced.results, made.outputs, strict=True) if r.of in specs and s != specs[str(r.of)])


def _partition(
    traced: Traced,
    made: Partitioned,
    mesh: Mesh,
    ranks: tuple[int, ...],
    lengths: Sequence[int],
    ops: OpTable,
    literal: Literals,
    facts: Mapping[str, Fact] | None,
) -> tuple[Template, Translated, HloInterpreter]:
    e = RankEmitter(mesh, ranks, ops, lengths, rewritten)
    e.facts = facts
    _sources(e, traced.arguments)
    i = HloInterpreter(e, literal, {})
    given: list[Value] = []
    for a, spec in zip(traced.arguments, made.inputs, strict=True):
        kind = argument_type(a)
        if kind is None:
            given.append(unfollowed(a))
        else:
            given.append(e.declare(a.name, TensorType(local_shape(kind.shape, spec, mesh), kind.dtype)))
    found = i.entry(made.module, given)
    specs = dict(zip((a.name for a in traced.arguments), made.inputs, strict=True))
    values: list[Value] = []
    cut = [Sharded(v, s, tuple(a.shape)) for v, s, a in zip(found, made.outputs, traced.jaxpr.out_avals, strict=True)]
    for r, value, part in zip(traced.results, found, cut, strict=True):
        wanted = specs.get(str(r.of)) if r.role in ("parameter", "state", "gradient") else None
        values.append(value if isinstance(value, Opaque) else as_sharded(e, part, wanted or ((),) * len(part.shape)))
    outputs, unknown = _outputs(e, traced.results, values)
    known = [c for c in cut if not isinstance(c.local, Opaque)]
    outputs += [*(_as_cut(e, traced.results, cut, moved_results(traced, made)) if len(known) == len(cut) else ()), *reported(e)]
    program = _program(e, "partition", _declared(e, traced.arguments), outputs)
    used = {n for op in program.ops for _, v in op.attrs for n in (r.name for r in refs(v))}
    template = Template(program, ranks, {n: c for c, n in e.columns.items() if n in used})
    return template, _translated(i, program, unknown), i


def with_whole(program: Program, moved: Sequence[str]) -> Program:
    """The logical program, with new values reported once more that ranks hold in another way than the old ones."""
    more = [Output(o.tensor, "metric", all_of(str(o.of))) for o in program.outputs if o.of in moved and o.role != "metric"]
    return replace(program, outputs=(*program.outputs, *more))


def with_constants(program: Program, parts: Sequence[Translated]) -> Program:
    """A program, with arrays as inputs that only other programs close over."""
    more = {n: p.program for p in parts for n in (*p.constants, *p.draws) if n not in program.tensors}
    tensors = {**program.tensors, **{n: p.tensors[n] for n, p in more.items()}}
    domains = {**program.domains, **{n: p.domains[n] for n, p in more.items() if n in p.domains}}
    return replace(program, tensors=tensors, inputs=(*program.inputs, *more), domains=domains)


def with_all_constants(plan: Plan, parts: Sequence[Translated]) -> Plan:
    """The same of all ranks' programs."""
    lying = {x.logical for x in plan.lineage}
    ranks = {n: len(p.program.tensors[n].shape) for p in parts for n in (*p.constants, *p.draws) if n not in lying}
    lineage = (*plan.lineage, *(layout(n, n, ((),) * rank, plan.mesh) for n, rank in sorted(ranks.items())))
    return replace(plan, templates=tuple(replace(t, program=with_constants(t.program, parts)) for t in plan.templates), lineage=lineage)


def lengths_of(program: Program) -> list[int]:
    """Of ranges that start at 0."""
    return [int(op.get("stop")) for op in program.ops if op.name == "arange" and op.get("start", 0) == 0 and op.get("step", 1) == 1]


__all__ = [
    "Ranks",
    "Translated",
    "lengths_of",
    "logical_program",
    "partitioned_plan",
    "ranks_plan",
    "with_all_constants",
    "with_constants",
    "with_whole",
]
