"""What is a little off: by what rounding may do, and no more."""

from __future__ import annotations

import numpy as np

from trainverify.domains.numeric import NUMERIC, SHAKEN
from trainverify.primitives import node as F
from trainverify.primitives.node import Node


def off(made: Node, *inputs: object) -> float:
    """How far it is from the value, relatively."""
    (plain,) = NUMERIC.run([made], [np.asarray(x) for x in inputs])
    (other,) = SHAKEN.run([made], [np.asarray(x) for x in inputs])
    return float(np.abs(plain - other).max() / np.abs(plain).max())


X = np.random.default_rng(5).uniform(0.3, 0.9, (4, 5))
Y = np.random.default_rng(6).uniform(0.3, 0.9, (5, 3))


def test_what_float64_computes_well_is_a_little_off() -> None:
    x, y = F.input_(0, (4, 5), "real"), F.input_(1, (5, 3), "real")
    assert 0 < off(F.call("exp", x), X) < 1e-15
    assert 0 < off(F.contract("a b, b c -> a c", x, y), X, Y) < 1e-15


def test_what_loses_digits_is_far_off() -> None:
    """(10⁹ + x) − 10⁹, and a product whose terms cancel but for a billionth."""
    x = F.input_(0, (4, 5), "real")
    assert off((x + 1e9) - 1e9, X) > 1e-11
    rows = np.concatenate([X * 1e9, X * (1 - 1e9)], axis=1)
    assert (
        off(F.contract("a b, c b -> a c", F.input_(0, (4, 10), "real"), F.input_(1, (1, 10), "real")), rows, np.ones((1, 10)) / 3) > 1e-11
    )


def test_equal_numbers_stay_equal_and_whole_ones_what_they_are() -> None:
    """Else a tie would fall otherwise, or a mask be no mask."""
    x = F.input_(0, (4, 5), "real")
    (made,) = SHAKEN.run([F.call("exp", x)], [X])
    (turned,) = SHAKEN.run([F.call("exp", x)], [X[::-1]])
    assert (made == turned[::-1]).all()
    whole = F.cast(x < 0.6, "real") * 3 - 1
    assert (SHAKEN.run([whole], [X])[0] == NUMERIC.run([whole], [X])[0]).all()
