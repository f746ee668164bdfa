"""What one engine or several made of a plan: which obligation was shown, by which engine, at which sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Literal

from trainverify.axes.system import System
from trainverify.graph.lineage import Layout
from trainverify.graph.obligations import Obligation
from trainverify.prove.algebra.engine import Proof, Prover, prove_again

if TYPE_CHECKING:  # what is not asked for is not imported: stages need a solver
    from trainverify.prove.staged.ledger import StagedProof

Engine = Literal["algebra", "smt", "both", "auto"]
FULL_SIZE, REDUCED = "full size", "reduced sizes"


class Contradiction(Exception):
    """One engine proves what the other sees fail: a bug of TrainVerify, never a verdict."""


@dataclass(frozen=True)
class Attempt:
    proved: Mapping[Obligation, tuple[str, str]]  # obligation → (engine, scope)
    failed: Mapping[Obligation, str]
    preconditions: tuple[str, ...] = ()
    lint: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    prover: Prover | None = None
    violated: Mapping[Obligation, str] = field(default_factory=dict)  # the stage in which an obligation fails
    models: Mapping[Obligation, Mapping[str, Mapping[int, Fraction]]] = field(default_factory=dict)
    strict: bool = False  # both engines were asked about everything: what one of them proves must not be refuted
    contested: Mapping[Obligation, str] = field(default_factory=dict)  # proved by the algebra, and different to the staged engine
    once: Proof | None = None  # of the algebra, while there are other ways that it has not tried

    @property
    def reduced(self) -> bool:
        """Whether something rests on reduced sizes."""
        return any(scope != FULL_SIZE for _, scope in self.proved.values())


def attempt(
    engine: Engine,
    algebra: Callable[[System, Sequence[Obligation]], Proof],
    system: System,
    wanted: Sequence[Obligation],
    lineage: tuple[Layout, ...],
    workers: int,
    progress: Callable[[str], None],
) -> Attempt:
    """`auto` hands what the algebra does not prove to the staged engine, `both` asks both about everything.

    The algebra alone is tried once: what else it can do costs as much again, and is not done before evaluation agrees.
    """
    if engine == "smt":
        return by_stages(prove_by_stages(system, wanted, lineage, workers, progress=progress))
    first = by_algebra(algebra(system, wanted), system)
    if engine != "algebra":
        first = again(first, system, wanted)
    if engine == "algebra" or (engine == "auto" and not first.failed):
        return first
    left = wanted if engine == "both" else [o for o in wanted if o in first.failed]
    second = by_stages(prove_by_stages(system, left, lineage, workers, progress=progress))
    return replace(joined(first, second), strict=engine == "both", contested=contested(first, second))


def contested(first: Attempt, second: Attempt) -> dict[Obligation, str]:
    """What stages see fail that the algebra proves: at reduced sizes a literal that is a size may be the reason."""
    from trainverify.prove.propose.search import DIFFERS

    different = [o for o, why in second.failed.items() if o in first.proved and why == DIFFERS]
    return {o: f"the algebra proves {o}, but to the staged engine it {DIFFERS}" for o in different}


def by_algebra(proof: Proof, system: System) -> Attempt:
    folded = f"folded to {proof.instances} of {system.plan.size} ranks, {proof.atoms} distinct expressions"
    shown = dict.fromkeys(proof.proved, ("algebra", FULL_SIZE))
    once = proof if proof.failed and proof.prover is not None else None
    return Attempt(shown, proof.failed, tuple(proof.preconditions), tuple(proof.lint), (folded,), proof.prover, once=once)


def again(first: Attempt, system: System, wanted: Sequence[Obligation]) -> Attempt:
    """What the algebra did not show at once, tried in its other ways."""
    if first.once is None:
        return first
    return replace(by_algebra(prove_again(system, wanted, first.once), system), once=None)


def prove_by_stages(*asked: Any, **options: Any) -> StagedProof:
    """`prove` of `staged_proof`, with what it imports."""
    from trainverify.prove.staged_proof import prove

    return prove(*asked, **options)


def by_stages(proof: StagedProof) -> Attempt:
    shown = dict.fromkeys(proof.proved, ("smt", REDUCED if proof.reduced else FULL_SIZE))
    notes = (proof.summary(), *(("interrupted: what was not reached is not proved",) if proof.interrupted else ()))
    return Attempt(shown, proof.failed, tuple(proof.preconditions), (), notes, None, proof.violated, proof.models)


def listed_too(first: Attempt, system: System, wanted: Sequence[Obligation]) -> Attempt:
    """Obligations of a small plan that were not shown, tried again with everything that is cut listed."""
    from trainverify.prove.listed import engine as listed
    from trainverify.prove.propose.pieces import pieces

    proof = listed.prove(system, [o for o in wanted if o in first.failed], pieces)
    if not proof.proved:
        return first
    proved = {**first.proved, **dict.fromkeys(proof.proved, ("algebra, listed", FULL_SIZE))}
    failed = {o: why for o, why in first.failed.items() if o not in proved}
    conditions = tuple(dict.fromkeys((*first.preconditions, *proof.preconditions)))
    lint = tuple(dict.fromkeys((*first.lint, *proof.lint)))
    note = f"listed: {len(proof.proved)} obligations rank by rank, {proof.atoms} distinct expressions"
    return replace(first, proved=proved, failed=failed, preconditions=conditions, lint=lint, notes=(*first.notes, note))


def joined(first: Attempt, second: Attempt) -> Attempt:
    """What either shows is shown, at full size if one does so."""
    proved = {**second.proved, **first.proved}
    failed = {o: f"algebra: {why}; smt: {second.failed.get(o, 'not tried')}" for o, why in first.failed.items() if o not in proved}
    conditions = tuple(dict.fromkeys((*first.preconditions, *second.preconditions)))
    return Attempt(proved, failed, conditions, first.lint, (*first.notes, *second.notes), first.prover, second.violated, second.models)
