"""Matrix products."""

from __future__ import annotations

from trainverify.torch.mappings.table import Arguments, Number, rows

ROWS, row = rows()


@row("aten::mm", "aten::bmm", "aten::mv", "aten::dot")
def product(a: Arguments) -> str:
    a.dtype("out_dtype")
    names = ("mat2", "vec", "tensor")
    other = next(n for n in names if n in a.given)
    return a.e.op("matmul", (a.tensor("self"), a.tensor(other)))


def _added(a: Arguments, product: str, beta: Number, alpha: Number) -> str:
    if alpha != 1:
        product = a.e.op("mul", (product,), {"value": alpha})
    if beta == 0:  # PyTorch does not read `self` then: it may be memory that was never written
        a.ignore("self")
        return product
    x = a.tensor("self")
    if beta != 1:
        x = a.e.op("mul", (x,), {"value": beta})
    return a.e.op("add", (product, x))


@row("aten::addmm")
def addmm(a: Arguments) -> str:
    made = a.e.op("matmul", (a.tensor("mat1"), a.tensor("mat2")))
    return _added(a, made, a.number("beta"), a.number("alpha"))


@row("aten::addbmm")
def addbmm(a: Arguments) -> str:
    made = a.e.op("sum", (a.e.op("matmul", (a.tensor("batch1"), a.tensor("batch2"))),), {"dim": 0})
    return _added(a, made, a.number("beta"), a.number("alpha"))


@row("aten::baddbmm")
def baddbmm(a: Arguments) -> str:
    made = a.e.op("matmul", (a.tensor("batch1"), a.tensor("batch2")))
    return _added(a, made, a.number("beta"), a.number("alpha"))
