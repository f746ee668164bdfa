"""`--keep-plans FOLDER`: everything that the suite shows to `verify` or to an engine is kept as files, for `campaign agree --plans`.

And a suite that a shell started in its background ignores Ctrl-C, as would all that it starts: tests that interrupt would fail.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import shutil
import signal
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

# Of how many tests of a module the suite has one, evenly spread: chosen so that none takes more than some four seconds of a processor.
# `make campaign` has all of them, and so has `-m ""`.
SLICES: dict[str, int] = json.loads((Path(__file__).parent / "slices.json").read_text("utf-8"))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    seen: Counter[str] = Counter()
    for item in items:
        if any(item.get_closest_marker(name) for name in ("long", "capture")):
            continue
        module = Path(os.path.relpath(item.path, here)).as_posix()
        if seen[module] % SLICES.get(module, 1):
            item.add_marker(pytest.mark.long)
        seen[module] += 1


def pytest_runtest_setup() -> None:
    """What earlier tests leave stays to the end: what looks through all objects passes those of this test only."""
    gc.collect()
    gc.freeze()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--keep-plans", type=Path, metavar="FOLDER", help="write every pair of programs that is verified to this folder")


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    own = tempfile.mkdtemp(prefix="trainverify-")  # captures of tests are kept for these tests only
    os.environ["XDG_CACHE_HOME"] = own
    atexit.register(shutil.rmtree, own, ignore_errors=True)
    folder: Path | None = config.getoption("--keep-plans")
    if folder is None:
        return
    from tools.campaign.kept import keep
    from trainverify.axes.system import System
    from trainverify.check import validate

    folder = Path(folder).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    init = System.__init__
    last: list[Any] = [None, None]

    def note(logical: Any, plan: Any, ops: Any) -> None:
        if last[0] is not logical or last[1] is not plan:
            last[:] = logical, plan
            keep(folder, logical, plan, ops, os.environ.get("PYTEST_CURRENT_TEST", "").removesuffix(" (call)"))

    def validate_too(logical: Any, plan: Any, ops: Any) -> Any:  # also what is not well-formed, and never gets to an engine
        note(logical, plan, ops)
        return validate(logical, plan, ops)

    def init_too(self: Any, logical: Any, plan: Any, table: Any, *args: Any, **options: Any) -> None:
        if "axes" not in options:  # the same pair, inlined
            note(logical, plan, table)
        init(self, logical, plan, table, *args, **options)

    for name in ("judge", "inspection", "first_wrong"):
        vars(importlib.import_module(f"trainverify.verdicts.{name}"))["validate"] = validate_too
    System.__init__ = init_too  # type: ignore[method-assign]
