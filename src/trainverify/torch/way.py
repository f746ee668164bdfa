"""One step, and one combination of ways in it, as the reference and the ranks take it."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from trainverify.torch.agreement import disagreements, left_over, numbers, restructured
from trainverify.torch.captured import Captured

Choices = tuple[bool, ...]


@dataclass(frozen=True)
class Way:
    """One step, and one combination of ways in it: what was captured, and which branches were taken."""

    reference: Captured
    ranks: tuple[Captured, ...]
    number: int = 1  # of the step

    @property
    def choices(self) -> Choices:
        return tuple(b.taken for b in self.reference.branches)

    def __str__(self) -> str:
        taken = [f"{b.name} is {b.taken}" for b in self.reference.branches]
        return ", ".join([*taken, f"it is step {self.number}"] if self.number > 1 else taken)

    def same(self, other: Way) -> bool:
        """Whether the same was captured, but for small numbers that are compared by name."""
        if len(self.ranks) != len(other.ranks):
            return False
        pairs = zip((self.reference, *self.ranks), (other.reference, *other.ranks), strict=True)
        return all(a is b or _alike(a, b) for a, b in pairs)

    def settled(self) -> bool:
        return self.unsettled() is None

    def unsettled(self) -> str | None:
        """What is wrong that programs do not show: ranks do not say the same, or small numbers and what decides on later steps are others
        than in the reference."""
        ledgers = {c.rank if c.rank is not None else i: c.ledger for i, c in enumerate(self.ranks)}
        found = itertools.chain(
            numbers(self.reference.ledger, ledgers),
            disagreements([c.groups for c in self.ranks], ledgers),
            restructured(self.reference, self.ranks),
            left_over(self.reference, self.ranks),
        )
        first = next(found, None)
        return None if first is None else first.message + (f" ({first.source})" if first.source else "")

    def disagreement(self) -> str | None:
        """Ranks that decide on other things than the reference."""
        for r, c in enumerate(self.ranks):
            mine = tuple(b.taken for b in c.branches)
            if mine != self.choices:
                lines = ", ".join(str(b.source) for b in (*self.reference.branches, *c.branches))
                return f"rank {r} has {len(mine)} conditions on data and the reference {len(self.choices)} ({lines}): no verdict"
        return None


def _alike(a: Captured, b: Captured) -> bool:
    seen = [
        (c.program, c.groups, c.placed, c.unused, c.findings, c.ledger.messages, c.left, [(x.taken, x.function) for x in c.branches])
        for c in (a, b)
    ]
    return seen[0] == seen[1]
