"""Names, strings, types, sources and attribute values of a file."""

from __future__ import annotations

import math
import re
from fractions import Fraction
from typing import Any, Final

from trainverify.files.errors import Bad, expected, show
from trainverify.files.limits import Limits
from trainverify.files.scalars import each
from trainverify.graph.program import Ref, Source, Value
from trainverify.graph.types import DTYPES, TensorType
from trainverify.ops.table import LITERAL_BITS

FLOATS: Final = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}
WORD: Final = 1 << 63
_TYPE: Final = re.compile(r"([a-z0-9]+)\[((?:0|[1-9][0-9]*)(?:,(?:0|[1-9][0-9]*))*)?\]", re.ASCII)
_FRACTION: Final = re.compile(r"(-?[0-9]+)/([0-9]+)", re.ASCII)
_LINE: Final = re.compile(r"(.+):(0|[1-9][0-9]{0,8})", re.ASCII)


class ValueDecoder:
    """Holds what is counted over all of a file, and one copy of every string and type."""

    def __init__(self, limits: Limits):
        self.limits = limits
        self.used: dict[str, int] = {}
        self.level = 0  # of lists inside of the value that is being read
        self.types: dict[str, TensorType] = {}
        self.files: dict[str, Source] = {}
        self.strings: dict[str, str] = {}
        self.names: dict[str, str] = {}

    def count(self, what: str, n: int) -> None:
        self.used[what] = self.used.get(what, 0) + n
        most: int = getattr(self.limits, what)
        if self.used[what] > most:
            raise Bad(f"more than {most} {'items in ranges and runs' if what == 'expanded' else what}")

    def name(self, data: Any) -> str:
        known = self.names.get(data) if type(data) is str else None
        if known is not None:
            return known
        if type(data) is not str:
            raise expected("a name", data)
        if not data:
            raise Bad("a name must not be empty")
        if len(data) > self.limits.name:
            raise Bad(f"a name of {len(data)} characters; the limit is {self.limits.name}")
        if not data.isprintable():
            raise Bad(f"name {show(data)} has characters that do not print")
        self.names[data] = data
        return data

    def string(self, data: str) -> str:
        known = self.strings.get(data)
        if known is not None:
            return known
        if len(data) > self.limits.string:
            raise Bad(f"a string of {len(data)} characters; the limit is {self.limits.string}")
        if not data.isascii() and any("\ud800" <= c <= "\udfff" for c in data):
            raise Bad("a string with half a surrogate pair")
        self.strings[data] = data
        return data

    def type(self, data: Any) -> TensorType:
        known = self.types.get(data) if type(data) is str else None
        if known is not None:
            return known
        if type(data) is not str:
            raise expected("a type such as f32[2048,256]", data)
        if len(data) > self.limits.name:
            raise Bad(f"a type of {len(data)} characters; the limit is {self.limits.name}")
        match = _TYPE.fullmatch(data)
        if match is None:
            raise Bad(_why_no_type(data))
        if match[1] not in DTYPES:
            raise Bad(f"type {show(data)} has an unknown dtype; known: {', '.join(DTYPES)}")
        shape = tuple(map(int, match[2].split(","))) if match[2] else ()
        if len(shape) > self.limits.dimensions:
            raise Bad(f"a tensor of {len(shape)} dimensions; the limit is {self.limits.dimensions}")
        if math.prod(max(s, 1) for s in shape) > self.limits.elements:
            raise Bad(f"type {show(data)} has more than {self.limits.elements} elements")
        self.types[data] = result = TensorType(shape, next(d for d in DTYPES if d == match[1]))
        return result

    def source(self, data: Any) -> Source:
        known = self.files.get(data) if type(data) is str else None
        if known is not None:
            return known
        match = _LINE.fullmatch(data) if type(data) is str else None
        if match is None or not data.isprintable():
            raise expected("a source such as model.py:12", data)
        if len(data) > self.limits.name:
            raise Bad(f"a source of {len(data)} characters; the limit is {self.limits.name}")
        self.files[data] = result = Source(self.strings.setdefault(match[1], match[1]), int(match[2]))
        return result

    def value(self, data: Any) -> Value:
        kind = type(data)
        if kind is str:
            return self.string(data)
        if kind is int:
            if not -WORD < data < WORD and data.bit_length() > LITERAL_BITS:
                raise Bad(f"an integer of {data.bit_length()} bits; the limit is {LITERAL_BITS}")
            return data  # type: ignore[no-any-return]
        if kind is list:
            self.level += 1
            if self.level > self.limits.nesting:
                raise Bad(f"lists nested more than {self.limits.nesting} deep")
            items = each(self.value, data)
            self.level -= 1
            return items
        if kind is dict:
            return self.tagged(data)
        if data is None or kind is bool or (kind is float and math.isfinite(data)):
            return data  # type: ignore[no-any-return]
        raise expected("a value", data)

    def tagged(self, data: dict[str, Any]) -> Value:
        """A value that JSON has no spelling for: one key says what it is."""
        if len(data) != 1:
            raise Bad('expected one of {"ref": …}, {"fraction": …}, {"float": …}')
        ((tag, text),) = data.items()
        try:
            if tag == "ref":
                return Ref(self.name(text))
            if tag == "float":
                if type(text) is not str or text not in FLOATS:
                    raise expected('"inf", "-inf" or "nan"', text)
                return FLOATS[text]
            if tag == "fraction":
                return self.fraction(text)
        except Bad as e:
            raise e.inside(tag) from None
        raise Bad("unknown field; known: ref, fraction, float", tag)

    def fraction(self, data: Any) -> Fraction:
        match = _FRACTION.fullmatch(data) if type(data) is str and len(data) < LITERAL_BITS else None
        if match is None:
            raise expected('a fraction such as "1/3"', data)
        top, bottom = int(match[1]), int(match[2])
        if bottom == 0:
            raise Bad(f"fraction {show(data)} divides by zero")
        if max(top.bit_length(), bottom.bit_length()) > LITERAL_BITS:
            raise Bad(f"a fraction of more than {LITERAL_BITS} bits")
        return Fraction(top, bottom)


def _why_no_type(text: str) -> str:
    match = re.fullmatch(r"[^\[\]]*\[([^\[\]]*)\]", text)
    for dim in match[1].split(",") if match else ():
        if re.fullmatch(r"-[0-9]+", dim):
            return f"type {show(text)} has a negative dimension"
        if not re.fullmatch(r"0|[1-9][0-9]*", dim):
            return f"type {show(text)}: dimension {show(dim)} is not a whole number"
    return f"expected a type such as f32[2048,256], got {show(text)}"
