"""The pytest plugin: reports of `assert_equivalent` in the terminal summary."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from trainverify.testing.assertion import LISTENER

if TYPE_CHECKING:
    from trainverify.report import Report


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Reports that a test makes are its own: verdicts go into its properties, which JUnit files show."""

    def listen(report: Report) -> None:
        item.user_properties.append(("trainverify", f"{report.verdict} {report.subject}: {report.reason}"))

    before = LISTENER.set(listen)
    yield
    LISTENER.reset(before)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """How many plans have which verdict, if any was asked for."""
    tests = {id(t): t for some in terminalreporter.stats.values() for t in some if getattr(t, "when", None) == "call"}
    seen = [verdict for t in tests.values() for verdict in _verdicts(t)]
    if seen:
        counted = ", ".join(f"{n} {verdict}" for verdict, n in sorted(Counter(seen).items()))
        terminalreporter.write_line(f"trainverify: {counted}")


def _verdicts(test: Any) -> list[str]:
    return [str(value).partition(" ")[0] for name, value in test.user_properties if name == "trainverify"]
