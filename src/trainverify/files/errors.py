"""What is wrong with a file: one line with the file, the path inside it and the reason."""

from __future__ import annotations

import json
import os
import re
from typing import Any, Final

from trainverify.refusal import Refused, one_line

_LONGEST: Final = {"path": 300, "where": 300, "reason": 400}
_PLAIN_KEY: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class FileError(Refused):
    """A file that cannot be read or written. `str()` is one line: `FILE: PATH.INSIDE[3]: reason`."""

    def __init__(self, path: str | os.PathLike[str], where: str, reason: str):
        self.path = os.fsdecode(path)
        self.where = where
        self.reason = reason
        super().__init__(self.path, where, reason)

    def __str__(self) -> str:
        parts = (("path", self.path), ("where", self.where), ("reason", self.reason))
        return ": ".join(clip(one_line(text), _LONGEST[name]) for name, text in parts if text)


class Bad(Exception):
    """A finding on its way out of the file: every level adds its own step to the path."""

    def __init__(self, reason: str, *steps: str | int):
        super().__init__(reason)
        self.reason = reason
        self.steps = list(reversed(steps))  # innermost first

    def inside(self, *steps: str | int) -> Bad:
        self.steps += reversed(steps)
        return self

    @property
    def where(self) -> str:
        return "".join(step(s) for s in reversed(self.steps)).removeprefix(".")


class Wrong:
    """Stands in a parsed tree where the text has something that JSON allows, or Python's parser does, and we do not."""

    def __init__(self, reason: str):
        self.reason = reason


def step(key: str | int) -> str:
    """One step of a path: `.ops`, `[3]` or `["layer.0.weight"]`."""
    if isinstance(key, int):
        return f"[{key}]"
    return f".{key}" if _PLAIN_KEY.fullmatch(key) else f"[{show(key)}]"


def clip(text: str, longest: int) -> str:
    return text if len(text) <= longest else text[: longest - 1] + "…"


def show(value: Any) -> str:
    """A value of the file in a message, cut to 60 characters."""
    if isinstance(value, str):
        return one_line(json.dumps(clip(value, 60), ensure_ascii=False))
    if isinstance(value, int) and value.bit_length() > 200:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, bool) or value is None or isinstance(value, int | float):
        return json.dumps(value)
    return kind_of(value)


def kind_of(value: Any) -> str:
    names: dict[type, str] = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", int: "an integer", float: "a number"}
    return "null" if value is None else names.get(type(value), f"a value of type {type(value).__name__}")


def expected(what: str, value: Any) -> Bad:
    """The finding that a value is not what the format asks for."""
    if isinstance(value, Wrong):
        return Bad(value.reason)
    scalar = isinstance(value, str | int | float)
    return Bad(f"expected {what}, got {show(value) if scalar else kind_of(value)}")
