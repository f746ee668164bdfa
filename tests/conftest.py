"""`--keep-plans FOLDER`: everything that the suite shows to `verify` or to an engine is kept as files, for `campaign agree --plans`.

And a suite that a shell started in its background ignores Ctrl-C, as would all that it starts: tests that interrupt would fail.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import shutil
import signal
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

# Modules with many cases of one sort: the suite has every seventh or third case of each test, `make campaign` all (so has `-m ""`).
EVERY = {
    "bench/test_needle.py": 3,
    "capture/test_attack.py": 7,
    "capture/test_before.py": 7,
    "capture/test_branches.py": 7,
    "capture/test_buffers.py": 3,
    "capture/test_by_hand.py": 3,
    "capture/test_chance.py": 3,
    "capture/test_door.py": 7,
    "capture/test_found_steps.py": 3,
    "capture/test_handlers.py": 3,
    "capture/test_lookups.py": 3,
    "capture/test_numbers.py": 3,
    "capture/test_overlap.py": 3,
    "capture/test_python.py": 3,
    "capture/test_refused.py": 3,
    "capture/test_reported.py": 3,
    "capture/test_starts.py": 3,
    "capture/test_state.py": 3,
    "capture/test_steps.py": 3,
    "capture/test_unseen.py": 3,
    "capture/test_unusual.py": 3,
    "cli/test_process.py": 3,
    "cli/test_zoo.py": 3,
    "evaluate/test_choices.py": 7,
    "evaluate/test_rank_values.py": 7,
    "files/test_fuzz.py": 3,
    "jax/test_hlo.py": 3,
    "jax/test_llama.py": 3,
    "nnscaler/test_faults.py": 7,
    "nnscaler/test_prims.py": 3,
    "nnscaler/test_trainer.py": 3,
    "nnscaler/test_verdicts.py": 3,
    "prove/staged/test_canonical.py": 3,
    "prove/staged/test_fewer.py": 3,
    "prove/staged/test_hidden.py": 3,
    "prove/staged/test_isomorphic.py": 3,
    "prove/staged/test_llama.py": 7,
    "prove/staged/test_masks.py": 3,
    "prove/staged/test_ring.py": 3,
    "prove/test_blocks.py": 3,
    "prove/test_dispatch.py": 3,
    "prove/test_listed.py": 3,
    "prove/test_positions.py": 3,
    "prove/test_shifts.py": 3,
    "prove/test_spellings.py": 3,
    "prove/test_unseen.py": 3,
    "prove/test_windows.py": 3,
    "tools/test_campaign.py": 3,
    "tools/test_counts.py": 3,
    "verdicts/test_counts.py": 7,
    "verdicts/test_thresholds.py": 3,
    "zoo/parallel/test_capacity.py": 7,
    "zoo/parallel/test_clips.py": 7,
    "zoo/parallel/test_context_models.py": 3,
    "zoo/parallel/test_context_plans.py": 3,
    "zoo/parallel/test_context_planted.py": 7,
    "zoo/parallel/test_deepseek_plans.py": 3,
    "zoo/parallel/test_experts_planted.py": 7,
    "zoo/parallel/test_flat_planted.py": 7,
    "zoo/parallel/test_llama_plans.py": 3,
    "zoo/parallel/test_pipeline_plans.py": 3,
    "zoo/parallel/test_planted.py": 7,
    "zoo/parallel/test_resnet_plans.py": 3,
    "zoo/parallel/test_zero_plans.py": 7,
    "zoo/parallel/test_zoo_bugs.py": 7,
}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    seen: Counter[str] = Counter()
    for item in items:
        every = EVERY.get(Path(os.path.relpath(item.path, here)).as_posix(), 1)
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            name = item.nodeid.partition("[")[0]
            if seen[name] % every:
                item.add_marker(pytest.mark.long)
            seen[name] += 1


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
