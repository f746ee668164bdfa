"""The main soundness test of the normaliser: forms, evaluated by what their atoms mean, are the numbers that programs compute."""

from __future__ import annotations

import pytest

from prove.meaning import check_program
from prove.operators import all_samples, one_op

SAMPLES = [pytest.param(name, i, s, grad, id=f"{name}-{i}{'-grad' if grad else ''}") for name, i, s, grad in all_samples()]


@pytest.mark.parametrize(("name", "i", "sample", "grad"), SAMPLES)
def test_every_operator(name: str, i: int, sample, grad: bool) -> None:
    made = one_op(name, sample, i, grad)
    if made is None:
        return
    program, inputs = made
    found = check_program(program, i, inputs)
    assert not found.wrong, found.wrong
