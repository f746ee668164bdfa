"""A device of a plan with its communication: adapters, prim by prim."""

from __future__ import annotations

from trainverify.nnscaler.device import Device, Scope
from trainverify.nnscaler.dump import FUSED, Cell
from trainverify.nnscaler.prims import fused, plain


class RankDevice(Device):
    def adapter(self, cell: Cell, scope: Scope) -> None:
        for prim in cell.prims:
            if cell.fused and prim.kind in FUSED:
                source, target = cell.tensors()[:1], cell.results()[:1]
                if not source or not target:
                    raise self.broken("TV101", f"{prim.kind} without a tensor")
                value = fused(self, prim, cell.isfw, self.get(scope, source[0]), target[0].full.name)
                self.checked(target[0], value)
                if cell.isfw:
                    scope.values[target[0].tid] = value
                else:
                    self.put(scope, target[0], value, cell)
            else:
                plain(self, prim, scope)
        for t in cell.results():
            if t.tid not in scope.values:
                raise self.broken("TV101", f"its prims do not make {t} (tensor {t.tid})", cell)
            self.passed.setdefault((self.device, cell.cid, self.micro), scope.values[t.tid])
