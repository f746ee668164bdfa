"""Errors that only a real run raises, by its data, and that the user's code catches: no verdict."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is absent: captured code is not tested")

import torch.distributed as dist  # noqa: E402
import torch.nn.functional as F  # noqa: E402

from capture.factors import Factor, verdict  # noqa: E402
from trainverify.torch.handlers import handled  # noqa: E402


class Quiet:
    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: Any, trace: Any) -> bool:
        return kind is RuntimeError


class Loud(Quiet):
    def __exit__(self, kind: Any, error: Any, trace: Any) -> bool:  # type: ignore[override]
        print(kind)
        return False


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    with contextlib.suppress(RuntimeError):
        yield


@contextlib.contextmanager
def loud() -> Iterator[None]:
    try:
        yield
    finally:
        print("done")


def asked() -> bool:
    return handled(RuntimeError)


def plainly() -> Any:
    return asked()


def named() -> Any:
    try:
        return asked()
    except (ValueError, RuntimeError) as error:
        return error


def bare() -> Any:
    try:
        return asked()
    except:  # noqa: E722
        return None


def nested() -> Any:
    try:
        try:
            return asked()
        except KeyError:
            return None
        finally:
            print("done")
    except Exception:
        return None


def sometimes() -> Any:
    try:
        return asked()
    except RuntimeError as error:
        if "memory" not in str(error):
            raise
        return None


def returning() -> Any:
    found = None
    try:
        found = asked()
    finally:
        return found  # noqa: B012


def of_other_errors() -> Any:
    try:
        return asked()
    except (KeyError, torch.OutOfMemoryError):
        return None


def raised_again() -> Any:
    try:
        return asked()
    except Exception as error:
        raise ValueError from error


def at_last() -> Any:
    try:
        return asked()
    finally:
        print("done")


def before() -> Any:
    try:
        print("before")
    except RuntimeError:
        return None
    return asked()


def under(manager: Callable[[], Any]) -> Callable[[], Any]:
    def run() -> Any:
        with manager():
            return asked()

    return run


def in_a_stack() -> Any:
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.suppress(RuntimeError))
        return asked()


@pytest.mark.parametrize(
    ("run", "wanted"),
    [
        *((f, True) for f in (named, bare, nested, sometimes, returning, in_a_stack)),
        *((under(m), True) for m in (lambda: contextlib.suppress(RuntimeError), Quiet, quiet)),
        *((f, False) for f in (plainly, of_other_errors, raised_again, at_last, before)),
        *((under(m), False) for m in (torch.no_grad, contextlib.nullcontext, Loud, loud)),
    ],
)
def test_whether_an_error_is_caught(run: Callable[[], Any], wanted: bool) -> None:
    def capture() -> Any:
        return run()

    capture.__code__ = capture.__code__.replace(co_filename=handled.__code__.co_filename)  # where frames of the user's begin
    assert capture() is wanted


def caught(tried: Callable[[Any, Any], Any]) -> Factor:
    def factor(model: Any, batch: Any) -> Any:
        try:
            tried(model, batch)
        except (RuntimeError, IndexError):
            return 0.5
        return 1.0

    return factor


FAILS: dict[str, Callable[[Any, Any], Any]] = {
    "cholesky": lambda model, batch: torch.linalg.cholesky(-torch.eye(2)),
    "inv": lambda model, batch: torch.linalg.inv(torch.zeros(2, 2)),
    "embedding": lambda model, batch: F.embedding(torch.tensor([7]), model.weight),
    "nll_loss": lambda model, batch: F.nll_loss(torch.zeros(2, 2), torch.tensor([0, 5])),
    "ids": lambda model, batch: model.weight[batch["n"]],
    "division": lambda model, batch: torch.tensor([3]) // (batch["n"] * 0),
    "types": lambda model, batch: model.weight @ torch.ones(4, 2, dtype=torch.float16),
    "labels": lambda model, batch: F.cross_entropy(model.weight, torch.tensor([0, 3, 1], dtype=torch.int32)),
    "factors": lambda model, batch: dist.all_reduce(torch.ones(2), op=dist._make_nccl_premul_sum(0.5)),
    "assert": lambda model, batch: torch._assert_async(model.weight.sum() > 1e9),
}


@pytest.mark.parametrize("name", FAILS)
def test_an_error_of_a_real_run_that_is_caught(name: str) -> None:
    found = verdict(caught(FAILS[name]))
    assert found.verdict == "UNKNOWN", found.reason
    assert "has a handler for it" in found.reason or "without a mapping" in found.reason


REFUSED: dict[str, Callable[[Any, Any], Any]] = {
    "memory of several elements": lambda model, batch: torch.ones(1).expand(3).add_(1),
    "beyond the memory": lambda model, batch: torch.ones(3).as_strided((4,), (2,)),
    "a bool that is subtracted": lambda model, batch: model.weight - (batch["n"] > 1),
    "a dimension that is not there": lambda model, batch: F.softmax(torch.ones(3), 2),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("handled", [True, False])
def test_calls_that_only_real_kernels_refuse(name: str, handled: bool) -> None:
    """UNKNOWN, whether the error is caught or ends the run: fake tensors do not raise it."""
    found = verdict(caught(REFUSED[name]) if handled else lambda model, batch: REFUSED[name](model, batch) is None or 1.0)
    assert found.verdict == "UNKNOWN", found.reason
    assert any(said in found.reason for said in ("a real run raises an error", "a real run may raise an error", "without a mapping"))


def test_calls_that_kernels_take() -> None:
    """PROVED: a copy of what was expanded is written, and views stay within their memory."""

    def factor(model: Any, batch: Any) -> Any:
        return torch.ones(1).expand(3).contiguous().add_(1).sum() * torch.ones(4).as_strided((2,), (3,)).sum() / 12

    assert verdict(factor).verdict == "PROVED"


def test_positions_that_are_proved() -> None:
    """Ids below 4 of 3 rows doubled, constants, and those of an argmax."""

    def work(model: Any, batch: Any) -> None:
        rows = torch.cat([model.weight, model.weight])
        F.embedding(batch["n"], rows)
        rows[torch.tensor([5, -6])]
        rows.gather(0, rows.argmax(0, keepdim=True))

    found = verdict(caught(work))
    assert found.verdict == "PROVED", found.reason


def test_types_that_are_promoted() -> None:
    """PROVED: element by element every kernel takes floats of two types."""
    found = verdict(caught(lambda model, batch: model.weight * torch.ones(4, dtype=torch.float16)))
    assert found.verdict == "PROVED", found.reason


def test_an_error_that_is_not_caught() -> None:
    def factor(model: Any, batch: Any) -> Any:
        torch.linalg.cholesky(torch.eye(2))
        return 1.0

    found = verdict(factor)
    assert found.verdict == "PROVED", found.reason
    assert any("linalg.cholesky" in a and "raises no error" in a for a in found.assumptions), found.assumptions
