"""The file format: programs and plans as versioned JSON, read strictly and written all or nothing.

Opening a file runs no code from it. See docs/format.md for every field and `schema.json` for the JSON Schema.
"""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

from trainverify.files.decode import FORMAT, VERSION
from trainverify.files.errors import FileError
from trainverify.files.limits import Limits
from trainverify.files.store import read, read_any, read_plan, read_program, write, write_text


def schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of the format."""
    text = resources.files(__name__).joinpath("schema.json").read_text("utf-8")
    result: dict[str, Any] = json.loads(text)
    return result


__all__ = ["FORMAT", "VERSION", "FileError", "Limits", "read", "read_any", "read_plan", "read_program", "schema", "write", "write_text"]
