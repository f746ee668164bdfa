"""What is said of a stage with the names of its tensors, and where elements are written out in it."""

from __future__ import annotations

from trainverify.prove.staged.align import Alignment
from trainverify.prove.staged.graphs import LOGICAL, Place
from trainverify.prove.staged.records import Part, Stage


def definition(stage: Stage, i: int, alignment: Alignment) -> tuple[Part, Place, int] | None:
    """Where an element is written out, if it is one of those."""
    if not stage.defined or not 0 <= i < alignment.count:
        return None
    name = alignment.owner[i]
    return (stage.defined[name], (LOGICAL, 0, name), i - alignment.start[name]) if name in stage.defined else None


def described(stage: Stage, alignment: Alignment) -> str:
    show = alignment.graph.show
    leaves = [show(p) for p in stage.plan.leaves]
    shown = ", ".join(leaves[:4]) + (f" and {len(leaves) - 4} more" if len(leaves) > 4 else "")
    made = ", ".join(dict.fromkeys(show(t.place) for t in stage.goal.terms))
    size = f"{len(stage.plan.calls)} plan ops, {len(stage.logical.calls)} logical ops"
    return f"stage {stage.goal.name}: {made} from {shown or 'constants'} ({size})"
