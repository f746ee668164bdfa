"""The files of the user's own modules, as they are read: those of installed packages are not among them."""

from __future__ import annotations

import ast
import sys
from functools import cache
from pathlib import Path

from trainverify.torch.lines import is_users


def own_files() -> list[str]:
    files = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    return sorted({f for f in files if isinstance(f, str) and f.endswith(".py") and "site-packages" not in f and is_users(f)})


@cache
def parsed(file: str) -> ast.Module:
    """Of a file that cannot be read, nothing."""
    try:
        return ast.parse(Path(file).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return ast.Module([], [])


__all__ = ["own_files", "parsed"]
