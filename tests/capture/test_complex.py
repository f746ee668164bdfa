"""Complex tensors are pairs of real ones: each row against ATen, and what has no row has no value."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is absent: captured code is not tested")

from capture.tracing import agree, traced  # noqa: E402
from trainverify.torch.mappings import COMPLEX  # noqa: E402
from trainverify.torch.values import Unknown  # noqa: E402


def real(*shape: int):
    return torch.rand(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64) - 0.4


def back(x):
    return torch.view_as_real(x)


def rotated(q, angle):
    """As RoPE turns pairs of a head."""
    cache = torch.polar(torch.ones_like(angle), angle)
    return back(torch.view_as_complex(q.reshape(*q.shape[:-1], -1, 2)) * cache[None, :, None, :]).flatten(3)


def test_rotation() -> None:
    agree(rotated, real(2, 3, 5, 4), real(3, 2))


def test_rotation_backwards() -> None:
    """The gradient turns back: PyTorch multiplies by a conjugate that is only marked as one."""

    def gradient(q, angle):
        q = q.detach().requires_grad_()
        (rotated(q, angle) * torch.arange(4)).sum().backward()
        return q.grad

    found = agree(gradient, real(2, 3, 5, 4), real(3, 2))
    assert "neg" in [op.name for op in found.emitter.ops]


POSITIONS = torch.tensor([[2, 0, 4], [1, 1, 3]])


def test_rows() -> None:
    make = torch.complex
    found = [
        agree(lambda a, b: back(make(a, b) * make(b, a)), real(2, 3), real(2, 3) * 2),
        agree(lambda a, b: back(make(a, b) * a), real(2, 3), real(2, 3) * 2),
        agree(lambda a, b: back(b * make(a, b)), real(2, 3), real(2, 3) * 2),
        agree(lambda a, b: back(make(a, b) + make(b, b)), real(2, 3), real(2, 3) * 2),
        agree(lambda a, b: back(-make(a, b)), real(2, 3), real(2, 3) * 2),
        agree(lambda a, b: back(make(a, b).conj().clone()), real(2, 3), real(2, 3) * 2),
        agree(lambda a, b: back(torch.conj_physical(make(a, b))), real(2, 3), real(2, 3) * 2),
        agree(lambda a, b: back(torch.conj_physical(make(a, b).conj())), real(2, 3), real(2, 3) * 2),
        agree(lambda a, b: back(make(a, b).t().contiguous()), real(2, 3), real(2, 3) * 2),
        agree(lambda a, b: back(torch.polar(a, b)), real(2, 3).abs(), real(2, 3)),
        agree(lambda a, b, i: back(make(a, b)[i]), real(5, 3), real(5, 3) * 2, POSITIONS),
        agree(
            lambda a, b, i: back(torch.gather(make(a, b)[None].expand(2, -1, -1), 1, i[:, :, None].expand(2, 3, 3))),
            real(5, 3),
            real(5, 3) * 2,
            POSITIONS,
        ),
    ]
    seen = {name for f in found for name in f.given}
    assert {"aten::polar", "aten::complex", "aten::mul", "aten::add", "aten::neg", "aten::clone", "aten::index", "aten::gather"} <= seen
    assert not any(f.missing for f in found)


@pytest.mark.parametrize(
    "fn",
    [
        lambda a, b: back(torch.exp(torch.complex(a, b))),
        lambda a, b: back(torch.complex(a, b) + a),
        lambda a, b: back(torch.add(torch.complex(a, b), torch.complex(b, a), alpha=2)),
        lambda a, b: torch.complex(a, b).abs(),
        lambda a, b: torch.complex(a, b).to(torch.float32),  # its real part
        lambda a, b: torch.complex(a, b).conj().imag * 1,  # negated when it is read
    ],
)
def test_everything_else_has_no_value(fn) -> None:
    translator, (result,) = traced(fn, (real(2, 3), real(2, 3)))
    assert isinstance(translator.read(result), Unknown)


def test_rows_of_real_tensors_do_not_see_complex_ones() -> None:
    """`sum` would add real and imaginary parts up."""
    assert "aten::sum" not in COMPLEX
    translator, (result,) = traced(lambda a, b: back(torch.complex(a, b).sum()), (real(2, 3), real(2, 3)))
    assert isinstance(translator.read(result), Unknown)
