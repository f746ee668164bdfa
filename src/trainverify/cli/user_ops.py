"""Operators of the user: the option `--ops FILE`, and the table with what the file declares."""

from __future__ import annotations

import importlib.util
import os
import sys
import traceback
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated

import typer

from trainverify.ops import OPS, declared
from trainverify.ops.describe import describe, example_of, parse
from trainverify.ops.table import OpError, OpTable
from trainverify.refusal import Refused

OpsFile = Annotated[
    Path | None, typer.Option("--ops", metavar="FILE", help="A Python file that declares more operators. Python runs it: trust it first.")
]


def table_with(path: Path | None) -> OpTable:
    """The operator table, with the user's own operators."""
    if path is None:
        return OPS
    if not os.path.isfile(path):
        raise Refused(f"{path}: {'not a regular file' if os.path.exists(path) else 'No such file or directory'}")
    name = "trainverify_user_ops"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise Refused(f"{path}: not a Python file; its name must end in .py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        with redirect_stdout(sys.stderr):
            spec.loader.exec_module(module)
        more = declared(module)
        table = OPS.extended(more)
    except KeyboardInterrupt:
        raise
    except OpError as error:
        raise Refused(f"{path}: {error}") from error
    except (Exception, SystemExit) as error:
        raise Refused(f"{path}: {_line_of(error, path)}{type(error).__name__}: {error}") from error
    if not more:
        raise Refused(f"{path}: declares no operator")
    return table


def tried(path: Path, table: OpTable) -> list[str]:
    """Use the user's operators at the sizes of their examples, forward and backward; those without a usable example are returned."""
    untried = []
    for d in (d for d in table if d.name not in OPS):
        if not d.example:
            if example_of(d, table) is None:
                untried.append(d.name)
            continue
        try:
            example = parse(d, d.example)
            if not d.point_to_point:
                table.lower(d.name, example.attrs, example.types, example.members)
            describe(d, table)
        except OpError as error:
            raise Refused(f"{path}: the example of {d.name!r} fails: {_line_of(error.__cause__ or error, path)}{error}") from error
        except Exception as error:
            raise Refused(f"{path}: the example of {d.name!r} fails: {_line_of(error, path)}{type(error).__name__}: {error}") from error
    return untried


def _line_of(error: BaseException, path: Path) -> str:
    """Where in the user's file it happened."""
    found = [f.lineno for f in traceback.extract_tb(error.__traceback__) if os.path.abspath(f.filename) == os.path.abspath(path)]
    return f"line {found[-1]}: " if found else ""
