"""`trainverify doctor`: what is installed, what that supports, and how to get the rest."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from trainverify.terminal import AsJson, emit, guarded, out
from trainverify.versions import core, every


@guarded
def command(as_json: AsJson = False) -> int:
    """Versions of what is installed, what they support, and what is missing."""
    found = list(every())
    code = 0 if all(i.version is not None for i in core()) else 3
    if as_json:
        rows = [{"name": i.name, "version": i.version, "tested": i.tested, "state": i.state, "advice": i.advice} for i in found]
        return emit("doctor", code, libraries=rows)
    table = Table(box=None, pad_edge=False)
    for column in ("state", "library", "version", "for", "what to do"):
        table.add_column(column)
    for i in found:
        table.add_row(i.state, i.name, i.version or "", escape(i.needed), escape(i.advice))
    Console(width=None if out.is_terminal else 240, highlight=False, file=sys.stdout).print(table)
    return code
