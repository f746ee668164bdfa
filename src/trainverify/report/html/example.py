"""The counterexample: inputs, and what a rank holds beside what it should hold."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from trainverify.domains.arrays import Array
from trainverify.domains.numeric import NUMERIC
from trainverify.evaluate.compare import Difference, held
from trainverify.evaluate.example import Example
from trainverify.evaluate.run import run_logical, run_plan
from trainverify.report.html.markup import Raw, joined, tag

SHOWN = 400  # elements of an array that are written


def example_section(example: Example, difference: Difference | None) -> Raw:
    shapes = ", ".join(f"{n} {list(v.shape)}" for n, v in example.inputs.items())
    inputs = joined(tag("details", tag("summary", tag("code", n), f" {list(v.shape)}"), _array(v)) for n, v in example.inputs.items())
    results = joined(_results(example, difference))
    text = tag("p", f"Both programs at the smallest sizes that show it, on inputs of few digits: {shapes}.", class_="subject")
    return tag("section", tag("h2", "A small counterexample"), text, results, tag("h3", "Inputs"), inputs)


def _results(example: Example, difference: Difference | None) -> Iterator[Raw]:
    """Of the obligation that is reported, else of the first: the first rank that holds something else."""
    small = example.small
    with np.errstate(all="ignore"):
        logical, plan = run_logical(small, example.inputs, NUMERIC), run_plan(small, example.lineage, example.inputs, NUMERIC)
    name = None if difference is None else str(difference.obligation)
    for o in sorted(example.wanted, key=lambda o: str(o) != name):
        for h in o.holdings:
            for rank in (r for r in h.ranks if r in small.places):
                if plan.get(*small.places[rank], h.layout.local) is None:
                    continue
                for got, want, _ in held(small, o, h.layout, rank, logical[h.layout.logical], plan):
                    if not np.allclose(got, want, rtol=1e-9, atol=0):
                        title = tag("h3", f"{o} on rank {rank}")
                        pair = (_pair("got", h.layout.local, got), _pair("want", h.layout.logical, want))
                        yield joined((title, tag("div", joined(pair), class_="pair")))
                        return


def _pair(what: str, name: str, value: Array) -> Raw:
    return tag("div", tag("h4", f"{what}: ", tag("code", name)), _array(value), class_=what)


def _array(value: Array) -> Raw:
    if value.size > SHOWN:
        return tag("p", f"{value.size:,} elements")
    return tag("pre", np.array2string(np.asarray(value), precision=6, suppress_small=True, max_line_width=100, threshold=SHOWN + 1))
