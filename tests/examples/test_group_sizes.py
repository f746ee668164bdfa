"""PROVED: every collective, in groups larger than what dimensions are reduced to; REFUTED: averaged instead of summed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import trainverify as tv
from trainverify.build.plan import RankBuilder
from trainverify.build.tape import Tensor

Totals = dict[str, Callable[[RankBuilder, Tensor, int], Tensor]]


def logical(n: int) -> tv.Program:
    b = tv.program("weighted")
    x, w = b.input("x", (2 * n, 3 * n)), b.parameter("w", (3 * n,))
    b.loss(b.sum(b.mul(x, w, name="m"), name="loss"))
    return tv.complete(b.build(), tv.SGD(lr=0.5))


def everywhere(r: RankBuilder, x: Tensor, n: int, **how: Any) -> Tensor:
    made: Tensor = r.all_reduce(r.sum(x, name="part"), group="g", name="loss", **how)
    return made


TOTALS: Totals = {
    "all_reduce": everywhere,
    "all_gather": lambda r, m, n: r.sum(r.all_gather(m, group="g", dim=0, name="all"), name="loss"),
    "reduce_scatter": lambda r, m, n: everywhere(r, r.reduce_scatter(m, group="g", dim=1, name="own"), n),
    "all_to_all": lambda r, m, n: everywhere(r, r.all_to_all(m, group="g", split_dim=1, concat_dim=0, name="turned"), n),
}


def plan(n: int, total: Callable[[RankBuilder, Tensor, int], Tensor]) -> tv.Plan:
    p = tv.plan("weighted", tv.Mesh(g=n))
    with p.ranks() as r:
        x, w = r.input("x", (2, 3 * n), "(g b) k"), r.parameter("w", (3 * n,), "k")
        r.loss(total(r, r.mul(x, w, name="m"), n))
        grad = r.all_reduce(r.sum(x, dim=(0,), name="w.part"), group="g", name="w.grad")
        r.output(grad, "gradient", "w")
        r.update(w, r.sgd(w, grad, lr=0.5, name="w.new"))
    return p.build()


@pytest.mark.parametrize("n", [3, 4, 5])
@pytest.mark.parametrize("kind", TOTALS)
def test_group_of(kind: str, n: int) -> None:
    report = tv.verify(logical(n), plan(n, TOTALS[kind]))
    assert (report.verdict, report.exit_code) == ("PROVED", 0), (report.reason, report.findings)


@pytest.mark.parametrize("n", [3, 4, 5])
def test_scaled_by_the_group(n: int) -> None:
    report = tv.verify(logical(n), plan(n, lambda r, m, n: everywhere(r, m, n, op="avg")))
    assert (report.verdict, report.exit_code) == ("REFUTED", 1)
    assert report.place is not None
    assert report.place.tensor == "loss"
    assert report.place.cause.startswith("all_reduce(group=g, op=avg) where all_reduce with sum over g is needed"), report.place
