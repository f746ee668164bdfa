"""HTML as text: elements whose attributes and texts are escaped."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape as _escape


class Raw(str):
    """Text that is HTML already."""


def text(value: object) -> str:
    """Escaped, unless it is HTML; control characters do not get through."""
    if isinstance(value, Raw):
        return value
    return _escape("".join(c if c.isprintable() or c in "\n\t" else "?" for c in str(value)))


def _attributes(attributes: Mapping[str, object]) -> str:
    shown = []
    for key, value in attributes.items():
        if value is not None and value is not False:
            own = key.rstrip("_").replace("_", "-")
            shown.append(f" {own}" if value is True else f' {own}="{text(value)}"')
    return "".join(shown)


def tag(name: str, *inside: object, **attributes: object) -> Raw:
    """An element. `class_` is the attribute `class`, `data_x` is `data-x`; None leaves an attribute out, True has no value."""
    return Raw(f"<{name}{_attributes(attributes)}>{joined(inside)}</{name}>")


def field(**attributes: object) -> Raw:
    """An input, which has no end."""
    return Raw(f"<input{_attributes(attributes)}>")


def joined(parts: Iterable[object]) -> Raw:
    return Raw("".join(text(p) for p in parts))
