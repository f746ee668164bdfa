"""TrainVerify: is this distributed training step the single-device model it was made from?"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:  # each is imported when it is first used
    from trainverify.approximate import Approximation
    from trainverify.build.plan import plan
    from trainverify.build.program import program
    from trainverify.completion.step import SGD, AdamW, complete
    from trainverify.completion.steps import several_steps
    from trainverify.graph.lineage import Layout, Part, Partial, Parts, Pattern, Placements, Replicate, Run, Shard, layout
    from trainverify.graph.mesh import Mesh
    from trainverify.graph.plan import Plan, expand, fold
    from trainverify.graph.program import Program
    from trainverify.ops import OPS
    from trainverify.testing.assertion import assert_equivalent
    from trainverify.verdicts import verify

__all__ = [
    "OPS",
    "SGD",
    "AdamW",
    "Approximation",
    "Layout",
    "Mesh",
    "Part",
    "Partial",
    "Parts",
    "Pattern",
    "Placements",
    "Plan",
    "Program",
    "Replicate",
    "Run",
    "Shard",
    "assert_equivalent",
    "complete",
    "expand",
    "fold",
    "layout",
    "plan",
    "program",
    "several_steps",
    "verify",
]

# The module that defines each name.
_HOMES: Final = {
    "OPS": "trainverify.ops",
    "SGD": "trainverify.completion.step",
    "AdamW": "trainverify.completion.step",
    "Approximation": "trainverify.approximate",
    "Layout": "trainverify.graph.lineage",
    "Mesh": "trainverify.graph.mesh",
    "Part": "trainverify.graph.lineage",
    "Partial": "trainverify.graph.lineage",
    "Parts": "trainverify.graph.lineage",
    "Pattern": "trainverify.graph.lineage",
    "Placements": "trainverify.graph.lineage",
    "Plan": "trainverify.graph.plan",
    "Program": "trainverify.graph.program",
    "Replicate": "trainverify.graph.lineage",
    "Run": "trainverify.graph.lineage",
    "Shard": "trainverify.graph.lineage",
    "assert_equivalent": "trainverify.testing.assertion",
    "complete": "trainverify.completion.step",
    "expand": "trainverify.graph.plan",
    "fold": "trainverify.graph.plan",
    "layout": "trainverify.graph.lineage",
    "plan": "trainverify.build.plan",
    "program": "trainverify.build.program",
    "several_steps": "trainverify.completion.steps",
    "verify": "trainverify.verdicts",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
    return value
