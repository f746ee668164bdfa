"""What is proposed of a pair of programs."""

from __future__ import annotations

import trainverify as tv
from trainverify.graph.obligations import obligations
from trainverify.graph.plan import units
from trainverify.ops import OPS
from trainverify.prove.propose.proposal import Proposal
from trainverify.prove.staged.elements import Elements
from trainverify.prove.staged.graphs import Graph
from trainverify.prove.staged.reduce import reduced
from trainverify.verdicts import related


def aligned(program: tv.Program, made: tv.Plan) -> Proposal:
    parts = units(made)
    wanted, _ = obligations(program, made, parts)
    elements = Elements(Graph(reduced(related(program, made, OPS, parts, wanted))), made.lineage)
    return Proposal(elements, made.lineage, wanted)
