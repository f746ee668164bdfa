"""TrainVerify: is this distributed training step the single-device model it was made from?"""

from trainverify.build.plan import plan
from trainverify.build.program import program
from trainverify.complete.step import SGD, AdamW, complete
from trainverify.graph.lineage import Layout, Part, Partial, Parts, Pattern, Placements, Replicate, Run, Shard, layout
from trainverify.graph.mesh import Mesh
from trainverify.graph.plan import Plan, expand, fold
from trainverify.graph.program import Program
from trainverify.ops import OPS
from trainverify.verify import verify

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
