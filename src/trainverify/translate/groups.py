"""Groups of ranks by name. A name has one list of members, in their order: anything else is an error of ours, and never goes unseen."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

Members = tuple[int, ...]


def bind(groups: dict[str, Members], name: str, members: Sequence[int]) -> str:
    """Name a group. The same members in another order are another group."""
    found = tuple(members)
    if groups.setdefault(name, found) != found:
        raise AssertionError(f"the group {name} is bound twice: to {groups[name]} and to {found}")
    return name


def joined(several: Iterable[Mapping[str, Members]]) -> dict[str, Members]:
    """The groups that several programs name."""
    found: dict[str, Members] = {}
    for groups in several:
        for name, members in groups.items():
            bind(found, name, members)
    return found


def by_members(label: str, members: Sequence[int]) -> str:
    """A name that only these members in this order have."""
    return f"{label}.{'.'.join(map(str, members))}"


__all__ = ["bind", "by_members", "joined"]
