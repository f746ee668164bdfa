"""Random programs of primitives, computed: what must have a value has one wherever the outputs do, and has the sign that is read off it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from trainverify.domains.arrays import Array
from trainverify.domains.numeric import Numeric
from trainverify.primitives import node as F
from trainverify.primitives.node import Node, topological
from trainverify.primitives.plain import plain
from trainverify.primitives.windows import OVERLAP, WINDOW, Windows, overlap, window
from trainverify.prove.definedness import BELOW, FACTS, FINITE, MAY_FAIL, Sign
from trainverify.prove.signs import Known, Signs, of_source
from trainverify.prove.strict import FINITE as MUST_BE_FINITE
from trainverify.prove.strict import Step, Strict, Use

SHAPE = (2, 3)
VALUES = (-2.0, -1.0, -0.5, 0.0, 0.0, 0.5, 1.0, 2.0)
POWERS = (Fraction(-1, 2), Fraction(1, 2), -1, -2, 0, 1, 2, 3)
UNARY = ("neg", "exp", "log", "tanh", "abs", "sign", "floor", "sin", "erf")
BINARY = ("add", "sub", "mul", "div", "max", "min")
Make = Callable[[random.Random, Callable[[], Node]], Node]


def position(rng: random.Random, x: Callable[[], Node]) -> Node:
    """Integers that are no longer than a row."""
    return F.rowwise("argsort", x(), 1, rng.random() < 0.5)


def mask(rng: random.Random, x: Callable[[], Node]) -> Node:
    return F.call(rng.choice(["lt", "le", "eq"]), x(), x())


def halves(rng: random.Random, x: Callable[[], Node]) -> Node:
    """Some columns of one tensor beside some of another one."""
    at = rng.choice([1, 2])
    return F.concat([F.take(x(), 1, 0, at), F.take(x(), 1, at, 3)], 1)


def every_other(rng: random.Random, x: Callable[[], Node]) -> Node:
    """Of two tensors side by side every other column."""
    start = rng.choice([0, 1])
    return F.take(F.concat([x(), x()], 1), 1, start, start + 5, 2)


WINDOWS = (  # three of each, in rows of three
    {"kernel": 2, "low": 1},
    {"kernel": 3, "low": 1, "high": 1},
    {"kernel": 2, "dilation": 2, "low": 1, "high": 1},
    {"kernel": 2, "stride": 2, "low": 2, "high": 2},
    {"kernel": 1, "stride": 2, "low": 1, "high": 1},
    {"kernel": 1, "stride": 3, "low": 3, "high": 3},
)


def pooled(rng: random.Random, x: Callable[[], Node]) -> Node:
    """The largest element, or the sum, of windows, or windows added up again where they came from."""
    how, end = rng.choice(WINDOWS), rng.choice(["max", "sum", "back"])
    there = Windows(3, filler=float("-inf") if end == "max" else 0, **how)
    made = window(x(), 1, there)
    if end == "back":
        return overlap(F.call(rng.choice(UNARY), made), 1, there)
    return F.reduce("max", made, [2]) if end == "max" else F.total(made, [2])


MAKES: Sequence[Make] = (
    *[lambda rng, x: F.call(rng.choice(UNARY), x())] * 3,
    *[lambda rng, x: F.call(rng.choice(BINARY), x(), x())] * 4,
    lambda rng, x: F.power(x(), rng.choice(POWERS)),
    lambda rng, x: F.as_node(x()) * rng.choice([0, 1, -1]),
    lambda rng, x: x() + F.call("log", F.cast(mask(rng, x), "real")),
    lambda rng, x: F.select(mask(rng, x), x(), x()),
    lambda rng, x: F.cast(mask(rng, x), "real"),
    halves,
    every_other,
    pooled,
    lambda rng, x: F.gather(x(), position(rng, x), 1),
    lambda rng, x: F.expand(F.total(x(), [1], keepdim=True), SHAPE),
    lambda rng, x: F.expand(F.reduce(rng.choice(["max", "prod"]), x(), [1], keepdim=True), SHAPE),
    lambda rng, x: F.contract("a b, c b, c d -> a d", x(), x(), x()),
    lambda rng, x: F.rowwise("cumsum", x(), 1),
    lambda rng, x: F.take(F.pad(x(), 1, 1, 0, rng.choice([0, 1])), 1, 0, 3),
    lambda rng, x: F.reshape(F.transpose(x(), (1, 0)), SHAPE),
)


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


class OneZero(Numeric):
    """Numbers of which 0 has no sign: real numbers have one zero."""

    def _node(self, node: Node, args: list[Array], inputs: Sequence[Array], lead: tuple[int, ...]) -> Array:
        if node.prim in (WINDOW, OVERLAP):
            alone = Node(node.prim, (F.input_(0, node.args[0].shape, "real"),), node.attrs, node.shape, node.kind)
            return self.run(plain([alone]), args)[0]
        made = super()._node(node, args, inputs, lead)
        return made + 0.0 if made.dtype.kind == "f" else made


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


def right_sign(x: Array, sign: Sign) -> bool:
    """Of what is a number, or infinite."""
    x = x[~np.isnan(x)]
    return bool((x > 0).all() if sign == "positive" else (x >= 0).all() if sign else True)


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
