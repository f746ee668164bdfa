"""Files on disk: reading with limits, writing all or nothing."""

from __future__ import annotations

import gc
import gzip
import io
import os
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

from trainverify.files.decode import decode
from trainverify.files.encode import encode, text
from trainverify.files.errors import Bad, FileError
from trainverify.files.limits import Limits
from trainverify.files.text import load
from trainverify.graph.plan import Plan
from trainverify.graph.program import Program

Path = str | os.PathLike[str]
_DEFAULT: Final = Limits()


def read(path: Path, limits: Limits = _DEFAULT) -> Program | Plan:
    """The program or plan in a file. Whatever is wrong with it is a `FileError`."""
    return _read(path, limits, None)


def read_program(path: Path, limits: Limits = _DEFAULT) -> Program:
    result = _read(path, limits, "program")
    assert isinstance(result, Program)
    return result


def read_plan(path: Path, limits: Limits = _DEFAULT) -> Plan:
    result = _read(path, limits, "plan")
    assert isinstance(result, Plan)
    return result


def read_any(path: Path, wanted: Callable[[object], bool], limits: Limits = _DEFAULT) -> Any:
    """The program or plan in a file, or the tree of a JSON file that is `wanted` as it is."""
    with _findings(path), _no_collection():
        tree = load(path, limits)
        return tree if wanted(tree) else decode(tree, limits, None)


def _read(path: Path, limits: Limits, kind: str | None) -> Program | Plan:
    with _findings(path), _no_collection():
        return decode(load(path, limits), limits, kind)


def write(path: Path, content: Program | Plan, limits: Limits = _DEFAULT) -> None:
    """Stores a program or plan, compressed if the name ends in `.gz`. What could not be read back is not written."""
    with _findings(path), _no_collection():
        tree = encode(content)
        decode(tree, limits)
        try:
            _replace(os.fsdecode(path), text(tree), limits)
        except OSError as e:
            raise Bad(e.strerror or str(e)) from None


def write_text(path: Path, content: str, limits: Limits = _DEFAULT) -> None:
    """Stores text, all of it or nothing, compressed if the name ends in `.gz`."""
    with _findings(path):
        try:
            _replace(os.fsdecode(path), [content.encode("utf-8", "backslashreplace")], limits)
        except OSError as e:
            raise Bad(e.strerror or str(e)) from None


def _replace(path: str, pieces: Iterable[bytes], limits: Limits) -> None:
    """Puts a complete file in place of `path`, or leaves everything as it was."""
    compressed = path.endswith(".gz")
    pieces = _bounded(pieces, limits.text_bytes if compressed else limits.file_bytes)
    path = os.path.realpath(path)
    if os.path.exists(path) and not stat.S_ISREG(os.stat(path).st_mode):
        raise Bad("not a regular file")
    folder, name = os.path.split(path)
    draft = os.path.join(folder, f".{name[:100]}.{secrets.token_hex(8)}.tmp")
    try:  # an interruption may come as soon as the draft is there, before its handle is
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), "wb") as f:
            if compressed:
                with gzip.GzipFile("", "wb", 6, f, mtime=0) as packed, io.BufferedWriter(packed, 1 << 16) as buffer:
                    buffer.writelines(pieces)
            else:
                f.writelines(pieces)
            f.flush()
            os.fsync(f.fileno())
        os.replace(draft, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(draft)
        raise


def _bounded(pieces: Iterable[bytes], most: int) -> Iterator[bytes]:
    total = 0
    for piece in pieces:
        total += len(piece)
        if total > most:
            raise Bad(f"more than {most} bytes of text")
        yield piece


@contextmanager
def _findings(path: Path) -> Iterator[None]:
    """Findings leave as errors that name the file."""
    try:
        yield
    except Bad as e:
        raise FileError(path, e.where, e.reason) from None


@contextmanager
def _no_collection() -> Iterator[None]:
    """Trees and programs have no cycles; looking for some takes a third of the time."""
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if on:
            gc.enable()
