"""Operators in index notation, and the pages of documentation made from them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from trainverify.ops import OPS, OpDef
from trainverify.ops.describe import describe, reference
from trainverify.ops.table import op
from trainverify.primitives import node as F
from trainverify.primitives.node import Node
from trainverify.primitives.notation import Notation

DOCS = Path(__file__).parents[2] / "docs"

FORMULAS = {
    "linear": [
        "shapes: x[b,k] w[o,k] bias[o] → y[b,o]",
        "y[b,o] = Σ_k x[b,k]·w[o,k] + bias[o]",
        "dx[b,k] = Σ_o dy[b,o]·w[o,k]",
        "dw[o,k] = Σ_b dy[b,o]·x[b,k]",
        "dbias[o] = Σ_b dy[b,o]",
    ],
    "div": ["z[a,b] = x[a,b] / y[a,b]", "dy[a,b] = dz[a,b]·(-x[a,b] / y[a,b] / y[a,b])"],
    "mean": ["y[a] = (Σ_b x[a,b]) / 7", "dx[a,b] = dy[a] / 7"],
    "softmax": ["t1[a,b] = exp(x[a,b] - max_i(x[a,i]))", "y[a,b] = t1[a,b] / (Σ_i t1[a,i])"],
    "gelu": ["y[a,b] = x[a,b] / 2·(1 + erf(x[a,b]·2^(-1/2)))"],
    "embedding": ["y[b,h] = Σ_v [ids[b] = v]·weight[v,h]", "dweight[v,h] = Σ_b dy[b,h]·[ids[b] = v]"],
    "reshape": ["shapes: x[a,b,c] → y[a·b,c], shape = (6, 5)", "y[i,c] = x[⌊i/3⌋,(i mod 3),c]", "dx[a,b,c] = dy[3a+b,c]"],
    "concat": ["shapes: x[a,b] y[c,b] → z[a+c,b]", "z[i,b] = x[i,b] if i < 5 else y[i-5,b]"],
    "slice": ["y[a,i] = x[a,2i+1]"],
    "pad": ["y[a,i] = x[a,i-1] if 1 ≤ i < 8 else 0"],
    "cumsum": ["y[a,b] = Σ_{i≤b} x[a,i]"],
    "sort": ["y1[a,b] = sort_i(x[a,i])[b]"],
    "take_along_dim": ["y[a,j] = x[a,ids[a,j]]", "dx[a,v] = Σ_j dy[a,j]·[ids[a,j] = v]"],
    "create_mask": ["y[i,j] = [j ≤ i+2]"],
    "conv1d": ["y[b,o,i] = Σ_{c,k} (x[b,c,i] if k < 1 else x[b,c,i+1])·weight[o,c,k]"],
    "all_reduce": ["y[m,a,b] = Σ_i x[i,a,b]"],
    "all_gather": ["shapes: x[a,b] → y[a·m,b]", "y[m,i,b] = x[⌊i/5⌋,(i mod 5),b]"],
    "reduce_scatter": ["shapes: x[a,b] → y[a/m,b]", "y[m,i,b] = Σ_j x[j,2m+i,b]"],
    "all_to_all": ["y[m,i,j] = x[⌊j/5⌋,2m+i,(j mod 5)]"],
}


@pytest.mark.parametrize("name", FORMULAS)
def test_formula(name: str) -> None:
    lines = [line.strip() for line in describe(OPS[name], OPS).splitlines()]
    assert [f for f in FORMULAS[name] if f not in lines] == []


@pytest.mark.parametrize("definition", list(OPS), ids=lambda d: d.name)
def test_every_operator_has_a_formula(definition: OpDef) -> None:
    text = describe(definition, OPS)
    assert definition.doc.splitlines()[0] in text
    assert definition.point_to_point or ("shapes:" in text and " = " in text.split("meaning:")[1])
    assert text.count("(") == text.count(")")


def test_a_gradient_is_described_with_its_operator() -> None:
    assert describe(OPS["linear.grad"], OPS) == describe(OPS["linear"], OPS)


def test_an_operator_without_a_fitting_example_still_has_its_interface() -> None:
    @op("odd", "mine")
    def odd(x: Node, *, n: int) -> Node:
        """Needs a number."""
        return x * n

    assert describe(odd, OPS.extended([odd])) == "odd(x)\n  Needs a number.\n  n: int"


def test_parentheses_follow_precedence() -> None:
    a, b, c = (F.input_(i, (), "real") for i in range(3))

    def text(node: Node) -> str:
        return Notation("abc", {}).define({"y": node})[0]

    assert text((a + b) * c) == "y = (a + b)·c"
    assert text(a - (b - c)) == "y = a - (b - c)"
    assert text(a / (b * c)) == "y = a / (b·c)"
    assert text(a + -b) == "y = a - b"
    assert text(F.select(a < b, F.select(b < c, a, b), c) + 1) == "y = ((a if [b < c] else b) if [a < b] else c) + 1"
    assert text(F.power(F.power(a, 2), 3)) == "y = (a^2)^3"
    assert text(-(a + b)) == "y = -(a + b)"


def test_the_reference_page_is_up_to_date() -> None:
    assert (DOCS / "operators.md").read_text(encoding="utf-8") == reference(OPS)


def test_the_guide_to_adding_an_operator_runs() -> None:
    page = (DOCS / "adding-an-operator.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    assert len(blocks) >= 5
    space: dict[str, Any] = {"__name__": "guide"}
    for block in blocks:
        exec(compile(block, "adding-an-operator.md", "exec"), space)
