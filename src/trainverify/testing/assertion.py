"""`assert_equivalent`: a plan that is not proved fails a test, with the explanation as the message."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from trainverify.graph.plan import Plan
    from trainverify.graph.program import Program
    from trainverify.report import Report

LISTENER: Final[ContextVar[Callable[[Any], None] | None]] = ContextVar("trainverify_listener", default=None)  # of the test that runs


class NotEquivalent(AssertionError):
    """A plan that is not proved equal to its logical program; `report` says why."""

    def __init__(self, report: Report):
        super().__init__(text(report))
        self.report = report


def assert_equivalent(logical: Program, plan: Plan | Program, **options: Any) -> Report:
    """Fails unless the plan is PROVED equal to the logical program; returns the report.

    `options` are those of `trainverify.verify`. PROVED(reduced) fails unless `accept_reduced=True`. UNKNOWN fails: agreement at
    random points is no proof.
    """
    __tracebackhide__ = True  # pytest then points at the line of the caller
    from trainverify.verdicts import verify

    return checked(verify(logical, plan, **options))


def checked(report: Report, depth: int = 3) -> Report:
    """Fails unless the report is PROVED, or what else was accepted; a test that runs keeps it."""
    __tracebackhide__ = True
    listener = LISTENER.get()
    if listener is not None:
        listener(report)
    if report.exit_code:
        raise NotEquivalent(report)
    if report.approximations:  # a test that passes prints nothing else
        warnings.warn(f"{report.headline}: {report.subject}", stacklevel=depth)
    return report


def text(report: Report) -> str:
    """A report as it is printed, without colours."""
    from rich.console import Console

    out = io.StringIO()
    report.print(Console(file=out, width=1000, soft_wrap=True, highlight=False, color_system=None))
    return out.getvalue().rstrip("\n")
