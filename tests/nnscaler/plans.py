"""Stored dumps as trees, small changes to them, and verdicts on the result."""

from __future__ import annotations

import copy
import functools
import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainverify.nnscaler import Trainer, judge, parse
from trainverify.nnscaler.judge import Judged
from trainverify.ops import OPS
from trainverify.ops.table import OpTable
from trainverify.report import Report

DATA = Path(__file__).parent / "data"
Tree = dict[str, Any]


@functools.cache
def _stored(name: str) -> Tree:
    tree: Tree = json.loads(gzip.decompress((DATA / f"{name}.json.gz").read_bytes()))
    return tree


def tree(name: str) -> Tree:
    """A stored dump, free to be changed."""
    return copy.deepcopy(_stored(name))


def logical_of(name: str) -> str:
    return name.split("_dp")[0] + "_single"


def verdict(plan: Tree, logical: Tree, trainer: Trainer | None = None, ops: OpTable = OPS) -> Judged:
    return judge(parse(logical, "logical"), parse(plan, "plan"), ops, trainer or Trainer())


def judged(name: str, plan: Tree | None = None, trainer: Trainer | None = None) -> Judged:
    """The verdict on a stored plan, or on a changed copy of it."""
    return verdict(plan or tree(name), tree(logical_of(name)), trainer)


def cells(plan: Tree, device: int) -> Iterator[Tree]:
    """All cells of a device, those inside of segments too."""
    for cell in plan["execplan"][str(device)]["cells"].values():
        yield cell
        yield from cell.get("nodes", ())


def devices(plan: Tree) -> range:
    return range(len(plan["devices"]))


def prims(plan: Tree, device: int, kind: str, forward: bool = True) -> Iterator[tuple[Tree, Tree]]:
    for cell in cells(plan, device):
        for p in cell.get("prims", ()):
            if p["kind"] == kind and cell["isfw"] == forward:
                yield cell, p


def messages(report: Report) -> list[str]:
    return [f"{f.code} {f.severity}: {f.message}" for f in report.findings]
