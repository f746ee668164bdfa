"""One random mistake anywhere in a plan: an op, a group, a constant, an order, a lineage, an output; on all ranks of a
program or on one of them only."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Final

from trainverify.graph.lineage import Layout, Pattern, Placements, Shard
from trainverify.graph.plan import Edit, Plan, Template
from trainverify.graph.program import Op, Ref, Value
from trainverify.graph.types import TensorType

_SWAPS: Final = {
    "silu": ("relu", "tanh"),
    "relu": ("silu", "identity"),
    "gelu": ("silu",),
    "tanh": ("sigmoid",),
    "sigmoid": ("tanh",),
    "add": ("sub", "mul"),
    "sub": ("add",),
    "mul": ("add",),
    "square": ("identity",),
    "exp": ("identity",),
    "sqrt": ("identity",),
    "identity": ("neg",),
    "sum": ("mean", "amax"),
    "mean": ("sum",),
    "amax": ("mean",),
    "maximum": ("minimum", "add"),
    "all_reduce": ("identity",),
}
_REDUCTIONS: Final = ("sum", "avg", "max", "min")


@dataclass(frozen=True)
class Mutant:
    plan: Plan
    kind: str
    text: str  # what was changed, for the report


@dataclass(frozen=True)
class _Site:
    plan: Plan
    template: Template
    index: int
    rank: int | None  # None: all ranks of the template

    @property
    def op(self) -> Op:
        return self.template.program.ops[self.index]

    def known(self) -> dict[str, TensorType]:
        """Tensors that exist before the op."""
        program = self.template.program
        names = [*program.sources, *(o for op in program.ops[: self.index] for o in op.outputs)]
        return {n: program.tensors[n] for n in names}


Change = tuple[tuple[Op, ...], dict[str, TensorType], dict[str, tuple[Value, ...]], dict[str, tuple[int, ...]]]


def mutate(plan: Plan, rng: random.Random) -> Mutant:
    """A plan with one mistake (or a harmless edit)."""
    kinds = _kinds()
    plans: list[tuple[int, str, Callable[[Plan, random.Random], Mutant | None]]] = [
        (2, "order", _order),
        (2, "lineage", _lineage),
        (1, "output", _output),
    ]
    for _ in range(1000):
        everything: list[tuple[int, str, Any]] = [*kinds, *plans]
        (found,) = rng.choices(everything, [w for w, _, _ in everything])
        change: Any = found[2]
        if found in plans:
            made: Mutant | None = change(plan, rng)
            if made is not None:
                return made
            continue
        template = rng.choice(plan.templates)
        if not template.program.ops:
            continue
        rank = rng.choice(template.ranks) if rng.random() < 0.3 and len(template.ranks) > 1 else None
        new = _mutant(_Site(plan, template, rng.randrange(len(template.program.ops)), rank), found[1], change, rng)
        if new is not None:
            return new
    raise ValueError("nothing to change in this plan")


def at_one_rank(plan: Plan, rank: int, rng: random.Random) -> Mutant:
    """A plan with one op of one rank changed."""
    template = next(t for t in plan.templates if rank in t.ranks)
    kinds = _kinds()
    for _ in range(1000):
        ((_, kind, change),) = rng.choices(kinds, [w for w, _, _ in kinds])
        new = _mutant(_Site(plan, template, rng.randrange(len(template.program.ops)), rank), kind, change, rng)
        if new is not None:
            return new
    raise ValueError(f"nothing to change on rank {rank}")


def _kinds() -> list[tuple[int, str, Callable[[_Site, random.Random], Change | None]]]:
    """Changes of one op, and how often each is made."""
    return [
        (3, "operator", _operator),
        (2, "drop", _drop),
        (2, "double", _double),
        (3, "group", _group),
        (3, "constant", _constant),
        (2, "shift", _shift),
        (2, "inputs swapped", _swapped),
        (4, "other tensor", _other),
    ]


def _mutant(site: _Site, kind: str, change: Callable[[_Site, random.Random], Change | None], rng: random.Random) -> Mutant | None:
    new = change(site, rng)
    if new is None or new[0] == (site.op,):
        return None
    where = site.template.program.name if site.rank is None else f"rank {site.rank}"
    text = f"{where}, op {site.index}: {site.op}  →  {'; '.join(map(str, new[0])) or 'nothing'}"
    return Mutant(_applied(site, new), kind + ("" if site.rank is None else ", one rank"), text)


def _applied(site: _Site, change: Change) -> Plan:
    ops, tensors, columns, groups = change
    plan, t, i = site.plan, site.template, site.index
    plan = replace(plan, groups={**plan.groups, **groups})
    if site.rank is not None:
        row = t.ranks.index(site.rank)
        bound = {n: c[row] for n, c in columns.items()}
        concrete = tuple(replace(o, attrs=tuple((k, _bound(v, bound)) for k, v in o.attrs)) for o in ops)
        return replace(plan, edits=(*plan.edits, Edit(site.rank, (i,), concrete, tensors)))
    program = t.program
    program = replace(program, ops=(*program.ops[:i], *ops, *program.ops[i + 1 :]), tensors={**program.tensors, **tensors})
    new = replace(t, program=program, bindings={**t.bindings, **columns})
    return replace(plan, templates=tuple(new if x is t else x for x in plan.templates))


def _bound(value: Value, bound: dict[str, Value]) -> Value:
    return bound.get(value.name, value) if isinstance(value, Ref) else value


def _plain(*ops: Op, **tensors: TensorType) -> Change:
    return ops, tensors, {}, {}


# -- changes of one op ------------------------------------------------------------------------------------------------


def _operator(site: _Site, rng: random.Random) -> Change | None:
    op = site.op
    if op.name in ("all_reduce", "reduce_scatter") and rng.random() < 0.6:
        old = op.get("op", "sum")
        return _plain(op.with_attrs(op=rng.choice([r for r in _REDUCTIONS if r != old])))
    if op.name not in _SWAPS:
        return None
    new = rng.choice(_SWAPS[op.name])
    attrs = () if op.name == "all_reduce" or new == "identity" else op.attrs
    inputs = op.inputs[:1] if new in ("identity", "neg") else op.inputs
    return _plain(replace(op, name=new, inputs=inputs, attrs=attrs))


def _drop(site: _Site, rng: random.Random) -> Change | None:
    """The op is left out: its result is its input, or another tensor that fits, or missing."""
    op, program = site.op, site.template.program
    if len(op.outputs) == 1 and rng.random() < 0.85:
        kind = program.tensors[op.outputs[0]]
        fits = [i for i in op.inputs if i is not None and program.tensors[i] == kind] or [n for n, t in site.known().items() if t == kind]
        if fits:
            return _plain(Op("identity", (rng.choice(fits),), op.outputs, (), op.phase, None, op.source))
    return _plain()


def _double(site: _Site, rng: random.Random) -> Change | None:
    op, program = site.op, site.template.program
    if len(op.outputs) != 1 or len(op.inputs) != 1 or op.inputs[0] is None:
        return None
    kind = program.tensors[op.outputs[0]]
    if program.tensors[op.inputs[0]] != kind:
        return None
    once = f"{op.outputs[0]}.once"
    return (replace(op, outputs=(once,)), replace(op, inputs=(once,))), {once: kind}, {}, {}


def _group(site: _Site, rng: random.Random) -> Change | None:
    op, t, plan = site.op, site.template, site.plan
    group = op.get("group")
    if group is None:
        return None
    column = t.bindings[group.name] if isinstance(group, Ref) else (group,) * len(t.ranks)
    way = rng.randrange(3)
    groups = dict(plan.groups)
    new: list[Value] = []
    for rank, name in zip(t.ranks, column, strict=True):
        members = groups[str(name)]
        if way == 0:  # the same ranks in another order
            order = tuple(reversed(members))
        elif way == 1:  # ranks along other axes
            own = [m for n, m in plan.groups.items() if rank in m and m != members]
            if not own:
                return None
            order = own[len(t.ranks) % len(own)]
        else:  # some of them
            order = (
                tuple(m for m in members if m == rank) if len(members) == 2 else tuple(m for m in members if m != members[-1] or m == rank)
            )
        label = "changed." + ".".join(map(str, order))
        groups[label] = order
        new.append(label)
    if tuple(groups[str(a)] for a in new) == tuple(groups[str(a)] for a in column):
        return None
    return (
        (op.with_attrs(group=Ref("changed.group")),),
        {},
        {"changed.group": tuple(new)},
        {k: v for k, v in groups.items() if k not in plan.groups},
    )


def _constant(site: _Site, rng: random.Random) -> Change | None:
    op = site.op
    names = [k for k, v in op.attrs if isinstance(v, int | float | Fraction) and not isinstance(v, bool)]
    flags = [k for k, v in op.attrs if isinstance(v, bool)]
    if flags and rng.random() < 0.3:
        name = rng.choice(flags)
        return _plain(op.with_attrs(**{name: not op.get(name)}))
    if not names:
        return None
    name = rng.choice(names)
    return _plain(op.with_attrs(**{name: _wrong(op.get(name), rng)}))


def _wrong(value: Any, rng: random.Random) -> Value:
    if isinstance(value, int):
        return rng.choice([value + 1, value - 1, value * 2])
    options: list[Value] = [value * 2, value / 2, -value]
    return rng.choice(options)


def _shift(site: _Site, rng: random.Random) -> Change | None:
    """Integers that differ between ranks, or lists of them."""
    op, t = site.op, site.template
    refs = [k for k, v in op.attrs if isinstance(v, Ref) and k != "group"]
    if refs:
        names = refs if rng.random() < 0.5 else [rng.choice(refs)]
        columns: dict[str, tuple[Value, ...]] = {}
        step, turned = rng.choice([-1, 1]), rng.random() < 0.5
        for k in names:
            old = t.bindings[op.get(k).name]
            columns[f"changed.{k}"] = tuple(reversed(old)) if turned else tuple(v + step if isinstance(v, int) else v for v in old)
        return (op.with_attrs(**{k: Ref(f"changed.{k}") for k in names}),), {}, columns, {}
    lists = [k for k, v in op.attrs if isinstance(v, tuple) and len(v) > 1 and all(isinstance(x, int) for x in v)]
    if not lists:
        return None
    k = rng.choice(lists)
    value = list(op.get(k))
    rng.shuffle(value)
    return _plain(op.with_attrs(**{k: tuple(value)}))


def _swapped(site: _Site, rng: random.Random) -> Change | None:
    op = site.op
    if len(op.inputs) < 2:
        return None
    i, j = rng.sample(range(len(op.inputs)), 2)
    inputs = list(op.inputs)
    inputs[i], inputs[j] = inputs[j], inputs[i]
    return _plain(replace(op, inputs=tuple(inputs)))


def _other(site: _Site, rng: random.Random) -> Change | None:
    """Another tensor of the same type: a stale micro-batch, a gradient before it was reduced."""
    op, known = site.op, site.known()
    if not op.inputs:
        return None
    i = rng.randrange(len(op.inputs))
    old = op.inputs[i]
    fits = [n for n, t in known.items() if old is not None and n != old and t == known.get(old)]
    if not fits:
        return None
    near = [n for n in fits if n.split("/")[-1].split(".")[0] == str(old).split("/")[-1].split(".")[0]]
    new = rng.choice(near if near and rng.random() < 0.6 else fits)
    return _plain(replace(op, inputs=(*op.inputs[:i], new, *op.inputs[i + 1 :])))


# -- changes of the plan ----------------------------------------------------------------------------------------------


def _order(plan: Plan, rng: random.Random) -> Mutant | None:
    """Two neighbours change places, in a program or on one rank."""
    t = rng.choice(plan.templates)
    ops = t.program.ops
    talk = [i for i in range(len(ops) - 1) if _talks(ops[i]) or _talks(ops[i + 1])]
    if not talk:
        return None
    i = rng.choice(talk)
    j = next((k for k in range(i + 1, len(ops)) if _talks(ops[k])), i + 1) if rng.random() < 0.7 else i + 1
    first, second = ops[i], ops[j]
    if any(o in second.inputs for o in first.outputs):
        return None
    text = f"{t.program.name}: {first}  ↔  {second}"
    if rng.random() < 0.5 and len(t.ranks) > 1:
        rank = rng.choice(t.ranks)
        edits = (Edit(rank, (i,), (second,)), Edit(rank, (j,), (first,)))
        return Mutant(replace(plan, edits=(*plan.edits, *edits)), "order, one rank", f"rank {rank} of {text}")
    turned = list(ops)
    turned[i], turned[j] = second, first
    new = replace(t, program=replace(t.program, ops=tuple(turned)))
    return Mutant(replace(plan, templates=tuple(new if x is t else x for x in plan.templates)), "order", text)


def _talks(op: Op) -> bool:
    return op.get("group") is not None or op.name in ("send", "recv")


def _lineage(plan: Plan, rng: random.Random) -> Mutant | None:
    lay = rng.choice(plan.lineage)
    new = _relaid(lay, plan, rng)
    if new == lay:
        return None
    changed = tuple(x for old in plan.lineage if (x := new if old is lay else old) is not None)
    return Mutant(replace(plan, lineage=changed), "lineage", f"{lay}  →  {new}")


def _relaid(lay: Layout, plan: Plan, rng: random.Random) -> Layout | None:
    form = lay.form
    if rng.random() < 0.1:
        return None
    if isinstance(form, Placements):
        placed = list(form.axes)
        if placed and rng.random() < 0.5:
            k = rng.randrange(len(placed))
            axis, how = placed[k]
            placed[k] = (axis, Shard(1 - how.dim if how.dim < 2 else 0)) if isinstance(how, Shard) else (axis, how)
        else:
            rng.shuffle(placed)
        return replace(lay, form=Placements(tuple(placed)))
    if isinstance(form, Pattern):
        if form.fixed and rng.random() < 0.5:
            ((name, i, n),) = form.fixed
            return replace(lay, form=replace(form, fixed=((name, (i + 1) % n, n),)))
        names = [w.strip("()") for w in form.text.split()]
        axes = [w for w in names if w in plan.mesh.names or w == "mb"]
        if len(axes) > 1:
            a, b = rng.sample(axes, 2)
            text = form.text.replace(a, "\0").replace(b, a).replace("\0", b)
            return replace(lay, form=replace(form, text=text))
        others = [n for n in plan.mesh.names if n not in axes]
        if axes and others and rng.random() < 0.5:
            return replace(lay, form=replace(form, text=form.text.replace(axes[0], rng.choice(others))))
        cut = [d for d in form.text.split() if d.startswith("d")]
        if axes and axes[0] + " d" in form.text and not cut:
            at = form.text.index(axes[0] + " d")
            end = form.text.index(")", at)
            inner = form.text[at + len(axes[0]) + 1 : end]
            return replace(lay, form=replace(form, text=form.text[:at] + inner + " " + axes[0] + form.text[end:]))
        if axes and cut:
            plain = form.text.replace(f"({axes[0]} ", "(", 1)
            d = rng.choice(cut)
            words = " ".join(f"({axes[0]} {d})" if w == d else w for w in plain.split())
            return replace(lay, form=replace(form, text=words))
    return lay


def _output(plan: Plan, rng: random.Random) -> Mutant | None:
    t = rng.choice(plan.templates)
    outputs = t.program.outputs
    if not outputs:
        return None
    i = rng.randrange(len(outputs))
    kind = t.program.tensors[outputs[i].tensor]
    fits = [n for n, x in t.program.tensors.items() if x == kind and n != outputs[i].tensor]
    new = replace(outputs[i], tensor=rng.choice(fits)) if fits and rng.random() < 0.7 else None
    kept = (*outputs[:i], *(() if new is None else (new,)), *outputs[i + 1 :])
    changed = replace(t, program=replace(t.program, outputs=kept))
    text = f"{t.program.name}: {outputs[i]} is {outputs[i].tensor}  →  {'nothing' if new is None else new.tensor}"
    return Mutant(replace(plan, templates=tuple(changed if x is t else x for x in plan.templates)), "output", text)
