"""What is unusual in a plan: cells unlike their like on one device, on other devices, in other micro-batches, or unlike what the plan says.

A suspect is no verdict. It comes with a mended plan, if we know how it should be, so that it can be tried whether it is at fault.
"""

from trainverify.nnscaler.dump import Dump
from trainverify.nnscaler.suspects.adapters import adapters
from trainverify.nnscaler.suspects.backwards import backwards
from trainverify.nnscaler.suspects.kinds import Member, Suspect
from trainverify.nnscaler.suspects.labels import labels
from trainverify.nnscaler.suspects.operations import operations
from trainverify.nnscaler.suspects.order import order
from trainverify.nnscaler.suspects.reducers import reducers
from trainverify.nnscaler.suspects.sequence import runs, wiring

__all__ = ["Member", "Suspect", "suspects"]


def suspects(logical: Dump, dump: Dump) -> list[Suspect]:
    """All of them, in the order of a step."""
    here = [*operations(logical, dump), *labels(dump), *backwards(dump), *adapters(dump)]
    return [*here, *wiring(dump), *runs(dump), *reducers(dump), *order(dump)]
