"""Whether the algebra shows an equality."""

from __future__ import annotations

from prove.meaning import system_of
from trainverify.check import validate
from trainverify.graph.plan import Plan
from trainverify.graph.program import Program
from trainverify.ops import OPS
from trainverify.prove.algebra.engine import Proof, prove, prove_again
from trainverify.prove.listed import engine as listed
from trainverify.prove.propose.pieces import pieces
from trainverify.verdicts import single


def shown(logical: Program, plan: Program) -> set[str]:
    """What the algebra shows in any of its ways, without evaluation."""
    system, wanted = system_of(logical, single(plan))
    found = prove_again(system, wanted, prove(system, wanted)).proved
    return {str(o) for o in (*found, *listed.prove(system_of(logical, single(plan))[0], wanted, pieces).proved)}


def attempt(logical: Program, plan: Plan | Program) -> Proof:
    """What the algebra makes of a well-formed plan, without lists and evaluation."""
    plan = single(plan) if isinstance(plan, Program) else plan
    assert [f for f in validate(logical, plan, OPS) if f.severity != "warning"] == []
    system, wanted = system_of(logical, plan)
    return prove_again(system, wanted, prove(system, wanted))
