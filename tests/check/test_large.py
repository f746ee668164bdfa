"""8192 ranks, 16 programs, 24,000 communication events: seconds, not ranks × ops."""

from __future__ import annotations

import time
import tracemalloc
from dataclasses import replace

from check.large import large
from trainverify.check import validate
from trainverify.graph.plan import Edit


def test_small_sizes() -> None:
    for sizes in ((3, 4, 2, 2, 5), (2, 2, 4, 2, 3), (1, 5, 1, 3, 2)):
        assert validate(*large(*sizes)) == []


def test_8192_ranks() -> None:
    logical, plan = large(64, 16, 8, 4, 75)
    assert plan.size == 8192
    start = time.process_time()
    assert validate(logical, plan) == []
    assert time.process_time() - start < 20


def test_one_rank_of_8192_is_wrong() -> None:
    """One all_reduce inside a body called by rank 4321 averages instead of adding; memory stays small."""
    logical, plan = large(64, 16, 8, 2, 20)
    stage = 4321 // 8 % 16
    program = plan.templates[stage].program
    call = [i for i, op in enumerate(program.ops) if op.get("function") == "layer"][7]
    op = plan.functions["layer"].ops[3]
    tracemalloc.start()
    findings = validate(logical, replace(plan, edits=(Edit(4321, (call, 3), (op.with_attrs(op="avg"),)),)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [(f.code, f.rank) for f in findings] == [("TV203", 4320)]
    group = "tp.33.12 [4320, 4321, 4322, 4323, 4324, 4325, 4326, 4327]"
    text = "rank 4320 has op=sum (large.py:4), rank 4321 has op=avg (large.py:4)"
    assert findings[0].message.startswith(f"all_reduce over {group} (number ")
    assert findings[0].message.endswith(text)
    assert peak < 500e6
