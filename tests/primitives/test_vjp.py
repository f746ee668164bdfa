"""One rule for each primitive, against the definition: cotangent · J by finite differences, column by column."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from trainverify.domains.numeric import NUMERIC
from trainverify.primitives import node as F
from trainverify.primitives.node import Node
from trainverify.primitives.plain import plain
from trainverify.primitives.scalars import SCALARS, conditions
from trainverify.primitives.vjp import RULES, NotDifferentiable, vjp
from trainverify.primitives.windows import Windows, overlap, window

IDS = F.input_(1, (2, 2), "int")
IDS_VALUE = np.array([[2, 0], [1, 1]])

FUNCTIONS: dict[str, Callable[[Node], Node]] = {
    "map": lambda x: F.call("exp", x) * x,
    "contract": lambda x: F.contract("a k, k b, a -> b", x, F.transpose(x, (1, 0)), F.total(x, [1])),
    "contract with a lost label": lambda x: F.contract("a b ->", x),
    "reduce max": lambda x: F.reduce("max", x, [1]),
    "reduce min": lambda x: F.reduce("min", x, [0, 1]),
    "reduce prod": lambda x: F.reduce("prod", x, [0]),
    "reduce prod of all": lambda x: F.reduce("prod", x, [0, 1]),
    "reshape": lambda x: F.reshape(x, (3, 2)) * F.iota(2),
    "transpose": lambda x: F.transpose(x, (1, 0)) * F.iota(2),
    "slice": lambda x: F.take(x, 1, 1, 3),
    "slice by steps": lambda x: F.take(F.reshape(x, (6,)), 0, 1, 6, 2),
    "slice backwards": lambda x: F.take(F.reshape(x, (6,)), 0, 5, 0, -2),
    "concat": lambda x: F.concat([x, x * 2, F.take(x, 1, 0, 1)], 1),
    "pad": lambda x: F.pad(x, 0, 1, 2, 7),
    "broadcast": lambda x: F.broadcast(x, (2, 5, 3), (0, 2)) * F.reshape(F.iota(5), (5, 1)),
    "select": lambda x: F.select(x < 0, x * x, 3 * x),
    "gather": lambda x: F.gather(x, IDS, 1),
    "rowwise cumsum": lambda x: F.rowwise("cumsum", x, 1),
    "rowwise sort": lambda x: F.rowwise("sort", x, 1, descending=True) * F.iota(3),
    "window": lambda x: window(x * x, 1, Windows(3, 2, 2, 1, 1, 1)) * F.iota(2),
    "overlap": lambda x: overlap(F.reshape(x * x, (2, 3, 1)), 0, Windows(3, 1, 2)) * F.iota(3),
    "used twice": lambda x: x * x + F.flip(x, 1) * x,
}


def jacobian(y: Node, value: Any) -> Any:
    """∂y/∂x, one column for each element of x."""
    columns = []
    for i in range(value.size):
        step = np.zeros(value.size)
        step[i] = 1e-6
        step = step.reshape(value.shape)
        ahead, behind = (NUMERIC.run(plain([y]), [v, IDS_VALUE])[0] for v in (value + step, value - step))
        columns.append((ahead - behind) / 2e-6)
    return np.stack(columns, -1).reshape(*y.shape, *value.shape)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_rule(name: str) -> None:
    x = F.input_(0, (2, 3), "real")
    y = FUNCTIONS[name](x)
    g = F.input_(2, y.shape, "real")
    rng = np.random.default_rng(4)
    value, seed = rng.standard_normal((2, 3)), rng.standard_normal(y.shape)
    found = NUMERIC.run(plain(vjp([y], [g], [x])), [value, IDS_VALUE, seed])[0]
    np.testing.assert_allclose(found, np.tensordot(seed, jacobian(y, value), y.ndim), rtol=1e-6, atol=1e-7)


def test_every_primitive_has_a_rule() -> None:
    tested = {name.split()[0] for name in FUNCTIONS}
    assert set(RULES) - tested == {"input", "const", "iota", "one_hot", "used"} - {"used"}


SMOOTH = [
    r for r in SCALARS.values() if r.partials is not None and r.arity > 0 and r.result is None and r.name not in ("detach", "sign", "floor")
]


@pytest.mark.parametrize("row", SMOOTH, ids=lambda r: r.name)
def test_partial_derivatives_of_scalar_functions(row: Any) -> None:
    rng = np.random.default_rng(6)
    values = [rng.uniform(0.3, 2.0, 5) for _ in range(row.arity)]
    xs = [F.input_(i, (5,), "real") for i in range(row.arity)]
    y = F.call(row.name, *xs, param=Fraction(5, 3) if row.name == "pow" else None)
    grads = vjp([y], [F.full(Fraction(1), (5,))], xs)
    for i, found in enumerate(NUMERIC.run(grads, values)):
        ahead, behind = ([v + s * 1e-6 * (j == i) for j, v in enumerate(values)] for s in (1, -1))
        slope = (NUMERIC.run([y], ahead)[0] - NUMERIC.run([y], behind)[0]) / 2e-6
        np.testing.assert_allclose(found, slope, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize(
    ("fn", "param", "needed"),
    [
        ("pow", 3, ()),
        ("pow", -2, ((0, "nonzero"),)),
        ("pow", Fraction(1, 2), ((0, "nonneg"),)),
        ("pow", Fraction(-1, 2), ((0, "positive"),)),
        ("div", None, ((1, "nonzero"),)),
        ("log", None, ((0, "positive"),)),
        ("exp", None, ()),
    ],
)
def test_when_a_function_is_defined(fn: str, param: Any, needed: Any) -> None:
    assert conditions(fn, param) == needed


def test_product_with_zeros() -> None:
    x = F.input_(0, (3, 3), "real")
    value = np.array([[0.0, 2.0, 3.0], [0.0, 5.0, 0.0], [7.0, 2.0, 3.0]])
    found = NUMERIC.run(vjp([F.reduce("prod", x, [1])], [F.full(Fraction(1), (3,))], [x]), [value])[0]
    assert found.tolist() == [[6.0, 0.0, 0.0], [0.0, 0.0, 0.0], [6.0, 21.0, 14.0]]


def test_ties_share_the_gradient() -> None:
    x = F.input_(0, (4,), "real")
    found = NUMERIC.run(vjp([F.reduce("max", x, [0])], [F.const(Fraction(1))], [x]), [np.array([1.0, 3.0, 3.0, 2.0])])[0]
    assert found.tolist() == [0.0, 0.5, 0.5, 0.0]


def test_nothing_depends_on_it() -> None:
    x, y = F.input_(0, (2, 3), "real"), F.input_(1, (5,), "real")
    (g,) = vjp([x * x], [x], [y])
    assert g.shape == (5,)
    assert NUMERIC.run([g], [])[0].tolist() == [0.0] * 5


def test_no_gradient_through_detach() -> None:
    x = F.input_(0, (3,), "real")
    found = NUMERIC.run(vjp([x * F.detach(x)], [F.full(Fraction(1), (3,))], [x]), [np.array([2.0, 3.0, 5.0])])[0]
    assert found.tolist() == [2.0, 3.0, 5.0]


def test_integers_have_no_gradient() -> None:
    ids = F.input_(0, (3,), "int")
    with pytest.raises(NotDifferentiable):
        vjp([F.one_hot(ids, 5)], [F.full(Fraction(1), (3, 5))], [ids])


def test_gradient_of_the_wrong_shape() -> None:
    x = F.input_(0, (2, 3), "real")
    with pytest.raises(F.ShapeError):
        vjp([x * x], [F.full(Fraction(1), (3,))], [x])
