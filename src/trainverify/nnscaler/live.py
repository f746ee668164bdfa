"""Live objects of nnScaler as plain data, read by attribute: nnScaler is never imported, nothing of it is run but accessors.

`export(module_codegen, path)` writes our own file: a program for a plan on one device, else a plan with its lineage.
"""

from __future__ import annotations

import math
import os
import re
import sys
from typing import Any, Final

from trainverify import files
from trainverify.nnscaler.dump import FORMAT, Dump, parse
from trainverify.nnscaler.plan import plan, program
from trainverify.nnscaler.trainer import PLAIN, Trainer
from trainverify.ops import OPS
from trainverify.ops.table import OpTable

_LINE: Final = re.compile(r'(?:File ")?([^\s",]+\.py)(?:", line |:)(\d+)')


def export(module_codegen: Any, path: str | os.PathLike[str], table: OpTable = OPS, trainer: Trainer = PLAIN) -> None:
    """Write what a `ModuleCodeGen` would run, in our format."""
    convert(parse(snapshot(module_codegen), f"<{type(module_codegen).__name__}>"), path, table, trainer)


def convert(dump: Dump, path: str | os.PathLike[str], table: OpTable = OPS, trainer: Trainer = PLAIN) -> None:
    """Write a dump in our format: a program if it is for one device, else a plan."""
    single = dump.ranks == 1 and dump.microbatches == 1
    files.write(path, program(dump, table, trainer) if single else plan(dump, table, trainer).plan)


def snapshot(module_codegen: Any) -> dict[str, Any]:
    """A `ModuleCodeGen` as the tree of a dump."""
    return _Snapshot(module_codegen).tree()


class _Snapshot:
    def __init__(self, mg: Any):
        self.mg = mg
        self.full: dict[str, Any] = {}

    def tree(self) -> dict[str, Any]:
        mg, execplan = self.mg, self.mg.execplan
        graph = execplan.graph
        schedule = getattr(graph, "sched", None)
        devices = sorted(mg.devices)
        flags = getattr(sys.modules.get("nnscaler.flags"), "CompileFlag", None)
        return {
            "format": FORMAT,
            "nnscaler_version": str(getattr(sys.modules.get("nnscaler"), "__version__", "?")),
            "devices": devices,
            "runtime_ndevs": mg.runtime_ndevs,
            "compile_flags": {"reducer_op": getattr(flags, "reducer_op", "sum")},
            "graph": {"name": str(graph.name)},
            "execplan_outputs": [self.value(v) for v in execplan.outputs()],
            "schedule": None if schedule is None else {"nmicros": schedule.nmicros},
            "execplan": {str(d): self.device(d) for d in devices},
            "full_tensors": self.full,
        }

    def device(self, d: int) -> dict[str, Any]:
        cells: dict[str, Any] = {}
        keys: dict[int, str] = {}
        kept = []  # ids are keys: keep the objects
        seq = []
        for item in self.mg.execplan.seq(d):
            reuse = type(item).__name__ == "ExeReuseCell"
            cell = item.cell if reuse else item
            if id(cell) not in keys:
                key = str(cell.cid)
                while key in cells:
                    key += "#"
                keys[id(cell)] = key
                kept.append(cell)
                cells[key] = self.cell(cell, d)
            step: dict[str, Any] = {"kind": type(item).__name__, "cell": keys[id(cell)]}
            if reuse:
                step |= {"inputs": [self.value(v) for v in item.inputs()], "outputs": [self.value(v) for v in item.outputs()]}
            seq.append(step)
        return {"cells": cells, "seq": seq}

    def cell(self, cell: Any, d: int) -> dict[str, Any]:
        kind = type(cell).__name__
        mirror = getattr(cell, "mirror", None)
        stack = getattr(cell, "module_stack", None)
        line = _LINE.search(str(getattr(cell, "comment", None) or ""))
        found: dict[str, Any] = {
            "kind": kind,
            "cid": cell.cid,
            "name": str(cell.name),
            "signature": cell.signature,
            "isfw": bool(cell.isfw()),
            "device": list(cell.device),
            "inputs": [self.value(v) for v in cell.inputs()],
            "outputs": [self.value(v) for v in cell.outputs()],
            "kwargs": {str(k): self.value(v) for k, v in (getattr(cell, "kwargs", None) or {}).items()},
            "mirror": None if mirror is None else mirror.cid,
        }
        if getattr(cell, "anno", None) is not None:
            found["anno"] = str(cell.anno)
        if line is not None:
            found["comment"] = f"{os.path.basename(line[1])}:{line[2]}"
        if stack:
            found["module_stack"] = str(list(stack)[-1])
        if kind == "IRSegment":
            found["nodes"] = [self.cell(n, d) for n in cell.nodes()]
        if kind == "IRAdapter":
            found |= {"prims": [self.prim(p) for p in cell.prims], "differentiable": bool(cell.differentiable), "custom": bool(cell.custom)}
        if kind == "IRWeightReducer":
            ranks = range(d, self.mg.runtime_ndevs, len(self.mg.devices))
            found["_scaled_device"] = {str(r): list(self.mg.scale(cell, r).device) for r in ranks}
        return found

    def prim(self, p: Any) -> dict[str, Any]:
        return {
            "kind": type(p).__name__,
            "inputs": [self.value(v) for v in p.inputs()],
            "outputs": [self.value(v) for v in p.outputs()],
            "kwargs": {str(k): self.value(v) for k, v in p.kwargs.items()},
        }

    # -- values -------------------------------------------------------------------------------------------------------

    def value(self, v: Any) -> Any:
        if v is None or isinstance(v, bool | int | str):
            return v
        if isinstance(v, float):
            return v if math.isfinite(v) else {"float": str(v)}
        if isinstance(v, list | tuple):
            return [self.value(x) for x in v]
        if hasattr(v, "indmap"):
            return self.slice(v)
        if isinstance(v, slice):
            return {"slice": [v.start, v.stop, v.step]}
        if isinstance(v, dict):
            return {"dict": [[self.value(a), self.value(b)] for a, b in v.items()]}
        if str(v).startswith("torch.") and type(v).__name__ == "dtype":
            return {"dtype": str(v)}
        if hasattr(v, "tid"):  # an IRObject that is no tensor
            return {"object": v.tid, "name": str(getattr(v, "name", "")), "value": None}
        return {"opaque": type(v).__name__}

    def slice(self, t: Any, gradient: bool = True) -> dict[str, Any]:
        self.full_tensor(t.parent)
        grad = getattr(t, "grad", None) if gradient else None
        return {
            "tid": t.tid,
            "parent": t.parent.tid,
            "indmap": [list(pair) for pair in t.indmap],
            "valmap": list(t.valmap),
            "shape": list(t.shape),
            "grad": self.slice(grad, False) if hasattr(grad, "indmap") else None,
        }

    def full_tensor(self, f: Any) -> None:
        if str(f.tid) in self.full:
            return
        grad = getattr(f, "grad", None)
        self.full[str(f.tid)] = found = {
            "shape": list(f.shape),
            "dtype": str(f.dtype),
            "name": str(f.name),
            "is_param": bool(f.is_param()),
            "is_buffer": bool(f.is_buffer()),
            "is_grad": bool(f.is_grad()),
            "is_loss": bool(f.is_loss()),
            "grad": None if grad is None else grad.tid,
        }
        if hasattr(f, "origin_shape"):
            found["origin_shape"] = list(f.origin_shape)
        if grad is not None:
            self.full_tensor(grad)
