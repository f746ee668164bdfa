"""What Python shows of tensors, numbers and objects is what a real run shows, or there is no verdict."""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable
from datetime import timedelta
from fractions import Fraction
from functools import singledispatch
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is absent: captured code is not tested")

import torch.distributed as dist  # noqa: E402

from capture.factors import Factor, verdict  # noqa: E402
from trainverify.torch.boundary import Boundary  # noqa: E402
from trainverify.torch.reading import Number, ReadsData  # noqa: E402

# -- objects that ranks exchange ----------------------------------------------------------------------------------------


def gathered(early: float, late: float) -> Factor:
    def factor(model: Any, batch: Any) -> Any:
        mine, got = {"k": early}, [None, None]
        dist.all_gather_object(got, mine)
        mine["k"] = late
        return got[1]["k"]  # type: ignore[index]

    return factor


def received(change: int) -> Factor:
    def factor(model: Any, batch: Any) -> Any:
        got: list[Any] = [None, None]
        dist.all_gather_object(object_list=got, obj={"k": 1.0})
        got[change]["k"] = 0.5
        return got[1]["k"]

    return factor


def broadcast(late: float) -> Factor:
    """The ranks that receive have a copy; the one that sends keeps its own."""

    def factor(model: Any, batch: Any) -> Any:
        mine = {"k": 1.0}
        got = [mine]
        dist.broadcast_object_list(got, src=0)
        mine["k"] = late
        return got[0]["k"]

    return factor


@pytest.mark.parametrize(
    ("ranks", "wanted"),
    [
        (gathered(1.0, 0.5), "PROVED"),
        (gathered(0.5, 1.0), "REFUTED"),
        (received(0), "PROVED"),
        (received(1), "REFUTED"),
        (broadcast(1.0), "PROVED"),
        (broadcast(0.5), "REFUTED"),
    ],
)
def test_exchanged_objects_are_copies(ranks: Factor, wanted: str) -> None:
    found = verdict(ranks)
    assert found.verdict == wanted, found.reason


# -- computed numbers ---------------------------------------------------------------------------------------------------


def number(batch: Any) -> Any:
    return batch["n"].item()


def caught(tried: Callable[[Any], Any], error: type[Exception], otherwise: float) -> Factor:
    """A factor of 1, or another one where an error is caught."""

    def factor(model: Any, batch: Any) -> Any:
        try:
            tried(number(batch))
        except error:
            return otherwise
        return 1.0

    return factor


@pytest.mark.parametrize(
    "tried",
    [
        *(lambda n: n << 1, lambda n: 6 & n, lambda n: ~n, lambda n: divmod(n, 2), lambda n: round(n, 1), lambda n: [1.0] * n),
        *(lambda n: n * 1j, lambda n: pow(n, 2, 5), lambda n: 2**n, lambda n: n**-1, lambda n: n == 1j, lambda n: n.bit_length()),
        *(math.sqrt, int, hash, lambda n: timedelta(1) * n, lambda n: Fraction(1, 2) < n, lambda n: sys.getsizeof(n)),
    ],
)
def test_what_only_numbers_of_pythons_do(tried: Callable[[Any], Any]) -> None:
    """It is noted before the error is raised, which a real run does not raise."""
    boundary = Boundary(lambda: None)
    with pytest.raises(ReadsData):
        tried(Number(torch.tensor(3), boundary))
    assert boundary.findings(None)


def test_numbers_have_all_methods_of_pythons() -> None:
    special = {n for n in (*vars(int), *vars(float)) if n.startswith("__")}
    assert special - vars(Number).keys() == {"__new__", "__getattribute__", "__getformat__"}


@pytest.mark.parametrize("divide", [operator.truediv, operator.floordiv, operator.mod])
def test_a_division_by_a_literal_0(divide: Callable[..., Any]) -> None:
    with pytest.raises(ZeroDivisionError):
        divide(Number(torch.tensor(3), Boundary(lambda: None)), 0)


def test_an_error_of_numbers_that_is_caught() -> None:
    found = verdict(caught(lambda n: n << 1, TypeError, 0.5))
    assert found.verdict == "UNKNOWN", found.reason
    assert "lshift()" in found.reason


def inverse(otherwise: float) -> Factor:
    def factor(model: Any, batch: Any) -> Any:
        try:
            return 1 / number(batch)
        except ZeroDivisionError:
            return otherwise

    return factor


def asked(otherwise: float) -> Factor:
    def factor(model: Any, batch: Any) -> Any:
        n = number(batch)
        return otherwise if n == 0 else 1 / n

    return factor


@pytest.mark.parametrize(("otherwise", "wanted"), [(0.0, "PROVED"), (2.0, "REFUTED")])
def test_a_division_by_0_that_is_caught(otherwise: float, wanted: str) -> None:
    """Captured both ways, as a condition is."""
    found = verdict(inverse(otherwise), asked(0.0))
    assert found.verdict == wanted, found.reason


def test_a_division_by_0_that_is_not_caught() -> None:
    def factor(model: Any, batch: Any) -> Any:
        return 1 / number(batch)

    found = verdict(factor, factor)
    assert found.verdict == "PROVED", found.reason
    assert any("its divisor is not 0" in a for a in found.assumptions), found.assumptions


# -- tensors ------------------------------------------------------------------------------------------------------------


def where(shown: Callable[[Any, Any], bool]) -> Factor:
    return lambda model, batch: 0.5 if shown(model, batch["x"]) else 1.0


@singledispatch
def weighed(x: Any) -> bool:
    return False


@weighed.register
def _(x: torch.nn.Parameter) -> bool:
    return True


SHOWN: dict[str, Callable[[Any, Any], bool]] = {
    "class": lambda model, x: x.__class__ is torch.Tensor and model.weight.__class__ is torch.nn.Parameter,
    "name": lambda model, x: x.__class__.__name__ == "Tensor",
    "dispatch": lambda model, x: weighed(model.weight) and not weighed(x),
    "device": lambda model, x: x.untyped_storage().device.type == x.device.type == "cpu",
    "typed": lambda model, x: x.storage().device.type == "cpu" and not x.is_meta,
    "attributes": lambda model, x: not vars(model.weight) and not x.__dict__,
}


@pytest.mark.parametrize("name", SHOWN)
def test_what_a_tensor_shows(name: str) -> None:
    assert SHOWN[name](torch.nn.Linear(4, 3), torch.ones(2))
    found = verdict(where(SHOWN[name]))
    assert found.verdict == "REFUTED", found.reason


def test_what_all_tensors_show() -> None:
    shown = where(lambda model, x: all(f(model, x) for f in SHOWN.values()))
    found = verdict(shown, lambda model, batch: 0.5)
    assert found.verdict == "PROVED", found.reason


def test_attributes_that_are_written() -> None:
    def factor(model: Any, batch: Any) -> Any:
        attributes = vars(model.weight)
        attributes["one"] = 1
        attributes.update(two=2)
        attributes.pop("one")
        return 0.5 if model.weight.two == 2 and not hasattr(model.weight, "one") and "two" in vars(model.weight) else 1.0

    found = verdict(factor, lambda model, batch: 0.5)
    assert found.verdict == "PROVED", found.reason
