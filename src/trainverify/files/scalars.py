"""The smallest checks: fields of an object, whole numbers, choices, lists of pairs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar

from trainverify.files.errors import Bad, clip, expected, show

T = TypeVar("T")


def fields(data: Any, needed: tuple[str, ...], more: tuple[str, ...] = ()) -> None:
    """An object with these fields and no others."""
    if type(data) is not dict:
        raise expected("an object", data)
    known = (*needed, *more)
    for key in data:
        if key not in known:
            raise Bad(f"unknown field; known: {', '.join(known)}", key if isinstance(key, str) else clip(str(key), 60))
    for key in needed:
        if key not in data:
            raise Bad("missing", key)


def integer(data: Any, low: int, high: int) -> int:
    if type(data) is not int:
        raise expected("an integer", data)
    if data < low:
        raise Bad(f"{show(data)} is less than {low}")
    if data > high:
        raise Bad(f"{show(data)} is more than {high}")
    return data


def count_within(items: range) -> int:
    """Length of a range, also of one that is too long for `len`."""
    return max(0, -((items.start - items.stop) // items.step))


def one_of(data: dict[str, Any], key: str, choices: tuple[str, ...]) -> Any:
    value = data[key]
    for choice in choices:
        if type(value) is str and choice == value:
            return choice
    raise expected(" or ".join(filter(None, (", ".join(map(show, choices[:-1])), show(choices[-1])))), value).inside(key)


def listed(data: Any) -> list[Any]:
    if type(data) is not list:
        raise expected("a list", data)
    return data


def pairs(data: Any, name: Callable[[Any], str], convert: Callable[[Any], T]) -> tuple[tuple[str, T], ...]:
    """A list `[[name, something], …]` in which no name comes twice."""
    result: dict[str, T] = {}
    for i, pair in enumerate(listed(data)):
        try:
            if type(pair) is not list or len(pair) != 2:
                raise expected("a pair", pair)
            key = name(pair[0])
            if key in result:
                raise Bad(f"{show(key)} is given twice")
            result[key] = convert(pair[1])
        except Bad as e:
            raise e.inside(i) from None
    return tuple(result.items())


def each(convert: Callable[[Any], T], items: list[Any]) -> tuple[T, ...]:
    """Converts a list; a finding gets the position of its item."""
    result: list[T] = []
    try:
        for item in items:
            result.append(convert(item))
    except Bad as e:
        raise e.inside(len(result)) from None
    return tuple(result)


_NEEDED: Final[Any] = object()


def at(convert: Callable[[Any], T], data: dict[str, Any], key: str, default: Any = _NEEDED) -> T:
    """Converts one field; a finding gets its name."""
    if default is not _NEEDED and key not in data:
        return default  # type: ignore[no-any-return]
    try:
        return convert(data[key])
    except Bad as e:
        raise e.inside(key) from None
