"""Plans of Llama with context parallelism, alone and with data, tensor, sequence and pipeline parallelism."""

from __future__ import annotations

from dataclasses import replace

import pytest

from trainverify.build.tape import BuildError
from trainverify.verdicts import verify
from trainverify.zoo.llama import Config
from trainverify.zoo.parallel import Degrees, llama_plan, llama_step

REAL = Config(2, 4096, 32, 8, ffn=14336, vocabulary=128256, sequence=8192)
SMALL = Config(layers=1, hidden=24, heads=12, kv_heads=4, ffn=20, vocabulary=56, sequence=24)

PROVED = {
    "zigzag cp2 mb2": Degrees(cp=2, cp_kind="zigzag", microbatches=2),
    "zigzag dp2 cp2 tp2 pp2 mb2": Degrees(dp=2, cp=2, cp_kind="zigzag", tp=2, pp=2, microbatches=2),
    "zigzag cp2 tp2 mb2, loss divided": Degrees(cp=2, cp_kind="zigzag", tp=2, microbatches=2, normalise="loss"),
    "ring cp4 mb2": Degrees(cp=4, cp_kind="ring", microbatches=2),
    "ring dp2 cp2 tp2 pp2 mb2": Degrees(dp=2, cp=2, cp_kind="ring", tp=2, pp=2, microbatches=2),
    "ulysses cp4 mb2": Degrees(cp=4, cp_kind="ulysses", microbatches=2),
    "ulysses dp2 cp2 tp2 pp2 mb2": Degrees(dp=2, cp=2, cp_kind="ulysses", tp=2, pp=2, microbatches=2),
    "ulysses cp2 tp2 sp mb2": Degrees(cp=2, cp_kind="ulysses", tp=2, sp=True, microbatches=2),
}


def whole(config: Config, how: Degrees, rows: int = 1) -> Config:
    return replace(config, batch=how.dp * how.microbatches * rows)


@pytest.mark.parametrize("name", PROVED)
def test_two_layers_at_real_widths_are_proved(name: str) -> None:
    config = whole(REAL, PROVED[name])
    report = verify(llama_step(config), llama_plan(config, PROVED[name]), points=1)
    assert report.verdict == "PROVED", report.notes
    assert len(report.obligations) == 1 + 2 + 4 * (9 * config.layers + 3)


AGREED = {
    "ring dp2 cp3 tp2": Degrees(dp=2, cp=3, cp_kind="ring", tp=2),
    "zigzag cp2 tp2 sp mb2": Degrees(cp=2, cp_kind="zigzag", tp=2, sp=True, microbatches=2),
}


@pytest.mark.parametrize("name", AGREED)
def test_plan_agrees(name: str) -> None:
    how = AGREED[name]
    config = whole(replace(SMALL, layers=how.pp), how, 3)
    report = verify(llama_step(config), llama_plan(config, how), points=1)
    assert report.verdict in ("PROVED", "UNKNOWN"), report.reason
    assert not report.findings
    assert {o.status for o in report.obligations} <= {"proved", "agreed"}, report.reason


@pytest.mark.parametrize(
    ("config", "how", "why"),
    [
        (replace(SMALL, sequence=22), Degrees(cp=2, cp_kind="zigzag"), "22 positions do not divide among 4"),
        (SMALL, Degrees(cp=8, cp_kind="ulysses"), "12 heads of a tensor-parallel rank do not divide among 8"),
        (SMALL, Degrees(cp=5, cp_kind="ulysses"), "24 positions do not divide among 5"),
    ],
)
def test_refused(config: Config, how: Degrees, why: str) -> None:
    with pytest.raises(BuildError, match=why):
        llama_plan(config, how)
