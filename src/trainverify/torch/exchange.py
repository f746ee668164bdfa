"""Python objects that ranks give each other: what ranks gave in one capture, they get in the next one, until that changes nothing.

In the first capture each rank gets copies of its own. Where all ranks give the same, there is no second one."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final, TypeVar

from trainverify.torch.captured import Steps
from trainverify.translate.targets import CaptureError

T = TypeVar("T")
Sent = dict[tuple[int, ...], list[tuple[str, bytes]]]  # members of a group → how, and what
MOST: Final = 4  # captures


@dataclass
class Given:
    """What every rank gave, by rank; processes that are forked have it."""

    by_rank: Mapping[int, Sent] = field(default_factory=dict)


GIVEN: Final = Given()


def theirs(members: tuple[int, ...], number: int, how: str) -> list[bytes] | None:
    """What the members of a group gave as their `number`-th object."""
    found = [GIVEN.by_rank.get(r, {}).get(members, [])[number : number + 1] for r in members]
    return [f[0][1] for f in found] if found and all(f and f[0][0] == how for f in found) else None


def digest() -> str:
    return hashlib.sha256(repr(sorted(GIVEN.by_rank.items())).encode()).hexdigest() if GIVEN.by_rank else ""


def settled(capture: Callable[[], list[T]], steps: Callable[[T], Steps | None]) -> list[T]:
    """What all ranks capture, the first of them first; a rank that could not be captured has no steps."""
    before: dict[int, Sent] = {}
    for _ in range(MOST):
        with _given(before):
            found = capture()
        captured = [steps(f) for f in found]
        if any(c is None for c in captured):
            return found
        sent = {rank: _sent(c) for rank, c in enumerate(captured) if c is not None}
        if sent == before or not (before or _differ(sent)):  # what ranks got is what the others give now
            return found
        before = sent
    raise CaptureError(f"the Python objects that ranks exchange change in each of {MOST} captures, by what ranks get")


@contextmanager
def _given(by_rank: Mapping[int, Sent]) -> Iterator[None]:
    GIVEN.by_rank = by_rank
    try:
        yield
    finally:
        GIVEN.by_rank = {}


def _sent(steps: Steps) -> Sent:
    found: Sent = {}
    for c in steps:
        for members, objects in c.ledger.sent.items():
            found.setdefault(members, []).extend(objects)
    return found


def _differ(sent: Mapping[int, Sent]) -> bool:
    """Whether members of a group give different objects, by the same calls."""
    for rank, groups in sent.items():
        for members, objects in groups.items():
            for other in members:
                others = sent.get(other, {}).get(members, [])
                if rank in members and others != objects and [how for how, _ in others] == [how for how, _ in objects]:
                    return True
    return False


__all__ = ["GIVEN", "Sent", "digest", "settled", "theirs"]
