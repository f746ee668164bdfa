"""The pytest plugin: reports of `assert_equivalent` in the terminal summary, and as pages."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from trainverify.testing.assertion import LISTENER

if TYPE_CHECKING:
    from trainverify.report import Report


REPORTS = pytest.StashKey[list[tuple[str, Any]]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("trainverify")
    text = "write the reports of assert_equivalent as pages: into FILE.html, or one page for each test into a folder"
    group.addoption("--trainverify-html", type=Path, metavar="FILE.html|DIR", help=text)


def pytest_configure(config: pytest.Config) -> None:
    config.stash[REPORTS] = []


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Reports that a test makes are its own: verdicts go into its properties, which JUnit files show."""

    def listen(report: Report) -> None:
        item.user_properties.append(("trainverify", f"{report.verdict} {report.subject}: {report.reason}"))
        if item.config.getoption("--trainverify-html") is not None:
            item.config.stash[REPORTS].append((item.nodeid, report))

    before = LISTENER.set(listen)
    yield
    LISTENER.reset(before)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Writes the pages; worker processes of xdist write their own, into one folder or files with their names."""
    where, seen = session.config.getoption("--trainverify-html"), session.config.stash[REPORTS]
    if where is None or not seen:
        return
    from trainverify import files
    from trainverify.counterexample import entry_of
    from trainverify.report.html import page

    entries = [entry_of(report, name) for name, report in seen]
    if where.suffix == ".html":
        worker = getattr(session.config, "workerinput", {}).get("workerid")
        files.write_text(where if worker is None else where.with_suffix(f".{worker}.html"), page(entries))
        return
    where.mkdir(parents=True, exist_ok=True)
    for name in dict.fromkeys(e.name for e in entries):
        own = re.sub(r"[^\w.-]+", "-", name).strip("-")[:150]
        files.write_text(where / f"{own}.html", page([e for e in entries if e.name == name]))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """How many plans have which verdict, if any was asked for."""
    tests = {id(t): t for some in terminalreporter.stats.values() for t in some if getattr(t, "when", None) == "call"}
    seen = [verdict for t in tests.values() for verdict in _verdicts(t)]
    if seen:
        counted = ", ".join(f"{n} {verdict}" for verdict, n in sorted(Counter(seen).items()))
        terminalreporter.write_line(f"trainverify: {counted}")


def _verdicts(test: Any) -> list[str]:
    return [str(value).partition(" ")[0] for name, value in test.user_properties if name == "trainverify"]
