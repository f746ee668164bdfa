"""`capacity`: an expert takes so many tokens of every rank, in their order, and drops the others that choose it.

The choice itself stays, with everything that is compared or counted of it, such as the load of experts. What weighs the answers
of experts becomes 0 for tokens that are dropped; weights are not normalised again.
"""

# mypy: disable-error-code="no-any-return"
from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from trainverify.approximate.approximation import Changed, Setting
from trainverify.approximate.rewrite import Fragment, Unfit, substituted
from trainverify.build.tape import Tape, Tensor
from trainverify.graph.program import Op, Program

GATE: Final = "moe_gate"
COMPARISONS: Final = frozenset({"eq", "ne", "lt", "le", "gt", "ge"})


def capacity(program: Program, setting: Setting) -> Changed:
    places = setting.number("places")
    gates = [op for op in program.ops if op.name == GATE and op.phase == "forward"]
    if not gates:
        raise Unfit(f"{program.name} has no op that weighs experts ({GATE})")
    changes: dict[int, Fragment] = {}
    for gate in gates:
        (weights,) = gate.outputs
        tokens = _tokens(program, setting, weights, places)
        readers = [i for i, op in enumerate(program.ops) if weights in op.inputs and op.phase == "forward" and op.name not in COMPARISONS]
        if not readers:
            raise Unfit(f"{gate}: nothing is weighed with its result")
        for i in readers:
            if i in changes:
                raise Unfit(f"{program.ops[i]}: it reads the weights of two gates")
            changes[i] = _dropping(weights, tokens, places)
    changed = substituted(program, changes, setting.ops)
    says = f"an expert takes the first {places} of {tokens} adjacent tokens that choose it; the others have weight 0 there"
    return Changed(changed, says)


def _tokens(program: Program, setting: Setting, weights: str, places: int) -> int:
    """How many adjacent tokens share the places of an expert."""
    total = math.prod(program.tensors[weights].shape[:-1])
    if "tokens" in setting.options:
        tokens = setting.number("tokens")
        if total % tokens:
            raise Unfit(f"{weights}: {total} tokens do not divide into pieces of {tokens}")
    else:
        axes = setting.batch_axes(program)
        tokens, rest = divmod(total, setting.parts(axes))
        if rest:
            raise Unfit(f"{weights}: {total} tokens do not divide among {setting.parts(axes)} ranks ({' × '.join(axes)})")
    if places >= tokens:
        raise Unfit(f"{weights}: {places} places for {tokens} tokens: none is ever dropped")
    return tokens


def _dropping(weights: str, tokens: int, places: int) -> Fragment:
    """An op that reads weights, with those of dropped tokens set to 0."""

    def fragment(tape: Tape, op: Op, inputs: Sequence[Tensor | None]) -> Sequence[Tensor]:
        given = next(t for t in inputs if t is not None and t.name == weights)
        chosen = tape.float(tape.gt(given, value=0, name=f"{weights}.wanted"), name=f"{weights}.wanted.float")
        rows = tape.reshape(chosen, shape=(-1, tokens, given.shape[-1]), name=f"{weights}.wanted.rows")
        before = tape.sub(tape.cumsum(rows, dim=1, name=f"{weights}.count"), rows, name=f"{weights}.before")
        taken = tape.float(tape.lt(before, value=places, name=f"{weights}.taken"), name=f"{weights}.taken.float")
        taken = tape.reshape(taken, shape=given.shape, name=f"{weights}.taken.tokens")
        kept = tape.mul(given, taken, name=f"{weights}.kept")
        return tape.emit(op.name, [kept if t == given else t for t in inputs], op.attributes, op.outputs)

    return fragment
