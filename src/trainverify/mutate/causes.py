"""Why there is no verdict, without names and numbers, so that reasons can be counted."""

from __future__ import annotations

import re
from typing import Final

CAUSES: Final = (  # (what a reason contains, what it is counted as), the first that fits
    ("got ", "different forms"),
    ("different forms", "different forms"),
    ("could not be aligned", "axes that could not be aligned"),
    ("held as", "a dimension held in other digits than the logical one"),
    (" digits on [", "digits that an axis does not have"),
    (" on [", "a cut that does not divide the digits of an axis"),
    ("a piece [", "a piece across digits"),
    ("per mesh coordinate", "an offset per mesh coordinate across digits"),
)


def generic(reason: str) -> str:
    """A reason without names and numbers."""
    text = reason.split(": ")[-1]
    for part, cause in CAUSES:
        if part in reason:
            return cause
    text = re.sub(r"\[[^\n]*\]", "[…]", text)
    return re.sub(r"\d+(\.\d+)?(e-?\d+)?", "N", text)[:100]
