"""Expressions that were worked out for any constants, at constants: the same as those that were named there before, and as no others."""

from __future__ import annotations

import pytest

from trainverify.prove.algebra.kernel import Kernel
from trainverify.prove.algebra.terms import Poly

BOUND, FREE = -1, -2


def summed(k: Kernel, at: int) -> Poly:
    """Σ_i x[i, at]·y[i]."""
    return k.sum(k.times(k.input("x", (3, 5), [BOUND, at]), k.input("y", (3,), [BOUND])), {BOUND: 3})


def named(k: Kernel, at: int) -> Poly:
    """A sum under a name that has it."""
    return k.single(k.add(summed(k, at), k.input("z", (5,), [at])))


@pytest.mark.parametrize("at", [0, 2])
def test_at_constants(at: int) -> None:
    k = Kernel()
    before, other = summed(k, at), summed(k, 4)
    generic = summed(k, FREE)
    k.named, k.keep_constants = len(k.atoms), False
    here = k.substitute(generic, {FREE: at})
    assert here != before
    assert k.made_anew(here) == before
    assert k.made_anew(here) != other
    assert k.made_anew(k.substitute(generic, {FREE: 3})) not in (before, other)


@pytest.mark.parametrize("at", [0, 2])
def test_inside_names_of_the_plan(at: int) -> None:
    k = Kernel()
    before, other = named(k, at), named(k, 4)
    generic = summed(k, FREE)
    k.named, k.keep_constants = len(k.atoms), False
    made = k.single(k.add(k.substitute(generic, {FREE: at}), k.input("z", (5,), [at])))
    assert made != before
    assert k.made_anew(made) == before
    assert k.made_anew(made) != other
