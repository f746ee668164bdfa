"""Layouts of `gradient of w`: whichever tensor of the logical program is that."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from trainverify.graph.plan import Plan
from trainverify.graph.program import Program

GRADIENT: Final = "gradient of "  # as an output of this role prints


def with_gradients(logical: Program, plan: Plan) -> Plan:
    """The same plan with the names of tensors; a gradient that the logical program does not report stays as it is."""
    if not any(lay.logical.startswith(GRADIENT) for lay in plan.lineage):
        return plan
    tensors = {f"{GRADIENT}{o.of}": o.tensor for o in logical.outputs if o.role == "gradient"}
    known = {name: tensor for name, tensor in tensors.items() if name not in logical.tensors}
    return replace(plan, lineage=tuple(replace(lay, logical=known.get(lay.logical, lay.logical)) for lay in plan.lineage))
