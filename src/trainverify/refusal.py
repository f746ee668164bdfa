"""Input that cannot be used: the exception that ends a command with exit code 2, and text as one line."""

from __future__ import annotations


class Refused(Exception):
    """Input or arguments that cannot be used. `str()` is the message."""


def one_line(text: str) -> str:
    """The text with everything that does not print escaped."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
