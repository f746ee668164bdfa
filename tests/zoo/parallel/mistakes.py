"""Mistakes planted in plans of the zoo: ops skipped, exchanged, replaced."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from trainverify.graph.plan import Plan
from trainverify.graph.program import Op, Program, Ref
from trainverify.zoo import llama
from trainverify.zoo.parallel import Degrees
from verdicts.changes import Change, attrs, in_program, lineage, op_of, replaced

LLAMA = llama.Config(layers=2, hidden=24, heads=6, kv_heads=2, ffn=10, vocabulary=14, sequence=10, context=11, batch=12)
MANY = Degrees(dp=2, tp=2, pp=2, microbatches=2, normalise="loss")  # rank = 4·pp + 2·dp + tp


def together(*changes: Change) -> Change:
    def apply(plan: Plan) -> Plan:
        for change in changes:
            plan = change(plan)
        return plan

    return apply


def skipped(name: str, output: str) -> Change:
    """The op passes its input on."""
    return replaced(name, output, lambda op: replace(op, name="identity", attrs=()))


def instead(name: str, output: str, kind: str, *names: str, **values: object) -> Change:
    """Another op makes this tensor."""
    return replaced(name, output, lambda op: replace(op, name=kind, inputs=names, outputs=(output,), attrs=tuple(sorted(values.items()))))


def again(name: str, tensor: str, group: str) -> Change:
    """One more all_reduce of a tensor, for all who read it."""

    def apply(program: Program) -> Program:
        i = op_of(program, tensor)
        made = tensor + ".again"
        rest = [replace(o, inputs=tuple(made if t == tensor else t for t in o.inputs)) for o in program.ops[i + 1 :]]
        extra = Op("all_reduce", (tensor,), (made,), (("group", Ref(group)),), program.ops[i].phase)
        outputs = tuple(replace(o, tensor=made) if o.tensor == tensor else o for o in program.outputs)
        tensors = {**program.tensors, made: program.tensors[tensor]}
        return replace(program, ops=(*program.ops[: i + 1], extra, *rest), tensors=tensors, outputs=outputs)

    return in_program(name, apply)


def column(name: str, key: str, value: Callable[[int], object]) -> Change:
    """A new reference with a value for every rank of a template."""

    def apply(plan: Plan) -> Plan:
        changed = [
            replace(t, bindings={**t.bindings, key: tuple(value(r) for r in t.ranks)}) if t.program.name == name else t
            for t in plan.templates
        ]
        return replace(plan, templates=tuple(changed))

    return apply


def turned(name: str, output: str) -> Change:
    """The group of an op lists its ranks in the other order."""

    def apply(plan: Plan) -> Plan:
        t = next(t for t in plan.templates if t.program.name == name)
        names = dict(zip(t.ranks, t.bindings["group.tp"], strict=True))
        groups = dict(plan.groups) | {f"{g}.turned": tuple(reversed(plan.groups[str(g)])) for g in names.values()}
        plan = column(name, "group.turned", lambda r: f"{names[r]}.turned")(replace(plan, groups=groups))
        return attrs(name, output, group=Ref("group.turned"))(plan)

    return apply


def exchanged_sends(name: str) -> Change:
    """The first two sends hand over each other's tensor."""

    def apply(program: Program) -> Program:
        first, second = [o for o in program.ops if o.name == "send"][:2]
        swap: Mapping[str | None, str | None] = {first.inputs[0]: second.inputs[0], second.inputs[0]: first.inputs[0]}
        late = op_of(program, str(second.inputs[0]))
        ops = [replace(o, inputs=(swap[o.inputs[0]],)) if o in (first, second) else o for o in program.ops]
        ops.insert(late, ops.pop(ops.index(replace(first, inputs=second.inputs))))
        return replace(program, ops=tuple(ops))

    return in_program(name, apply)


def synced_early(name: str, parameter: str) -> Change:
    """The first micro-batch's gradient is added up over dp, the second one's is added to that."""

    def apply(program: Program) -> Program:
        i, j = op_of(program, f"{parameter}.grad.2"), op_of(program, f"{parameter}.grad.dp")
        ops = list(program.ops)
        ops[i] = replace(ops[j], inputs=(f"{parameter}.grad",), outputs=(f"{parameter}.grad.2",))
        ops[j] = Op("add", (f"{parameter}.grad.2", f"{parameter}.grad.1"), (f"{parameter}.grad.dp",), (), "optimizer")
        return replace(program, ops=tuple(ops))

    return in_program(name, apply)


def other_batch(name: str) -> Change:
    """Micro-batches 0 and 1 of an input change places."""

    def swap(index: int) -> Change:
        return lineage(f"mb{index}/{name}", lambda lay: replace(lay, form=replace(lay.form, fixed=(("mb", 1 - index, 2),))))

    return together(swap(0), swap(1))
