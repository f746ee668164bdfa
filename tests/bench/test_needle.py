"""One changed op on one of many ranks: what counts as found, named, harmless."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from trainverify.bench import needle
from trainverify.bench.case import Case
from trainverify.bench.needle import Needle, searched, where, where_of
from trainverify.cli import run
from trainverify.graph.program import Op
from trainverify.zoo.parallel import Degrees

TINY = {"hidden": 24, "heads": 6, "kv_heads": 2, "ffn": 20, "vocabulary": 28, "sequence": 6}


def tiny(layers: int | None = None) -> Case:
    """More ranks than are evaluated one by one."""
    return Case("tiny", "llama3-8b", Degrees(dp=40, tp=2, microbatches=2), layers or 1, 80, tuple(TINY.items()))


@pytest.mark.parametrize(
    ("seed", "verdict", "rank", "layer", "microbatch", "tensor"),
    [
        (0, "INVALID", 49, None, 1, "mb1/exponentials.grad"),  # an input of the wrong shape
        (13, "INVALID", 33, 0, 0, "mb0/layers.0.attention.normed.grad.once"),  # one collective too many
        (16, "INVALID", 46, None, 1, "mb1/weight"),  # another group
        (23, "INVALID", 37, 0, None, "layers.0.feed_forward.w2.grad.final"),  # an op that is missing
        (1, "REFUTED", 17, None, 0, "mb0/normed"),  # eps doubled
        (4, "REFUTED", 30, 0, None, "layers.0.attention.wq.grad.2"),  # mul for add
        (15, "REFUTED", 26, 0, 1, "mb1/layers.0.ffn.gate"),  # another micro-batch's tensor for a matrix product
        (19, "REFUTED", 5, 0, None, "layers.0.feed_forward.w1.new"),  # in the optimizer
    ],
)
def test_found_and_named(seed: int, verdict: str, rank: int, layer: int | None, microbatch: int | None, tensor: str) -> None:
    n = searched(tiny(), seed)
    assert (n.verdict, n.rank, n.layer, n.microbatch) == (verdict, rank, layer, microbatch)
    assert n.named.startswith(f"{tensor} on rank {rank} ")
    assert n.complete
    assert not n.harmless


def test_a_change_that_makes_no_difference_is_no_needle() -> None:
    """The gradient of a sum needs only the shapes of what was added; here it is given another tensor."""
    n = searched(replace(tiny(), how=Degrees(dp=3, tp=2, microbatches=2), batch=6), 20)
    assert (n.verdict, n.harmless) == ("PROVED", True)


def test_layers_and_microbatches_in_names() -> None:
    assert where_of(["mb14/layers.8.attention.q", "=", "add", "layers.3.w.grad.6"]) == ({8, 3}, {14})
    assert where_of(["players.3.x", "mb1", "tmb2/x"]) == (set(), set())
    assert where([Op("send", ("mb3/layers.11.residual",), ())]) == (11, 3)
    assert where([Op("add", ("a", "b"), ("tokens",))]) == (None, None)


def made(**changes: object) -> Needle:
    base = Needle(0, 5, "x", 1, 2, "REFUTED", "", "", True, True, True, True, False, {}, 1.0, 1.5)
    return Needle(**{**vars(base), **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("missing", ["rank_named", "op_named", "layer_named", "microbatch_named"])
def test_one_name_missing_is_not_complete(missing: str) -> None:
    assert made().complete
    assert not made(**{missing: False}).complete


@pytest.mark.parametrize(
    ("needles", "code"),
    [
        ([made(), made(verdict="INVALID")], 0),
        ([made(), made(op_named=False)], 3),
        ([made(), made(verdict="UNKNOWN")], 3),
        ([made(verdict="UNKNOWN", harmless=True), made(), made()], 0),
        ([made(verdict="PROVED", harmless=True), made()], 3),  # too few that count
    ],
)
def test_exit_code(needles: list[Needle], code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(needle, "bench", lambda *_: iter(needles))
    assert run(["bench", "needle", "--count", "2"]) == code
    assert "at most 1.5× the time of the correct plan" in capsys.readouterr().out.replace("\n", " ")


def test_in_processes_of_their_own() -> None:
    (found,) = needle.bench(count=1, seed=10, of=tiny)
    assert (found.verdict, found.rank, found.complete) == ("REFUTED", 73, True)
    assert found.times > 0
    assert found.megabytes > 20
    assert {"build", "validate", "axes", "cross-check", "explain"} <= set(found.phases)
    assert json.loads(json.dumps(found.json()))["layer"] is None
