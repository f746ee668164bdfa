"""Products of matrices and tensors."""

from __future__ import annotations

import re

from trainverify.ops.table import op
from trainverify.primitives import node as F
from trainverify.primitives.node import Node

_LINEAR = "linear algebra"


@op("linear", _LINEAR, example="x[b,k] w[o,k] bias[o]")
def linear(x: Node, w: Node, bias: Node | None = None) -> Node:
    """x·wᵀ + bias, w stored as [out, in]."""
    y = F.contract("... k, o k -> ... o", x, w)
    return y if bias is None else y + bias


@op("matmul", _LINEAR, example="x[b,m,k] y[b,k,n]")
def matmul(x: Node, y: Node) -> Node:
    """Matrix product over the last two dimensions; leading ones broadcast; vectors as in PyTorch."""
    if x.ndim == 1 and y.ndim == 1:
        return F.contract("k, k ->", x, y)
    if x.ndim == 1:
        return F.contract("k, ... k n -> ... n", x, y)
    if y.ndim == 1:
        return F.contract("... m k, k -> ... m", x, y)
    lead = F.broadcast_shapes(x.shape[:-2], y.shape[:-2])
    return F.contract("... m k, ... k n -> ... m n", F.expand(x, lead + x.shape[-2:]), F.expand(y, lead + y.shape[-2:]))


@op("einsum", _LINEAR, example="x[b,i,k] y[b,j,k]; spec='bik,bjk->bij'")
def einsum(*xs: Node, spec: str) -> Node:
    """Einstein summation in PyTorch's notation, `"bik,bjk->bij"`; the result must be spelled out."""
    plain = spec.replace(" ", "")
    if not re.fullmatch(r"(?:[A-Za-z,]|\.\.\.)*->(?:[A-Za-z]|\.\.\.)*", plain):
        raise F.ShapeError(f"einsum {spec!r}: letters, dots, commas and an arrow only")
    return F.contract(re.sub(r"([A-Za-z]|\.\.\.)", r" \1 ", plain), *xs)


@op("grouped_matmul", _LINEAR, example="x[e,c,k] w[e,k,n]")
def grouped_matmul(x: Node, w: Node) -> Node:
    """One matrix product for each expert: y[e] = x[e]·w[e]."""
    return F.contract("e c k, e k n -> e c n", x, w)


@op("outer", _LINEAR, example="x[i] y[j]")
def outer(x: Node, y: Node) -> Node:
    """Every element of one vector times every element of the other."""
    return F.contract("i, j -> i j", x, y)
