"""Every distinct call is run beside its mapping: one that disagrees, or writes what its schema does not name, has no value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is absent: captured code is not tested")

import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

import trainverify.torch as tvt  # noqa: E402
from trainverify.torch.beside import AGREED, Beside  # noqa: E402
from trainverify.torch.bodies import _formula  # noqa: E402
from trainverify.torch.compositions import COMPOSITIONS  # noqa: E402
from trainverify.torch.drawn import Drawing, smaller  # noqa: E402
from trainverify.torch.mappings import MAPPINGS, Row  # noqa: E402
from trainverify.torch.record import Recorder  # noqa: E402
from trainverify.torch.translate import Translator, type_of  # noqa: E402
from trainverify.torch.values import Unknown  # noqa: E402
from trainverify.translate.emit import Place  # noqa: E402

A = torch.ops.aten


def captured(fn: Callable[..., Any], *shapes: Any, rows: dict[str, Row] | None = None) -> tuple[Beside, Any]:
    """What was found of the calls of a function, and the value of its result; a shape that begins with a number below 0 is of ids."""
    translator, beside = Translator(Place, mappings=rows), Beside()
    translator.begin()
    with FakeTensorMode(allow_non_fake_inputs=True), Recorder(translator, beside=beside):
        given = []
        for i, shape in enumerate(shapes):
            ids = shape[:1] == (-1,)
            t = torch.empty(shape[1:] if ids else shape, dtype=torch.int64 if ids else torch.float32)
            translator.define(t, translator.emitter.declare(f"x{i}", type_of(t)))
            if ids:
                translator.emitter.nonnegative.add(f"x{i}")
            given.append(t)
        made = fn(*given)
        return beside, translator.read(made)


AGREEING: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "large product": (lambda a, b: a @ b, ((5000, 4096), (4096, 14336))),
    "product of its own size": (lambda a, b: a @ b, ((50, 40), (40, 70))),
    "itself": (lambda a: a.mul_(a), ((2, 3),)),
    "embedding": (lambda i, w: F.embedding(i, w), ((-1, 8, 4096), (128256, 4096))),
    "its gradient": (lambda g, i: A.embedding_dense_backward(g, i, 128256, -1, False), ((8, 4096, 4096), (-1, 8, 4096))),
    "loss": (lambda x, t: A.nll_loss_forward(x, t, None, 1, -100)[0], ((32768, 128256), (-1, 32768))),
    "attention": (lambda q, k: F.scaled_dot_product_attention(q, k, k, is_causal=True), ((2, 3, 4096, 128), (2, 3, 4096, 128))),
    "group norm": (lambda x: F.group_norm(x, 32, eps=1e-5), ((2, 4096, 70),)),
    "list": (lambda a, b: (torch._foreach_mul_([a, b], [0.3, 0.7]), a)[1], ((4096, 4096), (5,))),
    "constant ids": (lambda a: a[torch.arange(3, 9)], ((4096, 70000),)),
    "count": (lambda a: a + torch.tensor(2.0).add_(1), ((2, 3),)),
    "clamp between": (lambda i: torch.clamp(i - 3, 0, 5), ((-1, 7),)),
    "half of a slice": (lambda g: A.slice_backward(g, [4, 32, 4096, 128], 3, 64, 1 << 62, 1), ((4, 32, 4096, 64),)),
    "range of a slice": (lambda g: A.slice_backward(g, [2, 8192], 1, 4096, 8192, 1), ((2, 4096),)),
}


@pytest.mark.parametrize("name", AGREEING)
def test_agreeing(name: str) -> None:
    fn, shapes = AGREEING[name]
    AGREED.clear()
    beside, value = captured(fn, *shapes)
    assert isinstance(value, str), value
    assert beside.faults == {}
    assert beside.said() == []
    assert AGREED


def test_a_wrong_composition(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(COMPOSITIONS, "aten::hypot", lambda a, b: (a * a + b).abs().sqrt())
    _formula.cache_clear()
    AGREED.clear()
    try:
        beside, value = captured(torch.hypot, (2, 3), (2, 3))
    finally:
        _formula.cache_clear()
    assert len(beside.faults) == 1
    assert isinstance(value, Unknown)


def test_a_wrong_row() -> None:
    """At one point in three the numbers are tied, zero or negative: a row that is wrong there only is found."""

    def wrong(a: Any) -> Any:
        return a.e.op("abs", (a.tensor("self"),))

    for shape in ((2, 3), (4096, 70000)):
        beside, value = captured(torch.relu, shape, rows={"aten::relu": wrong})
        assert isinstance(value, Unknown)
        assert "PyTorch computes something else" in value.reason
        assert len(beside.faults) == 1
    _, value = captured(torch.relu, (2, 3))
    assert isinstance(value, str)


def test_a_row_that_is_wrong_for_one_argument() -> None:
    """The right row for two dimensions sums up all: other arguments are other calls."""

    def wrong(a: Any) -> Any:
        dims = a.ints("dim")
        return a.e.op("sum", (a.tensor("self"),), {"dim": (0,) if dims == (1,) else dims, "keepdim": bool(a.raw("keepdim"))})

    rows = {"aten::sum": wrong}
    assert isinstance(captured(lambda a: a.sum(0), (3, 3), rows=rows)[1], str)
    assert isinstance(captured(lambda a: a.sum(1), (3, 3), rows=rows)[1], Unknown)


def _library() -> Any:
    library = torch.library.Library("beside_tests", "FRAGMENT")
    library.define("doubled(Tensor x) -> Tensor")
    library.define("doubled_and_more(Tensor x) -> Tensor")

    def doubled(x: Any) -> Any:
        return x * 2

    def doubled_and_more(x: Any) -> Any:
        made = x * 2
        if x.device.type == "cpu":
            x.add_(1)
        return made

    library.impl("doubled", doubled, "CPU")
    library.impl("doubled_and_more", doubled_and_more, "CPU")
    library.impl("doubled", doubled, "Meta")
    library.impl("doubled_and_more", doubled, "Meta")
    return library


LIBRARY = _library()


@pytest.mark.parametrize(("name", "fault"), [("doubled", False), ("doubled_and_more", True)])
def test_an_argument_that_is_written_without_a_word(name: str, fault: bool) -> None:
    """Its schema does not name it; the argument has no value afterwards."""
    rows: dict[str, Row] = {f"beside_tests::{name}": lambda a: a.e.op("mul", (a.tensor("x"),), {"value": 2})}

    def run(x: Any) -> Any:
        getattr(torch.ops.beside_tests, name)(x)
        return x

    beside, value = captured(run, (2, 3), rows=rows)
    assert bool(beside.faults) is fault
    assert isinstance(value, Unknown) is fault


def test_a_call_that_cannot_be_made_smaller_is_listed() -> None:
    beside, value = captured(lambda g: A.slice_backward(g, [2, 500111], 1, 100003, 300033, 1), (2, 200030))
    assert isinstance(value, str)
    assert beside.said() == []  # less than a million elements: run at its own size
    beside, value = captured(lambda g: A.slice_backward(g, [9, 500111], 1, 100003, 300033, 1), (9, 200030))
    assert isinstance(value, str)
    assert "aten::slice_backward" in beside.said()[0]


def test_smaller() -> None:
    def elements(by: Any) -> int:
        return by.get(8192, 8192) * by.get(4096, 4096)

    assert smaller([8192, 4096, 70], {}, elements, 100_000_000) == {}
    assert smaller([8192, 4096, 70], {}, elements, 1000_000) == {8192: 3}
    assert smaller([8192, 4096, 70], {}, elements, 1000) == {4096: 3, 8192: 6}  # a multiple stays one
    assert smaller([8192, 4096, 70, 4026], {4096: (70, 4026)}, elements, 100) == {70: 3, 4026: 4, 4096: 7, 8192: 14}
    assert smaller([8192, 4096, 128], {}, elements, 13) == {4096: 3, 8192: 4}  # where there is no room for multiples


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))

    def forward(self, x: Any) -> Any:
        return torch.tanh(x * self.weight).sum()


@pytest.mark.parametrize("wrong", [False, True])
def test_a_step(wrong: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """UNKNOWN where the row of a backward pass is wrong, though both sides have it alike; PROVED with the right one."""
    right = MAPPINGS["aten::tanh_backward"]
    if wrong:
        monkeypatch.setitem(MAPPINGS, "aten::tanh_backward", lambda a: a.e.op("neg", (right(a),)))

    def stepped() -> Any:
        model = Model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(batch: Any) -> Any:
            loss = model(batch["x"])
            loss.backward()
            optimizer.step()
            return loss

        return step

    report = tvt.verify(stepped, lambda rank, world: stepped(), 2, {"x": tvt.Reals((2, 6), "b k")}, {"dp": 2}, points=1)
    assert report.verdict == ("UNKNOWN" if wrong else "PROVED"), report.reason
    if wrong:
        assert "PyTorch computes something else" in str(report)


def test_a_total_weight_is_not_0() -> None:
    """Where labels count their weights are not 0 in sum: PyTorch would give what no formula does."""
    drawn = [Drawing("aten::nll_loss_backward", seed, False, {}, 5, -100) for seed in range(99)]
    assert all(float(d.tensor("total_weight", (), torch.float32, False)) > 0 for d in drawn)
