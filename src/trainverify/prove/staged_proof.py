"""Proofs at reduced sizes: claims are proposed from values at random points, and stages show them or not."""

from __future__ import annotations

from collections.abc import Sequence

from trainverify.axes.system import System
from trainverify.evaluate.run import NotComputed
from trainverify.graph.lineage import Layout
from trainverify.graph.obligations import Obligation
from trainverify.prove.propose.proposal import Proposal
from trainverify.prove.scope import NoStages, different, looked_at
from trainverify.prove.staged.elements import Contradiction, Elements
from trainverify.prove.staged.engine import DIFFERS, Engine, Progress, StagedProof
from trainverify.prove.staged.execute import DEFAULT, Limits
from trainverify.prove.staged.graphs import Graph


def prove(
    system: System,
    wanted: Sequence[Obligation],
    lineage: tuple[Layout, ...],
    workers: int = 0,
    limits: Limits = DEFAULT,
    progress: Progress = lambda text: None,
) -> StagedProof:
    """Try to prove every obligation at reduced sizes."""
    try:
        elements, proposal = proposed(system, wanted, lineage)
    except NoStages as error:
        progress("running both programs")
        differ = different(system, wanted, lineage) if error.too_large else ()
        return StagedProof(failed={o: DIFFERS if o in differ else str(error) for o in wanted})
    engine = Engine(elements, proposal, wanted, workers, limits, progress)
    proof = engine.run()
    if not proposal.merged or proof.interrupted or not (engine.misled or (proof.failed and DIFFERS not in proof.failed.values())):
        return proof
    progress("once more, whatever values elements of the logical program share")
    apart = Proposal(elements, lineage, wanted, apart=True)
    other = Engine(elements, apart, wanted, workers, limits, progress).run()
    proof.interrupted |= other.interrupted
    return other if len(other.proved) > len(proof.proved) else proof


def proposed(system: System, wanted: Sequence[Obligation], lineage: tuple[Layout, ...]) -> tuple[Elements, Proposal]:
    """Elements of both programs at reduced sizes, and which of the plan's seem to be which of the logical program."""
    small = looked_at(system, wanted, lineage)
    try:
        elements = Elements(Graph(small), lineage)
        return elements, Proposal(elements, lineage, wanted)
    except NotComputed as error:
        raise NoStages(f"the plan could not be run: {error}") from error
    except Contradiction as error:
        raise NoStages(f"the assumptions cannot all hold: {error}") from error
