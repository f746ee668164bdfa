"""Where a plan that differs goes another way: the first logical tensor that an output needs and no tensors of the plan make up."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from trainverify.primitives.node import topological
from trainverify.prove.propose.table import Table
from trainverify.prove.staged.claims import Claim
from trainverify.prove.staged.elements import Elements
from trainverify.prove.staged.graphs import LOGICAL


def first_violated(elements: Elements, table: Table, claims: Collection[Claim], outputs: Sequence[str]) -> list[str]:
    """For each of these outputs the stage that fails, if possible one that all of them need."""
    wrong = _wrong(elements, table, claims)
    cones = [_needed(elements, output) for output in outputs]
    shared = set.intersection(*cones) if cones else set()
    common = next((n for n in wrong if n in shared), None)
    found = []
    for output, cone in zip(outputs, cones, strict=True):
        name = common or next((n for n in wrong if n in cone), output)
        call = elements.graph.makers.get((LOGICAL, 0, name))
        inputs = [] if call is None else [i[2] for i in call.inputs if i is not None]
        found.append(f"stage {name}" if call is None else f"stage {name} from {', '.join(inputs)}: {call.text}")
    return found


def _needed(elements: Elements, output: str) -> set[str]:
    """Everything that a logical tensor is made of, and itself."""
    needed: set[str] = set()
    stack = [output]
    while stack:
        name = stack.pop()
        if name not in needed:
            needed.add(name)
            call = elements.graph.makers.get((LOGICAL, 0, name))
            stack += [] if call is None else [i[2] for i in call.inputs if i is not None]
    return needed


def _wrong(elements: Elements, table: Table, claims: Collection[Claim]) -> list[str]:
    """Logical tensors that no tensors of the plan make up, and of which nothing right is made either: there the plan goes another way.

    Updates do not count as right: a wrong gradient may hardly show in them.
    """
    small, rays = elements.small, table.rays
    held = {r for claim in claims if claim.place[0] != LOGICAL for r in rays[claim.ids[elements.inside(claim.ids)]].tolist()}
    there: dict[str, bool] = {}
    for name in elements.start:
        if name in small.logical.sources:
            continue
        known = [i for i in elements.ids[name].reshape(-1).tolist() if table.known(i)]
        if known:
            there[name] = all(int(rays[i]) in held for i in known)
    right: set[str] = set()
    for step in reversed(small.logical_steps):
        for o, node in zip(step.outputs, step.nodes, strict=True):
            if step.op.phase in ("optimizer", "metric"):
                continue
            if there.get(o) or o in right:
                right.update(str(step.inputs[n.attrs[0]]) for n in topological([node]) if n.prim == "input")
    return [n for n, whole in there.items() if not whole and n not in right]
