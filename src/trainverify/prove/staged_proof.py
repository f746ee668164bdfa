"""Proofs at reduced sizes: claims are proposed from values at random points, and stages show them or not."""

from __future__ import annotations

from collections.abc import Sequence

from trainverify.axes.system import System
from trainverify.evaluate.run import NotComputed
from trainverify.graph.lineage import Layout
from trainverify.graph.obligations import Obligation
from trainverify.prove.propose.proposal import Proposal
from trainverify.prove.propose.search import DIFFERS, Search
from trainverify.prove.scope import NoStages, different, looked_at
from trainverify.prove.staged.elements import Contradiction, Elements
from trainverify.prove.staged.execute import DEFAULT, Limits
from trainverify.prove.staged.graphs import Graph
from trainverify.prove.staged.ledger import Progress, StagedProof


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
        proposal = proposed(system, wanted, lineage)
    except NoStages as error:
        progress("running both programs")
        differ = different(system, wanted, lineage) if error.too_large else ()
        return StagedProof(failed={o: DIFFERS if o in differ else str(error) for o in wanted})
    search = Search(proposal, wanted, workers, limits, progress)
    proof = _confirmed(search)
    if not proposal.merged or proof.interrupted or not (search.misled or (proof.failed and DIFFERS not in proof.failed.values())):
        return proof
    progress("again, without merging logical elements of equal values")
    unmerged = Proposal(proposal.elements, lineage, wanted, merge=False)
    other = _confirmed(Search(unmerged, wanted, workers, limits, progress))
    proof.interrupted |= other.interrupted
    return other if len(other.proved) > len(proof.proved) else proof


def _confirmed(search: Search) -> StagedProof:
    """What a search found, as far as its ledger says so too."""
    proof = search.run()
    proof.proved = search.ledger.proved(proof.proved)
    return proof


def proposed(system: System, wanted: Sequence[Obligation], lineage: tuple[Layout, ...]) -> Proposal:
    """Which elements of the plan seem to be which of the logical program, at reduced sizes."""
    small = looked_at(system, wanted, lineage)
    try:
        return Proposal(Elements(Graph(small), lineage), lineage, wanted)
    except NotComputed as error:
        raise NoStages(f"the plan could not be run: {error}") from error
    except Contradiction as error:
        raise NoStages(f"the assumptions cannot all hold: {error}") from error
