"""Plans of GPT are proved equal to the step on one device; its embedding is on the first and the last stage."""

from __future__ import annotations

from dataclasses import replace

import pytest

from trainverify.check import validate
from trainverify.verdicts import verify
from trainverify.zoo.gpt import Config
from trainverify.zoo.parallel import Degrees, gpt_plan, gpt_step

SMALL = Config(layers=1, hidden=12, heads=6, ffn=10, vocabulary=14, sequence=10, context=11)

PLANS = {
    "one rank": (SMALL, Degrees()),
    "dp2 mb2": (SMALL, Degrees(dp=2, microbatches=2)),
    "tp2": (SMALL, Degrees(tp=2)),
    "tp2 sp": (SMALL, Degrees(tp=2, sp=True)),
    "pp2 mb2": (replace(SMALL, layers=2), Degrees(pp=2, microbatches=2)),
    "dp2 tp2 pp2 mb2 gpipe": (replace(SMALL, layers=2), Degrees(dp=2, tp=2, pp=2, microbatches=2, schedule="gpipe")),
    "dp2 tp2 sp pp3 mb3": (replace(SMALL, layers=3), Degrees(dp=2, tp=2, pp=3, sp=True, microbatches=3)),
}


def whole(config: Config, how: Degrees, rows: int = 3) -> Config:
    return replace(config, batch=how.dp * how.microbatches * rows)


@pytest.mark.parametrize("name", PLANS)
def test_plan_is_proved(name: str) -> None:
    config, how = PLANS[name]
    config = whole(config, how)
    report = verify(gpt_step(config), gpt_plan(config, how), points=1)
    assert report.verdict == "PROVED", report.notes
    assert not report.findings
    assert len(report.obligations) == 1 + 2 + 4 * (12 * config.layers + 4)


@pytest.mark.parametrize("name", PLANS)
def test_plan_at_real_widths_is_well_formed(name: str) -> None:
    config, how = PLANS[name]
    config = whole(replace(config, hidden=12288, heads=96, ffn=4 * 12288, vocabulary=51200, sequence=2048, context=2048), how, 1)
    assert not list(validate(gpt_step(config), gpt_plan(config, how)))
