"""ZeRO: every stage, alone and with other parallelism, is the step on one device."""

from __future__ import annotations

from dataclasses import replace

import pytest

from trainverify.axes.reduction import NotABoundary
from trainverify.evaluate.small import TooMuch, shrink_system
from trainverify.graph.lineage import Part, Run
from trainverify.graph.obligations import obligations
from trainverify.graph.plan import units
from trainverify.ops import OPS
from trainverify.verdicts import FULL, related, verify
from trainverify.zoo import gpt, llama
from trainverify.zoo.parallel import Degrees, gpt_plan, gpt_step, llama_plan, llama_step
from trainverify.zoo.parallel.zero import flattened, within

SMALL = llama.Config(layers=1, hidden=24, heads=6, kv_heads=2, ffn=10, vocabulary=14, sequence=10)
REAL = llama.Config(2, 4096, 32, 8, ffn=14336, vocabulary=128256, sequence=8192)
GPT = gpt.Config(layers=1, hidden=12, heads=6, ffn=10, vocabulary=14, sequence=10)
GPT2 = gpt.Config(1, 768, 12, vocabulary=50304)

PLANS: dict[str, tuple[llama.Config | gpt.Config, Degrees]] = {
    "zero1 dp2": (REAL, Degrees(dp=2, zero=1)),
    "zero2 dp2 mb2": (replace(REAL, layers=1), Degrees(dp=2, zero=2, microbatches=2)),
    "zero3 dp2": (REAL, Degrees(dp=2, zero=3)),
    "zero3 dp4 mb2": (replace(REAL, layers=1), Degrees(dp=4, zero=3, microbatches=2)),
    "zero1 dp2 tp2 sp mb2": (replace(REAL, layers=1), Degrees(dp=2, tp=2, sp=True, zero=1, microbatches=2)),
    "zero2 dp2 tp2 sp": (replace(REAL, layers=1), Degrees(dp=2, tp=2, sp=True, zero=2)),
    "zero3 dp2 tp4 sp": (replace(REAL, layers=1), Degrees(dp=2, tp=4, sp=True, zero=3)),
    "zero1 dp2 tp2 sp pp2 mb2": (REAL, Degrees(dp=2, tp=2, sp=True, pp=2, zero=1, microbatches=2)),
    "zero2 dp2 pp2 mb2": (REAL, Degrees(dp=2, pp=2, zero=2, microbatches=2)),
    "zero3 dp2 tp2 pp2 mb2, loss divided": (REAL, Degrees(dp=2, tp=2, pp=2, zero=3, microbatches=2, normalise="loss")),
    "gpt zero1 dp2 tp2": (GPT2, Degrees(dp=2, tp=2, zero=1)),
    "gpt zero2 dp2 pp2 mb2, tied": (replace(GPT2, layers=2), Degrees(dp=2, pp=2, zero=2, microbatches=2)),
    "gpt zero3 dp2 tp2 sp pp2 mb2, tied": (replace(GPT2, layers=2), Degrees(dp=2, tp=2, sp=True, pp=2, zero=3, microbatches=2)),
    "zero1 dp512": (replace(REAL, layers=1), Degrees(dp=512, zero=1)),
    "zero1 dp256 tp2": (replace(REAL, layers=1), Degrees(dp=256, tp=2, zero=1)),
    "flat zero1 dp2": (replace(REAL, layers=1), Degrees(dp=2, zero=1, shards="flat")),
    "flat zero2 dp3 mb2, padded": (replace(REAL, layers=1), Degrees(dp=3, zero=2, microbatches=2, shards="flat")),
    "flat zero1 dp4 pp2 mb2": (REAL, Degrees(dp=4, pp=2, zero=1, microbatches=2, shards="flat")),
    "flat gpt zero3 dp3": (GPT2, Degrees(dp=3, zero=3, shards="flat")),
    "chunk zero1 dp3": (replace(REAL, layers=1), Degrees(dp=3, zero=1, shards="chunk")),
    "chunk gpt zero2 dp5, one element left": (GPT2, Degrees(dp=5, zero=2, shards="chunk")),
    "chunk zero3 dp5": (replace(REAL, layers=1), Degrees(dp=5, zero=3, shards="chunk")),
    "small chunk zero3 dp5": (SMALL, Degrees(dp=5, zero=3, shards="chunk")),
    "small zero1 dp3": (SMALL, Degrees(dp=3, zero=1)),
    "small zero2 dp3 mb2": (SMALL, Degrees(dp=3, zero=2, microbatches=2)),
    "small gpt zero3 dp3": (GPT, Degrees(dp=3, zero=3)),
}


def both(config: llama.Config | gpt.Config, how: Degrees, rows: int = 1):  # type: ignore[no-untyped-def]
    rows *= how.dp * how.microbatches
    if isinstance(config, gpt.Config):
        config = replace(config, batch=rows)
        return gpt_step(config), gpt_plan(config, how)
    config = replace(config, batch=rows)
    return llama_step(config), llama_plan(config, how)


@pytest.mark.parametrize("name", PLANS)
def test_plan_is_proved(name: str) -> None:
    config, how = PLANS[name]
    logical, plan = both(config, how, 3 if "small" in name else 1)
    report = verify(logical, plan, points=1)
    assert report.verdict == "PROVED", report.notes
    assert not report.findings
    assert {o.of for o in logical.outputs if o.role == "parameter"} == set(logical.parameters)


# shards that end inside a row of what tensor-parallel ranks have, buckets of little but padding: not proved, numbers agree
UNALIGNED = {
    "small flat zero2 dp3 mb2": (SMALL, Degrees(dp=3, zero=2, microbatches=2, shards="flat")),
    "flat zero3 dp2 tp2 sp": (SMALL, Degrees(dp=2, tp=2, sp=True, zero=3, shards="flat")),
    "chunk zero2 dp4 tp2": (SMALL, Degrees(dp=4, tp=2, zero=2, shards="chunk")),
}


@pytest.mark.parametrize("name", UNALIGNED)
def test_uneven_and_flat_shards_agree(name: str) -> None:
    report = verify(*both(*UNALIGNED[name]), points=1)
    assert report.verdict in ("PROVED", "UNKNOWN"), report.reason
    assert not report.findings
    assert {o.status for o in report.obligations} <= {"proved", "agreed"}, report.reason


def test_pieces_that_are_cut_once_more_have_no_small_sizes() -> None:
    """Rows of a tensor-parallel rank that do not divide: said, and no internal error."""
    logical, plan = both(replace(REAL, layers=1), Degrees(dp=3, tp=2, zero=1, shards="chunk"))
    parts = units(plan)
    system = related(logical, plan, OPS, parts, obligations(logical, plan, parts)[0])
    with pytest.raises(NotABoundary, match="pieces of a bucket are cut once more"):
        shrink_system(system, alternate=False)
    with pytest.raises(TooMuch):
        shrink_system(system, base=FULL, most=1000)


def test_pieces_of_strided_blocks() -> None:
    assert within(Run(5, 4, 3, 10), 2, 11) == [Run(7, 2), Run(15, 4), Run(25, 3)]
    assert within(Run(5, 4, 3, 10), 4, 12) == [Run(15, 4, 2, 10)]
    assert within(Run(5, 4, 3, 10), 5, 7) == [Run(16, 2)]
    assert within(Run(5, 4), 4, 4) == []


def test_positions_in_the_flattened_tensor() -> None:
    rows = Part((0, 0), (Run(2, 3), Run(0, 7)))
    columns = Part((0, 0), (Run(0, 6), Run(2, 5)))
    assert flattened(rows, (6, 7)) == Run(14, 21)
    assert flattened(columns, (6, 7)) == Run(2, 5, 6, 7)
