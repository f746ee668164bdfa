"""Which outputs differ by themselves, and which only because they are computed from others that differ."""

from __future__ import annotations

from collections.abc import Collection

from trainverify.graph.program import Program


def computed_from(logical: Program, tensors: Collection[str]) -> set[str]:
    """Tensors of a program that are made of these, without those that are only given."""
    found: set[str] = set()
    for op in logical.ops:
        if any(i in found or i in tensors for i in op.inputs if i is not None):
            found.update(op.outputs)
    return found


def heirs(logical: Program, different: Collection[str], first: str | None, most: int) -> set[str]:
    """Of tensors that differ, those that say nothing new: made of others that differ; and of those made of the first wrong tensor all
    but `most`."""
    found = computed_from(logical, different) & set(different)
    rest = [t for t in different if t not in found]
    if first is not None:
        after = computed_from(logical, {first})
        found.update([t for t in rest if t in after][most:])
    return found
