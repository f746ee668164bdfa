"""Forms of tensors by name, and why some have none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from trainverify.prove.algebra.memo import Outcome
from trainverify.prove.algebra.places import Value


class Missing(Exception):
    """A tensor without a form, because an op before it has none."""


class Later(Protocol):
    """Values that are made when somebody asks."""

    def value(self, n: int) -> Value | Exception | None: ...


class Values(dict[str, "Value | Exception"]):
    """Forms of tensors by name, some of which are made when somebody asks."""

    def __init__(self) -> None:
        super().__init__()
        self.later: dict[str, tuple[Later, int]] = {}

    def get(self, name: str, default: Any = None) -> Any:
        found = super().get(name)
        if found is None and name in self.later:
            outcome, n = self.later[name] if isinstance(self.later[name][0], Outcome) else self.later.pop(name)
            value = outcome.value(n)
            if value is None:
                return default
            self[name] = found = value
        return default if found is None else found

    def given(self, name: str) -> Value | tuple[Outcome, int] | None:
        """A form, or the block that will make it; None if there is none."""
        waiting = self.later.get(name)
        if waiting is not None and isinstance(waiting[0], Outcome):
            return waiting  # type: ignore[return-value]
        found = self.get(name)
        return found if isinstance(found, dict) else None

    def all_items(self) -> Iterator[tuple[str, Value | Exception]]:
        """Every tensor, also those that nobody has asked for."""
        for name in list(self.later):
            self.get(name)
        yield from self.items()


def get(env: Mapping[str, Value | Exception], name: str) -> Value:
    value = env.get(name)
    if value is None:
        raise Missing(f"{name} is never computed")
    if isinstance(value, Exception):
        raise value if isinstance(value, Missing) else Missing(str(value))
    return value
