"""Plans of DeepSeek: latent attention and experts, divided among data- and tensor-parallel ranks and stages."""

from __future__ import annotations

from dataclasses import replace

import pytest

from trainverify.build.tape import BuildError
from trainverify.verdicts import verify
from trainverify.zoo.deepseek import PRESETS, Config, Gate
from trainverify.zoo.parallel import Degrees, deepseek_plan, deepseek_step

GATES = {
    "16b": Gate(8, 3),
    "236b": Gate(12, 3, scale=16.0, groups=4, top_groups=2),
    "671b": Gate(12, 3, "sigmoid", normalize=True, scale=2.5, groups=4, top_groups=2, group_score="top2", bias=True),
}
ONE = Degrees(normalise="loss")


def small(name: str, layers: int = 2) -> Config:
    rank = PRESETS[f"deepseek-{name}"].q_rank and 10
    return Config(layers, 1, 24, 6, 20, 10, 2, GATES[name], 56, sequence=6, q_rank=rank, kv_rank=14, head=8, rotary=4, value=6)


def whole(config: Config, how: Degrees, rows: int = 1) -> Config:
    return replace(config, batch=how.dp * how.microbatches * rows)


REAL = {
    "16b alone": ("16b", replace(ONE, microbatches=2)),
    "16b dp4 ep4": ("16b", replace(ONE, dp=4, ep=4, microbatches=2)),
    "236b dp4 ep2 tp2": ("236b", replace(ONE, dp=4, ep=2, tp=2, microbatches=2)),
    "236b dp4 ep2 tp2 sp pp2": ("236b", replace(ONE, dp=4, ep=2, tp=2, sp=True, pp=2, microbatches=2)),
    "671b tp2 sp": ("671b", replace(ONE, tp=2, sp=True, microbatches=2)),
    "671b dp8 ep4 tp4 pp2": ("671b", replace(ONE, dp=8, ep=4, tp=4, pp=2, microbatches=2)),
    "16b zero1 dp16 ep4 tp4 pp2": ("16b", replace(ONE, dp=16, ep=4, tp=4, pp=2, zero=1, microbatches=2)),
    "236b zero2 dp4 ep4": ("236b", replace(ONE, dp=4, ep=4, zero=2, microbatches=2)),
    "671b zero3 dp4 ep2 tp2 sp": ("671b", replace(ONE, dp=4, ep=2, tp=2, sp=True, zero=3)),
}


@pytest.mark.parametrize("name", REAL)
def test_real_widths_are_proved(name: str) -> None:
    """One dense layer and one with experts."""
    model, how = REAL[name]
    config = whole(replace(PRESETS[f"deepseek-{model}"], layers=2, dense_layers=1), how)
    report = verify(deepseek_step(config), deepseek_plan(config, how), points=1)
    assert report.verdict == "PROVED", report.notes
    assert not report.findings


@pytest.mark.parametrize("name", GATES)
def test_more_layers_and_rows_are_proved(name: str) -> None:
    how = replace(ONE, dp=4, ep=2, tp=2, sp=name == "236b", pp=2, microbatches=2)
    config = whole(small(name, 3), how, 2)
    report = verify(deepseek_step(config), deepseek_plan(config, how), points=1)
    assert report.verdict == "PROVED", report.notes
    assert not report.findings


@pytest.mark.parametrize(
    ("config", "how", "why"),
    [
        (small("16b"), Degrees(), 'normalise="loss"'),
        (small("16b"), replace(ONE, dp=2, ep=4), "2 data-parallel ranks do not divide among 4"),
        (replace(small("16b"), batch=5), replace(ONE, dp=5, ep=5), "8 experts do not divide among 5"),
        (small("16b"), replace(ONE, cp=2), "plans of DeepSeek with context parallelism have cp_kind=ulysses, not ring"),
        (replace(small("16b"), balance="batch"), ONE, "every sequence"),
    ],
)
def test_refused(config: Config, how: Degrees, why: str) -> None:
    with pytest.raises(BuildError, match=why):
        deepseek_plan(config, how)
