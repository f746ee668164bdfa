"""`node-limited-routing`: a token's experts lie on a limited number of nodes, groups of adjacent experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from trainverify.approximate.approximation import Changed, Setting
from trainverify.approximate.rewrite import Fragment, Unfit, substituted
from trainverify.build.tape import Tape, Tensor
from trainverify.graph.program import Op, Program

GATES: Final = {"moe_gate": 0, "moe_route": 1}  # op → which of its inputs has the experts: last dimension of logits, rows of a weight
SCORES: Final = ("max", "top2")


def node_limited_routing(program: Program, setting: Setting) -> Changed:
    found = {i: op for i, op in enumerate(program.ops) if op.name in GATES and op.phase == "forward"}
    if not found:
        raise Unfit(f"{program.name} has no op that routes tokens to experts ({', '.join(GATES)})")
    groups, top = setting.number("groups"), setting.number("top")
    score = setting.options.get("score")
    if score is not None and score not in SCORES:
        raise Unfit(f"score={score}: a group counts as its best expert (max), or as the sum of its best two (top2)")
    for op in found.values():
        _check(program, op, groups, top, score)
    changed = substituted(program, dict.fromkeys(found, _limited(groups, top, score)), setting.ops)
    return Changed(changed, f"the experts of a token are chosen from the best {top} of {groups} groups of adjacent experts")


def _check(program: Program, op: Op, groups: int, top: int, score: str | None) -> None:
    shape = program.tensors[str(op.inputs[GATES[op.name]])].shape
    experts = shape[-1] if op.name == "moe_gate" else shape[0]
    if experts % groups:
        raise Unfit(f"{op}: {experts} experts do not divide into {groups} groups")
    if top > groups:
        raise Unfit(f"{op}: {top} of {groups} groups")
    if op.get("top_k") > top * (experts // groups):
        raise Unfit(f"{op}: {op.get('top_k')} experts from {top} groups with {experts // groups} each")
    if op.get("groups", 1) not in (1, groups):
        raise Unfit(
            f"{op}: it chooses from {op.get('top_groups', 1)} of {op.get('groups')} groups already, which {groups} groups do not refine"
        )
    if score is not None and op.name != "moe_gate":
        raise Unfit(f"{op}: a group of {op.name} counts as its best expert; it has no score")


def _limited(groups: int, top: int, score: str | None) -> Fragment:
    def fragment(tape: Tape, op: Op, inputs: Sequence[Tensor | None]) -> Sequence[Tensor]:
        more = {} if score is None else {"group_score": score}
        return tape.emit(op.name, inputs, {**op.attributes, "groups": groups, "top_groups": top, **more}, op.outputs)

    return fragment
