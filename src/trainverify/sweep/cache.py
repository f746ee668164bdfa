"""Verdicts on disk, by the content of both programs and this version. What is damaged or of others is recomputed, never believed."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import os
import sys
import tempfile
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from trainverify.files.encode import encode
from trainverify.graph.plan import Plan
from trainverify.graph.program import Program

FORMAT: Final = 1
VERDICTS: Final = ("PROVED", "REFUTED", "INVALID")  # an UNKNOWN may be another one with more time


@dataclass(frozen=True)
class Row:
    """What is known of one configuration."""

    name: str
    verdict: str
    reason: str
    seconds: float
    place: str = ""
    cached: bool = False
    note: str = ""
    allowed: str = ""  # approximations that the verdict rests on

    @property
    def headline(self) -> str:
        return f"{self.verdict} with {self.allowed}" if self.allowed else self.verdict


def default_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "trainverify" / "verdicts"


@functools.cache
def version() -> str:
    """Of this package, what its files say; of Python and the libraries that verdicts rest on, their numbers."""
    found = hashlib.sha256(sys.version.encode())
    for library in ("numpy", "python-flint", "z3-solver"):
        found.update(importlib.metadata.version(library).encode() + b"\0")
    root = Path(__file__).parent.parent
    for path in sorted(root.rglob("*.py")):
        found.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return found.hexdigest()


def digest(*parts: Any) -> str:
    """Of programs and plans their content, as files have it; of anything else how it prints."""
    found = hashlib.sha256()
    for part in parts:
        content = encode(part) if isinstance(part, Program | Plan) else repr(part)
        found.update(json.dumps(content, sort_keys=True, default=str).encode() + b"\0")
    return found.hexdigest()


@dataclass(frozen=True)
class Cache:
    """A folder with one file for each key."""

    folder: Path

    def get(self, key: str) -> tuple[dict[str, Any] | None, str]:
        """What was put there by this version, and what was found in its place."""
        path = self._path(key)
        try:
            text = path.read_bytes()
        except FileNotFoundError:
            return None, ""
        except OSError as error:
            return None, f"cache entry not readable ({error.strerror}): recomputed"
        try:
            entry = json.loads(text)
            content = entry["content"]
            mine = (entry["format"], entry["key"], entry["version"]) == (FORMAT, key, version())
            whole = entry["sum"] == _sum(key, content)
        except (ValueError, KeyError, TypeError):
            return None, "cache entry damaged: recomputed"
        if not mine:
            return None, "cache entry of another version or configuration: recomputed"
        return (content, "") if whole and isinstance(content, dict) else (None, "cache entry damaged: recomputed")

    def put(self, key: str, content: dict[str, Any]) -> None:
        """All or nothing, also beside other processes that do the same. A folder that cannot be written to is no error."""
        entry = {"format": FORMAT, "key": key, "version": version(), "content": content, "sum": _sum(key, content)}
        with suppress(OSError):
            path = self._path(key)
            path.parent.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=path.parent, prefix=".new-")
            try:
                with os.fdopen(handle, "w") as file:
                    json.dump(entry, file)
                os.replace(name, path)
            except BaseException:
                with suppress(OSError):
                    os.unlink(name)
                raise

    def _path(self, key: str) -> Path:
        return self.folder / key[:2] / f"{key}.json"


def _sum(key: str, content: Any) -> str:
    return hashlib.sha256(json.dumps([key, version(), content], sort_keys=True).encode()).hexdigest()


def kept(row: Row) -> dict[str, Any]:
    return asdict(row)


def restored(name: str, content: dict[str, Any]) -> Row | None:
    """A row as it was kept; None if it does not look like one."""
    try:
        row = Row(**{**content, "name": name, "cached": True, "note": ""})
    except TypeError:
        return None
    plain = all(isinstance(v, str) for v in (row.verdict, row.reason, row.place, row.allowed)) and isinstance(row.seconds, int | float)
    return row if plain and row.verdict in VERDICTS else None


__all__ = ["VERDICTS", "Cache", "Row", "default_folder", "digest", "kept", "restored", "version"]
