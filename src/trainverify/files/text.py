"""From bytes to a tree of plain values: decompression, bounds on what may be parsed, and the JSON itself."""

from __future__ import annotations

import gzip
import io
import json
import math
import os
import stat
import sys
import zlib
from typing import Any, BinaryIO, Final

import numpy as np

from trainverify.files.errors import Bad, Wrong, show
from trainverify.files.limits import Limits

STDIN: Final = "-"
_GZIP: Final = b"\x1f\x8b"
_CHUNK: Final = 1 << 18
_STEPS: Final = np.zeros(256, np.int8)  # what a byte does to the depth
_STEPS[[ord("["), ord("{")]] = 1
_STEPS[[ord("]"), ord("}")]] = -1
_MARKS: Final = _STEPS != 0
_MARKS[[ord('"'), ord(",")]] = True


def load(path: str | os.PathLike[str], limits: Limits) -> Any:
    """The parsed tree of a file. Objects with a key given twice, NaN and overflowing numbers are left as `Wrong`."""
    return parse(content(path, limits), limits)


def content(path: str | os.PathLike[str], limits: Limits) -> bytes:
    """The text of a file (`-`: of standard input), decompressed if it starts as gzip does, whatever its name."""
    try:
        if os.fspath(path) in (STDIN, STDIN.encode()):
            return _unpacked(_bounded(sys.stdin.buffer, limits.file_bytes, ""), limits)
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise Bad("not a regular file")
        with open(path, "rb") as f:
            size = os.fstat(f.fileno()).st_size
            if size > limits.file_bytes:
                raise Bad(f"{size} bytes; the limit is {limits.file_bytes}")
            packed = f.read(len(_GZIP)) == _GZIP
            f.seek(0)
            if not packed:
                return _bounded(f, limits.file_bytes, "")
            with gzip.GzipFile(fileobj=f) as unpacked:
                return _bounded(unpacked, limits.text_bytes, " decompressed")
    except (gzip.BadGzipFile, EOFError, zlib.error) as e:
        raise Bad(f"broken gzip data: {e}") from None
    except OSError as e:
        raise Bad(e.strerror or str(e)) from None
    except ValueError as e:  # a path with a zero byte
        raise Bad(str(e)) from None


def _unpacked(data: bytes, limits: Limits) -> bytes:
    if not data.startswith(_GZIP):
        return data
    with gzip.GzipFile(fileobj=io.BytesIO(data)) as unpacked:
        return _bounded(unpacked, limits.text_bytes, " decompressed")


def _bounded(f: BinaryIO | gzip.GzipFile, most: int, how: str) -> bytes:
    """All of a stream, in pieces; stops at the limit and never holds more than that."""
    pieces: list[bytes] = []
    total = 0
    while piece := f.read(_CHUNK):
        total += len(piece)
        if total > most:
            raise Bad(f"more than {most} bytes{how}")
        pieces.append(piece)
    return b"".join(pieces)


def check_structure(data: bytes, limits: Limits) -> None:
    """Bounds on depth and on the number of values, before anything is parsed.

    Agrees with a JSON parser up to the first byte at which the parser fails: outside of strings a backslash is an error,
    and inside of them backslashes pair up from the left.
    """
    if b"\\" in data:
        data = data.replace(b"\\\\", b"__").replace(b'\\"', b"__")
    depth, values, inside = 0, 1, 0
    for start in range(0, len(data), _CHUNK):
        piece = np.frombuffer(data, np.uint8, min(_CHUNK, len(data) - start), start)
        where = np.flatnonzero(_MARKS[piece])
        if not len(where):
            continue
        marks = piece[where]
        quotes = np.cumsum(marks == ord('"'), dtype=np.int32) + inside
        inside = int(quotes[-1]) & 1
        outside = (quotes & 1 == 0) & (marks != ord('"'))
        steps = _STEPS[marks] * outside
        level = np.cumsum(steps, dtype=np.int32) + depth
        if int(level.max()) > limits.depth:
            at = start + int(where[np.argmax(level > limits.depth)])
            raise Bad(f"nested more than {limits.depth} deep at byte {at}")
        depth = int(level[-1])
        values += int(np.count_nonzero(steps > 0)) + int(np.count_nonzero((marks == ord(",")) & outside))
        if values > limits.values:
            raise Bad(f"more than {limits.values} values")


def parse(data: bytes, limits: Limits) -> Any:
    check_structure(data, limits)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as e:
        raise Bad(f"not UTF-8 at byte {e.start}") from None
    del data
    try:
        return json.loads(text, object_pairs_hook=_object, parse_float=_float, parse_constant=_constant)
    except json.JSONDecodeError as e:
        raise Bad(f"not JSON at line {e.lineno}, column {e.colno}: {e.msg}") from None
    except ValueError:  # Python's own bound on the digits of an integer
        raise Bad("an integer with more than 4300 digits") from None
    except RecursionError:  # a caller that is itself deep in the stack
        raise Bad("nested too deeply for the stack that is left") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any] | Wrong:
    result = dict(pairs)
    if len(result) == len(pairs):
        return result
    seen: set[str] = set()
    twice = next(k for k, _ in pairs if k in seen or seen.add(k))  # type: ignore[func-returns-value]
    return Wrong(f"{show(twice)} is given twice")


def _float(text: str) -> float | Wrong:
    value = float(text)
    return Wrong(f"{text[:60]} is too large for a number") if math.isinf(value) else value


def _constant(text: str) -> Wrong:
    return Wrong(f"{text} is not a JSON number")
