"""The storage model: views and writes of any kind, against PyTorch on the same memory."""

from __future__ import annotations

import random

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is absent: captured code is not tested")

from capture.tracing import agree, traced  # noqa: E402
from trainverify.torch.values import Unknown  # noqa: E402


def real(*shape: int):
    return torch.rand(shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def random_view(t, rng: random.Random):
    """A few random view ops."""
    for _ in range(rng.randrange(1, 5)):
        kind = rng.choice(("t", "slice", "step", "select", "merge", "split", "unsqueeze", "permute"))
        d = rng.randrange(t.ndim) if t.ndim else 0
        if kind == "t" and t.ndim > 1:
            t = t.transpose(0, d)
        elif kind == "slice" and t.ndim and t.shape[d] > 2:
            start = rng.randrange(t.shape[d] - 1)
            t = t.narrow(d, start, rng.randrange(1, t.shape[d] - start + 1))
        elif kind == "step" and t.ndim and t.shape[d] > 2:
            t = t[(slice(None),) * d + (slice(rng.randrange(2), None, 2),)]
        elif kind == "select" and t.ndim > 1:
            t = t.select(d, rng.randrange(t.shape[d]))
        elif kind == "merge" and t.ndim > 1 and t.is_contiguous():
            t = t.view(-1, *t.shape[2:])
        elif kind == "split" and t.ndim and t.shape[d] % 2 == 0 and t.shape[d] > 2:
            t = t.unflatten(d, (2, t.shape[d] // 2))
        elif kind == "unsqueeze":
            t = t.unsqueeze(d)
        elif kind == "permute" and t.ndim > 2:
            t = t.permute(rng.sample(range(t.ndim), t.ndim))
    return t


@pytest.mark.parametrize("seed", range(60))
def test_reads(seed: int) -> None:
    agree(lambda a: random_view(a, random.Random(seed)) * 2, real(4, 6, 10))


@pytest.mark.parametrize("seed", range(60))
def test_writes(seed: int) -> None:
    """Equal: in-place writes through views, and reads of the whole memory afterwards."""

    def change(a):
        a = a.clone()
        for i in range(3):
            view = random_view(a, random.Random(100 * seed + i))
            view.mul_(2 + i)
        return a + 1, random_view(a, random.Random(seed)).sum()

    agree(change, real(4, 6, 8))


def test_flat_bucket() -> None:
    """Equal: tensors copied into a flat buffer, the buffer scaled, and read back in pieces."""

    def bucket(a, b):
        flat = torch.empty(a.numel() + b.numel(), dtype=torch.float64)
        flat[: a.numel()].copy_(a.reshape(-1))
        flat[a.numel() :].view(b.shape).copy_(b)
        flat.mul_(0.5)
        return flat[: a.numel()].view(a.shape) + a, flat[a.numel() :].view(b.shape).t()

    agree(bucket, real(2, 3), real(5, 7))


def test_in_place_on_an_input() -> None:
    agree(lambda a, b: a.add_(b).mul_(3), real(2, 3), real(3), also=(0,))


def test_shapes_changed_in_place() -> None:
    """Equal: the same memory, seen in another way; a write through it is seen by the first view."""

    def change(a):
        b = a.clone()
        c = b.view(1, *b.shape).squeeze_(0).t_().unsqueeze_(1)
        c[0].mul_(3)
        return b + 1, c.transpose_(0, 2) * 2

    agree(change, real(2, 3))


def test_memory_that_was_never_written() -> None:
    """No value: half of the buffer is read without being written."""

    def read(a):
        flat = torch.empty(5, dtype=torch.float64)
        flat[:3].copy_(a)
        return flat * 2, flat[:3] * 2

    translator, (whole, part) = traced(read, [real(3)])
    unknown = translator.read(whole)
    assert isinstance(unknown, Unknown)
    assert "never written" in unknown.reason
    assert isinstance(translator.read(part), str)


def test_memory_of_another_dtype() -> None:
    """No value: bits of a float read as an integer."""
    translator, (made,) = traced(lambda a: a.view(torch.int64) + 1, [real(3)])
    assert isinstance(translator.read(made), Unknown)
