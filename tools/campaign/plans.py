"""A random correct plan of a training step, made by walking the completed program op by op.

Every logical tensor has a `Spread`: which mesh axes cut which of its dimensions, over which axes it is a share of a sum.
For every op a strategy is drawn among those that its rule allows, what does not fit is moved by collectives drawn at
random, and the op is emitted on local tensors; forward, backward and optimizer ops alike. Micro-batches are an axis like
the others whose positions one rank works through in turn: its collectives are additions, joins and slices. With a
pipeline axis every op has a stage, and what another stage needs is sent.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Final

from tools.campaign.rules import Rule, rule
from trainverify.build.plan import PlanBuilder, RankBuilder
from trainverify.build.tape import Tensor
from trainverify.graph.lineage import Form, Pattern, Placements, Shard
from trainverify.graph.mesh import Mesh
from trainverify.graph.plan import Plan, Template, expand, fold
from trainverify.graph.program import Op, Output, Program
from trainverify.ops.table import GRAD

MICRO: Final = "mb"
STAGE: Final = "pp"
Cuts = tuple[tuple[str, ...], ...]  # per dimension, the axes that cut it, the outermost first


@dataclass(frozen=True)
class Spread:
    cuts: Cuts
    partial: tuple[tuple[str, str], ...] = ()  # (axis, "sum" or "max")

    @property
    def axes(self) -> set[str]:
        return {a for c in self.cuts for a in c} | {a for a, _ in self.partial}

    def cut(self, dim: int, axes: tuple[str, ...]) -> Spread:
        return replace(self, cuts=(*self.cuts[:dim], axes, *self.cuts[dim + 1 :]))

    def without(self, axis: str) -> Spread:
        return replace(self, partial=tuple(p for p in self.partial if p[0] != axis))


def whole(ndim: int) -> Spread:
    return Spread(((),) * ndim)


@dataclass
class Value:
    """A logical tensor on the mesh: its local tensors by stage and micro-batch (one entry if not cut by micro-batches)."""

    name: str
    shape: tuple[int, ...]
    spread: Spread
    at: dict[int, list[Tensor]]


@dataclass(frozen=True)
class Setting:
    """What kind of plan to draw."""

    mesh: Mesh
    micro: int = 1
    keep: float = 6.0  # how much a strategy that moves nothing is preferred
    declared: float = 0.0  # share of intermediate tensors whose lineage is declared
    style: str = "template"  # or "fold", "ranks": how rank programs are stored

    @property
    def family(self) -> str:
        """Whether a dimension may be cut in ways that have no common refinement."""
        sizes = {s for n, s in self.mesh.axes if n != STAGE} | ({self.micro} if self.micro > 1 else set())
        return "one size" if len(sizes) == 1 else "several sizes"


def setting(rng: random.Random) -> Setting:
    """Three times of four all axes have one size: a dimension cut in two ways is then cut in compatible ways."""
    names = rng.sample(["dp", "tp", "sp", "ep"], rng.choice([1, 1, 2, 2, 3]))
    same = rng.choice([2, 2, 2, 3, 4]) if rng.random() < 0.75 else None
    sizes = {n: same or rng.choice([2, 2, 3, 4]) for n in names}
    while math.prod(sizes.values()) > 12:
        sizes.popitem()
    pairs = [(n, s) for n, s in sizes.items() if s > 1]
    if rng.random() < 0.3 and math.prod(s for _, s in pairs) <= 8:
        pairs.insert(rng.randrange(len(pairs) + 1), (STAGE, 2))
    micro = (min(same, 3) if same else rng.choice([2, 2, 3])) if rng.random() < 0.3 else 1
    style = rng.choices(["template", "fold", "ranks"], [6, 1, 1])[0]
    if style == "ranks" and math.prod(s for _, s in pairs) > 8:  # one program per rank: small meshes only
        style = "template"
    return Setting(Mesh(tuple(pairs)), micro, rng.choice([2.0, 6.0, 20.0]), 0.15 if rng.random() < 0.25 else 0.0, style)


def partition(source: Program, logical: Program, how: Setting, rng: random.Random) -> Plan:
    """`source` is a way of writing `logical` (often itself); the result is a plan of it."""
    made = _Partitioner(source, logical, how, rng).plan()
    return stored(made, how.style)


def stored(plan: Plan, style: str) -> Plan:
    """The same plan with its rank programs kept in another way."""
    if style == "template":
        return plan
    programs = [expand(plan, r) for r in range(plan.size)]
    if style == "fold":
        return fold(plan.name, plan.mesh, programs, plan.groups, plan.lineage)
    own = [Template(replace(p, name=f"{p.name}.{r}"), (r,)) for r, p in enumerate(programs)]
    return replace(plan, templates=tuple(own))


class _Partitioner:
    def __init__(self, source: Program, logical: Program, how: Setting, rng: random.Random):
        self.source, self.logical, self.how, self.rng = source, logical, how, rng
        self.mesh = how.mesh
        self.axes = [n for n in self.mesh.names if n != STAGE]
        if how.micro > 1:
            self.axes.append(MICRO)
        self.stages = [0, 1] if STAGE in self.mesh.names else [0]
        self.builder = PlanBuilder("random", self.mesh)
        self.values: dict[str, Value] = {}
        self.homes: dict[str, Spread] = {}  # how parameters and state live between steps
        self.stage_of: dict[str, int] = {}
        self.ranks: dict[int, RankBuilder] = {}

    def size(self, axis: str) -> int:
        return self.how.micro if axis == MICRO else self.mesh.length(axis)

    def count(self, axes: Iterable[str]) -> int:
        return math.prod(self.size(a) for a in axes)

    # -- the walk -----------------------------------------------------------------------------------------------------

    def plan(self) -> Plan:
        rng = self.rng
        with ExitStack() as stack:
            for s in self.stages:
                where: dict[str, Any] = {STAGE: s} if len(self.stages) > 1 else {}
                self.ranks[s] = stack.enter_context(self.builder.ranks(**where))
            for name in self.source.sources:
                if rng.random() < 0.25:
                    self.place(name, self.drawn(self.source.tensors[name].shape, name in self.source.inputs))
            cut = rng.randrange(1, max(2, sum(op.phase == "forward" for op in self.source.ops)))
            for index, op in enumerate(self.source.ops):
                stage = self.stage(op, index, cut)
                for r in self.ranks.values():
                    r.phase = op.phase
                self.run(op, stage)
                for o in op.outputs:
                    self.declare(o)
            for r in self.ranks.values():
                r.phase = "optimizer"
            for output in self.source.outputs:
                self.report(output)
        return self.builder.build()

    def stage(self, op: Op, index: int, cut: int) -> int:
        if len(self.stages) == 1:
            return 0
        if op.phase == "forward":
            found = 0 if index < cut else 1
        elif op.forward is not None:
            found = self.stage_of[op.forward]
        else:
            known = [self.stage_of[i] for i in op.inputs if i in self.stage_of]
            found = known[0] if known else self.stage_of.get(str(self.source.output("loss")), 1)
        for o in op.outputs:
            self.stage_of[o] = found
        for i in op.inputs:
            if i in self.source.sources:
                self.stage_of.setdefault(str(i), found)
        return found

    def run(self, op: Op, stage: int) -> None:
        if op.name == "grad_norm":
            return self.grad_norm(op, stage)
        shapes = [None if i is None else self.source.tensors[i].shape for i in op.inputs]
        results = [self.source.tensors[o].shape for o in op.outputs]
        found = rule(op, shapes, results)
        if found is None:
            found = Rule(tuple((None,) * len(s or ()) for s in shapes), tuple((None,) * len(s) for s in results))
        self.emit(op, found, stage)
        return None

    def grad_norm(self, op: Op, stage: int) -> None:
        """Squares of every gradient where it lives; sums of sums; one root."""
        source, rng = self.source, self.rng
        totals: list[str] = []
        for i in op.inputs:
            assert i is not None
            here = self.stage_of.get(i, 0)
            square, total = f"{i}.square", f"{i}.squares"
            self.values_of(source.tensors[i].shape, square, Op("square", (i,), (square,), phase=op.phase), here)
            self.values_of((), total, Op("sum", (square,), (total,), phase=op.phase), here)
            totals.append(total)
        rng.shuffle(totals)
        last = totals[0]
        for n, other in enumerate(totals[1:]):
            self.values_of((), f"squares.{n}", Op("add", (last, other), (f"squares.{n}",), phase=op.phase), stage)
            last = f"squares.{n}"
        self.values_of((), op.outputs[0], Op("sqrt", (last,), op.outputs, phase=op.phase), stage)

    def values_of(self, shape: tuple[int, ...], name: str, op: Op, stage: int) -> None:
        shapes = [self.shape(str(i)) for i in op.inputs]
        found = rule(op, shapes, [shape])
        assert found is not None
        self.stage_of[name] = stage
        self.emit(op, found, stage, [shape])

    def shape(self, name: str) -> tuple[int, ...]:
        return self.values[name].shape if name in self.values else self.source.tensors[name].shape

    # -- sources ------------------------------------------------------------------------------------------------------

    def drawn(self, shape: tuple[int, ...], micro: bool) -> Spread:
        """Any way of cutting a tensor."""
        spread = whole(len(shape))
        for a in self.rng.sample(self.axes, len(self.axes)):
            if a == MICRO and not micro:
                continue
            fits = [d for d, s in enumerate(shape) if s % self.count((*spread.cuts[d], a)) == 0]
            if fits and self.rng.random() < 0.6:
                d = self.rng.choice(fits)
                spread = spread.cut(d, (*spread.cuts[d], a))
        return spread

    def place(self, name: str, spread: Spread) -> None:
        """A source comes to the plan this way."""
        kind = self.source.tensors[name]
        stage = self.stage_of.setdefault(name, self.rng.choice(self.stages) if len(self.stages) > 1 else 0)
        r = self.ranks[stage]
        local = self.local(kind.shape, spread)
        domain = self.source.domains.get(name)
        micro = any(MICRO in c for c in spread.cuts)
        made = []
        for m in range(self.how.micro if micro else 1):
            own = f"{name}.{m}" if micro else name
            into = r._inputs if name in self.source.inputs else r._parameters if name in self.source.parameters else r._state
            if name in self.source.parameters:
                r._trainable.add(own)
            made.append(r._source(into, own, local, kind.dtype, domain))
            form, fixed = self.form(spread, m)
            r.lives(made[-1], name, form, fixed)
        self.values[name] = Value(name, kind.shape, spread, {stage: made})
        self.homes[name] = spread

    def form(self, spread: Spread, m: int) -> tuple[str | Form, dict[str, tuple[int, int]] | None]:
        """One of the spellings of a spread."""
        cut = any(MICRO in c for c in spread.cuts)
        if not cut and not spread.partial and self.rng.random() < 0.4:
            return Placements(tuple((a, Shard(d)) for d, c in enumerate(spread.cuts) for a in c)), None
        text = " ".join(f"({' '.join((*c, f'd{d}'))})" if c else f"d{d}" for d, c in enumerate(spread.cuts))
        fixed = ((MICRO, m, self.how.micro),) if cut else ()
        return Pattern(text, fixed, tuple((a, "sum") for a, _ in spread.partial)), None

    def local(self, shape: tuple[int, ...], spread: Spread) -> tuple[int, ...]:
        return tuple(s // self.count(c) for s, c in zip(shape, spread.cuts, strict=True))

    # -- one op -------------------------------------------------------------------------------------------------------

    def emit(self, op: Op, rules: Rule, stage: int, results: Sequence[tuple[int, ...]] | None = None) -> None:
        rng = self.rng
        shapes = results if results is not None else [self.source.tensors[o].shape for o in op.outputs]
        labels, shares = self.strategy(op, rules, shapes)
        wanted: list[Spread] = []
        for n, own in enumerate(rules.inputs):
            spread = Spread(tuple(labels.get(x, ()) if x is not None else () for x in own))
            partial = {a: "sum" for a in shares if n in shares[a]}
            if n in rules.added:
                partial |= {a: "sum" for x, k in rules.kinds.items() if k == "sum" for a in labels.get(x, ())}
            wanted.append(replace(spread, partial=tuple(sorted(partial.items()))))
        given = [None if i is None else self.get(i, w, stage) for i, w in zip(op.inputs, wanted, strict=True)]
        used = {a for axes in labels.values() for a in axes} | set(shares)
        micro = MICRO in used
        spreads = []
        for n, own in enumerate(rules.outputs[: len(shapes)]):
            spread = Spread(tuple(labels.get(x, ()) if x is not None else () for x in own))
            found = dict.fromkeys(shares, "sum")
            for x, axes in labels.items():
                kind = rules.share(n, x)
                if x not in own and kind is not None:
                    found |= dict.fromkeys(axes, kind)
            spreads.append(replace(spread, partial=tuple(sorted(found.items()))))
        factor = Fraction(1, math.prod(self.count(axes) for x, axes in labels.items() if rules.kinds.get(x) == "mean"))
        made: list[list[Tensor]] = [[] for _ in shapes]
        r = self.ranks[stage]
        for m in range(self.how.micro if micro else 1):
            attrs = self.attrs(op, rules, labels, shapes, spreads, wanted, m, r)
            tensors = [None if g is None else g[m if len(g) > 1 else 0] for g in given]
            names = [f"mb{m}/{o}" if micro else o for o in op.outputs]
            found_ = r.emit(op.name, tensors, attrs, [r.fresh(n) for n in names], None, None)
            for k, t in enumerate(found_):
                if factor != 1:
                    (t,) = r.emit("mul", (t,), {"value": factor}, [r.fresh(t.name + ".scaled")])
                made[k].append(t)
        for o, shape, spread, tensors_ in zip(op.outputs, shapes, spreads, made, strict=True):
            if micro and MICRO not in spread.axes:  # every micro-batch made the same
                tensors_ = [rng.choice(tensors_)]
            self.values[o] = Value(o, tuple(shape), spread, {stage: tensors_})

    def strategy(
        self, op: Op, rules: Rule, results: Sequence[tuple[int, ...]]
    ) -> tuple[dict[str, tuple[str, ...]], dict[str, frozenset[int]]]:
        """Which axes cut which labels, and which axes carry shares through (and in which inputs)."""
        rng = self.rng
        sizes: dict[str, list[int]] = {}
        tensors = list(zip(rules.inputs, [() if i is None else self.shape(i) for i in op.inputs], strict=True))
        tensors += list(zip(rules.outputs, results, strict=False))
        for own, shape in tensors:
            for x, s in zip(own, shape, strict=True):
                if x is not None:
                    sizes.setdefault(x, []).append(s)
        labels: dict[str, tuple[str, ...]] = {}
        shares: dict[str, frozenset[int]] = {}
        known = [(n, self.values[i].spread) for n, i in enumerate(op.inputs) if i in self.values]
        order = list(dict.fromkeys(a for _, s in known for c in s.cuts for a in c))
        order += [a for a in rng.sample(self.axes, len(self.axes)) if a not in order]
        if op.phase == "optimizer":  # micro-batches are over
            order = [a for a in order if a != MICRO]
        for a in order:
            options: list[tuple[float, str | frozenset[int] | None]] = [(1.0, None)]
            for n, spread in known:
                for x, c in zip(rules.inputs[n], spread.cuts, strict=True):
                    if x is not None and a in c:
                        options.append((self.how.keep, x))
                if (a, "sum") in spread.partial:
                    options += [(self.how.keep, s) for s in rules.linear if n in s]
            options += [(0.6, x) for x in sizes]
            if not known:
                options += [(3.0, x) for x in sizes]

            def fits(option: str | frozenset[int] | None, a: str = a) -> bool:
                if option is None:
                    return True
                if isinstance(option, str):
                    n = self.count((*labels.get(option, ()), a))
                    return all(s % n == 0 for s in sizes[option])
                return all(
                    (a, "sum") in self.values[str(op.inputs[n])].spread.partial if op.inputs[n] in self.values else False for n in option
                )

            options = [o for o in options if fits(o[1])]
            (choice,) = rng.choices([o for _, o in options], [w for w, _ in options])
            if isinstance(choice, str):
                labels[choice] = (*labels.get(choice, ()), a)
            elif choice is not None:
                shares[a] = choice
        return labels, shares

    def attrs(
        self,
        op: Op,
        rules: Rule,
        labels: dict[str, tuple[str, ...]],
        shapes: Sequence[tuple[int, ...]],
        spreads: Sequence[Spread],
        wanted: Sequence[Spread],
        m: int,
        r: RankBuilder,
    ) -> dict[str, Any]:
        """Attributes in local terms."""
        found: dict[str, Any] = dict(op.attributes)
        if rules.shape:
            if op.name.endswith(GRAD):
                n = len(op.inputs) - 1
                found["shape"] = self.local(self.shape(str(op.inputs[n])), wanted[n])
            else:
                found["shape"] = self.local(shapes[0], spreads[0])

        def first(label: str, size: int) -> Any:
            axes = labels.get(label, ())
            width = size // self.count(axes)
            return r.each(lambda at: self.index(axes, at, m) * width)

        if rules.start is not None and labels.get(rules.start):
            if rules.classes is not None:
                size = int(op.get("num_classes"))
            else:
                pairs = [p for own, i in zip(rules.inputs, op.inputs, strict=True) for p in zip(own, self.shape(str(i)), strict=True)]
                size = next(s for x, s in pairs if x == rules.start)
            found["start"] = first(rules.start, size)
            if rules.classes is not None:
                found["num_classes"] = size // self.count(labels[rules.start])
        if rules.offset is not None and labels.get(rules.offset):
            found["query_offset"] = first(rules.offset, self.shape(str(op.inputs[0]))[2])
        return found

    def index(self, axes: Sequence[str], at: dict[str, int], m: int) -> int:
        """Which block of a cut a rank (and micro-batch) has."""
        found = 0
        for a in axes:
            found = found * self.size(a) + (m if a == MICRO else at[a])
        return found

    # -- moving -------------------------------------------------------------------------------------------------------

    def get(self, name: str, want: Spread, stage: int) -> list[Tensor]:
        """The tensor as an op wants it, on the op's stage."""
        if name not in self.values:
            own = want.cuts if name in self.source.inputs else tuple(c[: c.index(MICRO)] if MICRO in c else c for c in want.cuts)
            fixed = Spread(own)
            self.place(name, fixed)
        value = self.values[name]
        moved = self.to_stage(value, stage)
        if value.spread == want:
            return moved
        tensors, spread = self.move(moved, value.shape, value.spread, want, self.ranks[stage])
        assert spread == want, (spread, want)
        if self.rng.random() < 0.5:  # later uses start from here
            self.values[name] = Value(name, value.shape, spread, {stage: tensors})
        return tensors

    def to_stage(self, value: Value, stage: int) -> list[Tensor]:
        if stage not in value.at:
            (other, tensors) = next(iter(value.at.items()))
            here, there = self.ranks[other], self.ranks[stage]
            received = []
            for t in tensors:
                here.send(t, here.peer(**{STAGE: stage}))
                received.append(there.recv(t.shape, there.peer(**{STAGE: other}), t.type.dtype, name=there.fresh(t.name + ".recv")))
            value.at[stage] = received
        return value.at[stage]

    def move(
        self, tensors: list[Tensor], shape: tuple[int, ...], have: Spread, want: Spread, r: RankBuilder
    ) -> tuple[list[Tensor], Spread]:
        rng = self.rng
        while have != want:
            steps = []
            partial, target = dict(have.partial), dict(want.partial)
            for a, kind in have.partial:
                if a not in target:
                    steps.append(("reduce", a, kind, -1, -1))
                    for d, c in enumerate(want.cuts):
                        if (
                            kind == "sum"
                            and have.cuts[d] == c[: len(have.cuts[d])]
                            and c[len(have.cuts[d]) : len(have.cuts[d]) + 1] == (a,)
                        ):
                            steps += [("reduce_scatter", a, kind, d, -1)] * 2
            for d, (c, w) in enumerate(zip(have.cuts, want.cuts, strict=True)):
                if c != w[: len(c)]:
                    steps.append(("gather", c[-1], "", d, -1))
                    for e, (c2, w2) in enumerate(zip(have.cuts, want.cuts, strict=True)):
                        if e != d and c2 == w2[: len(c2)] and w2[len(c2) : len(c2) + 1] == (c[-1],) and c[-1] != MICRO:
                            steps += [("all_to_all", c[-1], "", d, e)] * 2
                elif c != w:
                    a = w[len(c)]
                    if a not in have.axes:
                        steps.append(("slice", a, "", d, -1))
            for a in target:
                if a not in partial and a not in have.axes:
                    steps.append(("share", a, "sum", -1, -1))
            name, a, kind, d, e = rng.choice(steps)
            n = self.size(a)
            match name:
                case "reduce":
                    tensors, have = self.reduce(tensors, a, kind, r), have.without(a)
                case "reduce_scatter":
                    have = have.without(a).cut(d, (*have.cuts[d], a))
                    if a == MICRO:
                        tensors = self.slices(self.reduce(tensors, a, kind, r), a, d, r)
                    else:
                        tensors = [self.one("reduce_scatter", t, r, group=r.group_of(a), dim=d) for t in tensors]
                case "gather":
                    have = have.cut(d, have.cuts[d][:-1])
                    if a == MICRO:
                        tensors = list(r.emit("concat", tensors, {"dim": d}, [r.fresh(tensors[0].name + ".joined")]))
                    else:
                        tensors = [self.one("all_gather", t, r, group=r.group_of(a), dim=d) for t in tensors]
                case "all_to_all":
                    have = have.cut(d, have.cuts[d][:-1]).cut(e, (*have.cuts[e], a))
                    tensors = [self.one("all_to_all", t, r, group=r.group_of(a), split_dim=e, concat_dim=d) for t in tensors]
                case "slice":
                    have = have.cut(d, (*have.cuts[d], a))
                    tensors = self.slices(tensors, a, d, r)
                case "share":
                    have = replace(have, partial=tuple(sorted((*have.partial, (a, "sum")))))
                    tensors = self.shares(tensors, a, n, r)
        return tensors, have

    def one(self, kind: str, t: Tensor, r: RankBuilder, /, **attrs: Any) -> Tensor:
        return r.emit(kind, (t,), attrs, [r.fresh(f"{t.name}.{kind}")])[0]

    def reduce(self, tensors: list[Tensor], a: str, kind: str, r: RankBuilder) -> list[Tensor]:
        rng = self.rng
        if a == MICRO:
            op = "add" if kind == "sum" else "maximum"
            order = tensors if rng.random() < 0.7 else rng.sample(tensors, len(tensors))
            total = order[0]
            for t in order[1:]:
                (total,) = r.emit(op, (total, t), {}, [r.fresh(tensors[0].name + ".all")])
            return [total]
        n = self.size(a)
        found = []
        way = rng.random()
        for t in tensors:
            group = r.group_of(a)
            dims = [d for d, s in enumerate(t.shape) if s % n == 0]
            if kind == "max":
                found.append(self.one("all_reduce", t, r, group=group, op="max"))
            elif way < 0.1:
                mean = self.one("all_reduce", t, r, group=group, op="avg")
                found.append(self.one("mul", mean, r, value=n))
            elif way < 0.25 and dims:
                part = self.one("reduce_scatter", t, r, group=group, dim=dims[0])
                found.append(self.one("all_gather", part, r, group=group, dim=dims[0]))
            else:
                found.append(self.one("all_reduce", t, r, group=group))
        return found

    def slices(self, tensors: list[Tensor], a: str, d: int, r: RankBuilder) -> list[Tensor]:
        n = self.size(a)
        width = tensors[0].shape[d] // n
        if a == MICRO:
            return [self.one("slice", tensors[0], r, dim=d, start=m * width, stop=(m + 1) * width) for m in range(n)]
        start, stop = r.each(lambda at: at[a] * width), r.each(lambda at: (at[a] + 1) * width)
        return [self.one("slice", t, r, dim=d, start=start, stop=stop) for t in tensors]

    def shares(self, tensors: list[Tensor], a: str, n: int, r: RankBuilder) -> list[Tensor]:
        """A whole value as summands: all of it on one, or equal parts."""
        even = self.rng.random() < 0.5
        if a == MICRO:
            values = [Fraction(1, n) if even else int(m == 0) for m in range(n)]
            return [self.one("mul", tensors[0], r, value=v) for v in values]
        value = Fraction(1, n) if even else r.each(lambda at: int(at[a] == 0))
        return [self.one("mul", t, r, value=value) for t in tensors]

    # -- results ------------------------------------------------------------------------------------------------------

    def report(self, output: Output) -> None:
        name = output.tensor
        ndim = len(self.shape(name))
        if output.role in ("loss", "metric"):
            stage = next(iter(self.values[name].at))
            (t,) = self.get(name, whole(ndim), stage)
            self.ranks[stage].output(t, output.role, output.of)
            return
        of = str(output.of)
        if of not in self.values:
            self.place(of, whole(ndim))
        stage = self.stage_of[of]
        if output.role == "gradient" and self.rng.random() < 0.2 and self.zero(output, stage):
            return
        home = self.homes[of]
        (t,) = self.get(name, home, stage)
        self.ranks[stage].output(t, output.role, of)

    def zero(self, output: Output, stage: int) -> bool:
        """A gradient that lives in its own way, declared."""
        name = output.tensor
        logical = self.logical.output("gradient", output.of)
        value = self.values[name]
        if value.spread.partial or MICRO in value.spread.axes or logical is None:
            return False
        if stage not in value.at:
            return False
        (t,) = value.at[stage]
        r = self.ranks[stage]
        form, fixed = self.form(value.spread, 0)
        if any(lay.local == t.name and dict(lay.where) in r._where for lay in self.builder.lineage):
            return False
        r.lives(t, logical, form, fixed)
        r.output(t, "gradient", output.of)
        return True

    def declare(self, name: str) -> None:
        """Say how an intermediate tensor lives, now and then: a claim to be checked."""
        if self.rng.random() >= self.how.declared or self.source is not self.logical or name not in self.values:
            return
        value = self.values[name]
        if any(a == MICRO or kind != "sum" for a, kind in value.spread.partial) or self.logical.tensors[name].kind != "real":
            return
        for stage, tensors in value.at.items():
            for m, t in enumerate(tensors):
                form, fixed = self.form(value.spread, m)
                self.ranks[stage].lives(t, name, form, fixed)
