"""TrainVerify: is this distributed training step the single-device model it was made from?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainverify.build.plan import plan
from trainverify.build.program import program
from trainverify.complete.step import SGD, AdamW, complete
from trainverify.graph.lineage import Layout, Part, Partial, Parts, Pattern, Placements, Replicate, Run, Shard, layout
from trainverify.graph.mesh import Mesh
from trainverify.graph.plan import Plan, expand, fold
from trainverify.graph.program import Program
from trainverify.ops import OPS

if TYPE_CHECKING:  # the engines are loaded when something is verified
    from trainverify.verdicts import verify

__all__ = [
    "OPS",
    "SGD",
    "AdamW",
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
    "complete",
    "expand",
    "fold",
    "layout",
    "plan",
    "program",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name == "verify":
        from trainverify.verdicts import verify

        globals()["verify"] = verify
        return verify
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
