"""A fixed slice of PyTorch's own samples; `python -m tools.opinfo` compares all of them (make capture)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is absent: captured code is not tested")
pytest.importorskip("expecttest", reason="PyTorch's database of operators needs it")

from tools.opinfo import compare, table  # noqa: E402

EQUAL = (  # entries all of whose samples in the slice are equal
    *("add", "mul", "div.no_rounding_mode", "clamp", "sum", "var", "cumsum", "scatter_add", "index_add"),
    *("nn.functional.gelu", "nn.functional.silu", "nn.functional.softplus", "nn.functional.layer_norm", "nn.functional.group_norm"),
    *("nn.functional.nll_loss", "nn.functional.mse_loss", "nn.functional.embedding", "addmm", "baddbmm"),
    *("nn.functional.conv2d", "nn.functional.max_pool2d", "nn.functional.dropout", "nn.functional.kl_div", "polar", "unfold"),
    *("sort", "median", "diagonal", "scatter_reduce.amax", "max.reduction_with_dim", "linalg.vector_norm", "gather"),
)
PARTLY = ("topk", "pow", "logsumexp", "nn.functional.batch_norm", "index_put")  # some have no meaning here
REFUSED = ("erfinv", "fft.rfft", "mode")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    torch.autograd.set_multithreading_enabled(False)
    yield
    torch.autograd.set_multithreading_enabled(True)


@pytest.mark.filterwarnings("ignore")
def test_a_slice_of_the_database() -> None:
    """No sample is wrong; what was equal stays so."""
    found = {e.name: e for e in table(most=3, names=(*EQUAL, *PARTLY, *REFUSED))}
    assert found.keys() == {*EQUAL, *PARTLY, *REFUSED}
    outcomes = {n: e.outcome for n, e in found.items()}
    assert {n: o for n, o in outcomes.items() if o == "wrong"} == {}
    assert {n: str(found[n]) for n in EQUAL if outcomes[n] != "equal"} == {}
    assert {n: str(found[n]) for n in REFUSED if outcomes[n] != "refused"} == {}


def test_a_wrong_row_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from trainverify.torch.mappings import MAPPINGS

    x = torch.tensor([[0.5, -2.0, 7.0], [3.0, 0.0, -1.0]], dtype=torch.float64, requires_grad=True)
    assert compare(torch.tanh, [x], {}) == ("equal", "")
    right = MAPPINGS["aten::tanh_backward"]

    def wrong(a: Any) -> Any:
        return a.e.op("mul", (right(a),), {"value": 2})

    monkeypatch.setitem(MAPPINGS, "aten::tanh_backward", wrong)
    outcome, why = compare(torch.tanh, [x], {})
    assert outcome == "wrong"
    assert why.startswith("gradient 0")
