"""`without-auxiliary-loss`: what is differentiated is the loss itself, without the metrics that are added to it with a weight."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from trainverify.approximate.approximation import Changed, Setting
from trainverify.approximate.rewrite import Unfit
from trainverify.graph.program import Op, Program
from trainverify.ops.table import GRAD


@dataclass(frozen=True)
class Term:
    """An op that adds a weighted metric to what is differentiated."""

    metric: str
    weigh: Op
    add: Op
    kept: int  # which input of `add` is the rest


def without_auxiliary_loss(program: Program, setting: Setting) -> Changed:
    wanted = setting.options.get("metric")
    names = [t.metric for t in _terms(program)]
    if not names:
        raise Unfit(f"{program.name}: no metric is added to its loss")
    chosen = [n for n in names if wanted is None or n.partition(" of step ")[0] == wanted]
    if not chosen:
        raise Unfit(f"metric={wanted}: no such term of the loss (it has {', '.join(names)})")
    changed = program
    for name in chosen:
        changed = _without(changed, next(t for t in _terms(changed) if t.metric == name))
    says = f"{', '.join(chosen)} is reported, but not added to what is differentiated; every reported value is as before"
    return Changed(_with_reports(program, changed), says)


def _terms(program: Program) -> Iterator[Term]:
    """The sums that a loss is made by, or goes into: loss + weight·metric + …"""
    metrics = {o.tensor: str(o.of) for o in program.outputs if o.role == "metric"}
    weighed = {op.outputs[0]: op for op in program.ops if op.name == "mul" and op.phase == "forward" and len(op.inputs) == 1}
    sums = {o.tensor for o in program.outputs if o.role == "loss" or (o.of or "").startswith("loss of step ")}
    adds = [op for op in program.ops if op.name == "add" and op.phase == "forward" and len(op.inputs) == 2 and not op.attrs]
    for up, op in (*((True, op) for op in reversed(adds)), *((False, op) for op in adds)):
        for kept, other in ((0, 1), (1, 0)):
            weigh = weighed.get(str(op.inputs[other]))
            if weigh is None or weigh.inputs[0] not in metrics:
                continue
            near, far = (op.outputs[0], str(op.inputs[kept])) if up else (str(op.inputs[kept]), op.outputs[0])
            if near in sums and far not in sums:
                sums.add(far)
                yield Term(metrics[str(weigh.inputs[0])], weigh, op, kept)
                break


def _without(program: Program, term: Term) -> Program:
    """Without a term, and without the gradients that come from it alone."""
    cut = _Cut(program, term)
    for op in program.ops:
        cut.step(op)
    outputs = tuple(replace(o, tensor=cut.read(o.tensor)) for o in program.outputs)
    for o in outputs:
        if o.tensor in cut.zero:
            raise Unfit(f"{o}: it comes from {term.metric} alone, and would be zero")
    made = {*program.sources, *(n for op in cut.ops for n in op.outputs)}
    return replace(program, ops=tuple(cut.ops), outputs=outputs, tensors={n: t for n, t in program.tensors.items() if n in made})


def _with_reports(old: Program, new: Program) -> Program:
    """The changed program, with what the forward pass reports or keeps as it was: a reported loss has its terms still."""
    now = {op.outputs[0]: op for op in new.ops}
    altered: set[str] = set()
    for op in old.ops:
        reads = altered.intersection(map(str, op.inputs))
        if op.phase == "optimizer" and reads:
            raise Unfit(f"{op}: it reads {min(reads)}, which has other terms where it is reported than where it is differentiated")
        if op.phase in ("forward", "metric") and (reads or now.get(op.outputs[0]) != op):
            altered.update(op.outputs)
    needed = {o.tensor for o in old.outputs} & altered
    for op in reversed(old.ops):
        if needed.intersection(op.outputs):
            needed |= altered.intersection(map(str, op.inputs))
    names = {n: f"{n}.reported" if n in new.tensors else n for n in needed}
    if taken := sorted(({*names.values()} - needed) & old.tensors.keys()):
        raise Unfit(f"{taken[0]}: a tensor has this name already")
    ops: list[Op] = []
    for op in old.ops:
        if needed.intersection(op.outputs):
            inputs = tuple(None if i is None else names.get(i, i) for i in op.inputs)
            ops.append(replace(op, inputs=inputs, outputs=tuple(names[o] for o in op.outputs)))
        if op.outputs[0] in now:
            ops.append(now[op.outputs[0]])
    outputs = tuple(replace(n, tensor=names.get(o.tensor, n.tensor)) for o, n in zip(old.outputs, new.outputs, strict=True))
    tensors = {**new.tensors, **{made: old.tensors[n] for n, made in names.items()}}
    return replace(new, ops=tuple(ops), outputs=outputs, tensors=tensors)


class _Cut:
    """A walk over the ops: gradients that vanish, and tensors that are others now."""

    def __init__(self, program: Program, term: Term):
        self.term = term
        self.ops: list[Op] = []
        self.zero: set[str] = set()
        self.same: dict[str, str] = {str(term.add.outputs[0]): str(term.add.inputs[term.kept])}
        weighed, summed = term.weigh.outputs[0], term.add.outputs[0]
        for op in program.ops:
            own = op.forward in (weighed, summed) or op in (term.weigh, term.add)
            if weighed in op.inputs and not own:
                raise Unfit(f"{op}: it reads {weighed} besides the loss")

    def read(self, name: str) -> str:
        while name in self.same:
            name = self.same[name]
        return name

    def step(self, op: Op) -> None:
        if op in (self.term.weigh, self.term.add):
            return
        inputs = tuple(None if i is None else self.read(i) for i in op.inputs)
        lost = [i for i in inputs if i in self.zero]
        if op.forward == self.term.add.outputs[0]:
            self._of_sum(op, inputs)
        elif not lost:
            self.ops.append(replace(op, inputs=inputs))
        elif op.name == "add" and op.phase == "backward" and len(op.inputs) == 2 and not op.attrs:
            rest = [i for i in inputs if i not in self.zero]
            if rest:
                self.same[op.outputs[0]] = str(rest[0])
            else:
                self.zero.add(op.outputs[0])
        elif op.name.endswith(GRAD):
            self._of_op(op, inputs)
        else:
            raise Unfit(f"{op}: it reads {lost[0]}, which comes from {self.term.metric} alone")

    def _of_sum(self, op: Op, inputs: tuple[str | None, ...]) -> None:
        """The derivative of the sum passes its gradient on to both terms."""
        if op.name != "add" + GRAD or op.get("given", (0,)) != (0,):
            raise Unfit(f"{op} is not the derivative of {self.term.add}")
        for position, name in zip(op.get("wrt"), op.outputs, strict=True):
            if position == self.term.kept:
                self.same[name] = str(inputs[2])
            else:
                self.zero.add(name)

    def _of_op(self, op: Op, inputs: tuple[str | None, ...]) -> None:
        """A derivative, without the gradients of its outputs that vanish."""
        given = op.get("given", (0,))
        first = len(inputs) - len(given)
        left = [(i, g) for i, g in zip(given, inputs[first:], strict=True) if g not in self.zero]
        if any(i in self.zero for i in inputs[:first]):
            raise Unfit(f"{op}: it reads a gradient that comes from {self.term.metric} alone")
        if not left:
            self.zero.update(op.outputs)
            return
        attrs = {k: v for k, v in op.attributes.items() if k != "given"} | {"given": tuple(i for i, _ in left)}
        self.ops.append(replace(op, inputs=(*inputs[:first], *(g for _, g in left)), attrs=()).with_attrs(**attrs))
