"""Random programs of primitives, computed: what must have a value has one wherever the outputs do, and has the sign that is read off it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from prove.random_nodes import MAKES, SHAPE, VALUES, OneZero, right_sign
from trainverify.domains.arrays import Array
from trainverify.primitives import node as F
from trainverify.primitives.node import Node, topological
from trainverify.primitives.windows import Windows
from trainverify.prove.definedness import BELOW, FACTS, FINITE, MAY_FAIL
from trainverify.prove.signs import Known, Signs, of_source
from trainverify.prove.strict import FINITE as MUST_BE_FINITE
from trainverify.prove.strict import Step, Strict, Use


@dataclass(frozen=True)
class Random:
    """Two inputs, one of them of a domain, and ops of several nodes."""

    domain: str | None
    ops: tuple[Step, ...]

    @property
    def wanted(self) -> str:
        return self.ops[-1].outputs[0]

    def inputs(self, rng: np.random.Generator) -> dict[str, Array]:
        x, y = rng.choice(VALUES, SHAPE), rng.choice(VALUES, SHAPE)
        return {"x": np.abs(x) + (self.domain == "positive") if self.domain else x, "y": y}


def drawn(seed: int) -> Random:
    rng = random.Random(seed)
    names, ops = ["x", "y"], []
    for n in range(3):
        given = [rng.choice(names), rng.choice(names)]
        nodes = [F.input_(k, SHAPE, "real") for k in range(2)]
        for _ in range(rng.randint(1, 4)):
            nodes.append(rng.choice(MAKES)(rng, lambda nodes=nodes: rng.choice(nodes)))  # type: ignore[misc]
        made = nodes[-1:] if n == 2 or rng.random() < 0.5 else nodes[-2:]
        outputs = [f"t{n}.{k}" for k in range(len(made))]
        ops.append(Step(given, outputs, tuple(made)))
        names += outputs
    return Random(rng.choice([None, "nonnegative", "positive"]), tuple(ops))


def computed(program: Random, inputs: dict[str, Array]) -> tuple[dict[str, Array], list[dict[Node, Array]]] | None:
    """Tensors, and nodes op by op; None if a number is too large or too small for float64, which no real number is."""
    tensors, found = dict(inputs), []
    for op in program.ops:
        nodes = topological(op.nodes)
        values = dict(zip(nodes, OneZero().run(nodes, [tensors[str(i)] for i in op.inputs]), strict=True))
        for v in values.values():
            size = np.abs(v[np.isfinite(v) & (v != 0)]) if v.dtype.kind == "f" else np.ones(1)
            if ((size > 1e60) | (size < 1e-60)).any():
                return None
        found.append(values)
        tensors |= {t: values[o] for t, o in zip(op.outputs, op.nodes, strict=True)}
    return tensors, found


def right_state(x: Array, known: Known) -> bool:
    fine = {FINITE: np.isfinite(x), BELOW: np.isfinite(x) | (x == -np.inf)}
    return known.unsure or known.level not in fine or bool(fine[known.level].all())


def wrong(program: Random, strict: Strict, signs: Signs, points: int) -> tuple[list[str], int]:
    """What is said of a program and is not so at a point at which its output is finite; and how many such points there are."""
    rng, found, defined = np.random.default_rng(0), [], 0
    for _ in range(points):
        values = computed(program, program.inputs(rng))
        if values is None or not np.isfinite(values[0][program.wanted]).all():
            continue
        tensors, nodes = values
        defined += 1
        for n, here in enumerate(nodes):
            found += [f"{x} of op {n} is not finite" for x in strict.nodes[n] if not np.isfinite(here[x]).all()]
            found += [f"{x} of op {n} is no number" for x in strict.roots[n] if np.isnan(here[x]).any()]
        found += [f"{t} is not finite" for t in strict.tensors if not np.isfinite(tensors[t]).all()]
        for t, known in signs.tensors.items():
            if not right_sign(tensors[t], known.sign):
                found.append(f"{t} is not {known.sign}")
            if not right_state(tensors[t], known):
                found.append(f"{t} is not a number")
    return found, defined


def said(program: Random) -> tuple[Strict, Signs]:
    strict = Strict([program.wanted], program.ops)
    return strict, Signs({"x": of_source("real", program.domain), "y": Known()}, program.ops, strict)


def campaign(seeds: range) -> None:
    """Expected: nothing that is said is wrong, and much is said."""
    count = defined = positive = 0
    for seed in seeds:
        program = drawn(seed)
        strict, signs = said(program)
        found, points = wrong(program, strict, signs, 8)
        assert not found, (seed, found[0], [topological(op.nodes) for op in program.ops], [(op.inputs, op.outputs) for op in program.ops])
        count += any(n.prim == "map" and n.attrs[0] in MAY_FAIL for nodes in strict.nodes for n in nodes)
        positive += any(known.sign for t, known in signs.tensors.items() if t not in "xy")
        defined += points
    assert count > len(seeds) / 20
    assert positive > len(seeds) / 4
    assert defined > len(seeds)


def test_what_is_said_is_so() -> None:
    campaign(range(200))


@pytest.mark.long
def test_what_is_said_of_many_is_so() -> None:
    campaign(range(1000, 6000))


def all_arguments(prim: str, attrs: Sequence[Any], count: int) -> Sequence[int]:
    """As if exp(log 0) were no number."""
    return range(count)


def both_branches(node: Node, level: int, kept: Sequence[int]) -> list[Use]:
    """As if a branch that is not taken, and elements that are not looked up or sliced away, had to have a value."""
    return [Use(whole=level == MUST_BE_FINITE and (k in kept or node.prim in ("select", "gather", "slice"))) for k in range(len(node.args))]


BROKEN: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "all arguments are finite": lambda m: m.setattr("trainverify.prove.strict.kept_arguments", all_arguments),
    "all branches have values": lambda m: m.setattr("trainverify.prove.strict._arguments", both_branches),
    "everything sees": lambda m: m.setattr("trainverify.prove.strict.seen", lambda node: True),
    "the exponential of −∞ is positive": lambda m: m.setitem(FACTS, "exp", replace(FACTS["exp"], sign=FACTS["pi"].sign, fades=False)),
    "windows have all positions": lambda m: m.setattr(Windows, "seen", lambda how: (1 << how.size) - 1),
    "windows outside are added up": lambda m: m.setattr(Windows, "inside", lambda how: range(how.count)),
    "a difference is like a sum": lambda m: m.setitem(FACTS, "sub", FACTS["add"]),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_wrong_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Expected: with one rule broken, something is said that is not so."""
    BROKEN[name](monkeypatch)
    seeds = (508, 895, 1606, *range(60))  # few programs compare the root of a negative number, or have windows outside of a row
    assert any(wrong(program, *said(program), 12)[0] for program in map(drawn, seeds))
