"""Integers from constants alone are written as ranges, and what is taken by them as slices: the same numbers, and nothing by data."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is absent: captured code is not tested")

from capture.tracing import agree  # noqa: E402


def real(*shape: int):
    return torch.rand(shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def ops(translator) -> list[str]:
    return [op.name for op in translator.emitter.ops]


def test_positions_of_a_rank_are_a_range() -> None:
    """As FlexAttention's mask counts queries of a part of the sequence, in blocks."""

    def positions(x):
        i = torch.arange(8)
        return x * ((2 * 3 + i // 4) * 4 + i % 4)

    found = agree(positions, real(8))
    assert any(op.name == "arange" and (op.get("start"), op.get("stop")) == (24, 32) for op in found.emitter.ops)


def dealt(length: int, ranks: int):
    """Heads and tails of a row, in turn."""
    chunks = torch.arange(length).view(2 * ranks, -1)
    head = torch.arange(ranks)
    return torch.stack([chunks[head], chunks[2 * ranks - 1 - head]], dim=1).reshape(-1)


def test_parts_that_are_dealt_out_are_slices() -> None:
    found = agree(lambda x: x.gather(1, dealt(12, 2).expand(5, 12)), real(5, 12))
    starts = [op.get("start") for op in found.emitter.ops if op.name == "slice" and op.inputs == ("x0",)]
    assert starts == [0, 9, 3, 6]
    assert "take_along_dim" not in ops(found)


def test_other_parts_for_other_rows_are_looked_up() -> None:
    """Its twin: rows that are dealt out in different ways are no slices."""
    found = agree(lambda x: x.gather(1, torch.stack([torch.arange(4), 3 - torch.arange(4)])), real(2, 4))
    assert "take_along_dim" in ops(found)


def test_an_element_that_is_taken_twice_is_looked_up() -> None:
    found = agree(lambda x: x.index_select(0, torch.arange(4) // 2), real(3, 2))
    assert "index_select" in ops(found)


def test_data_are_not_computed() -> None:
    """floor_divide of a source stays one."""
    found = agree(lambda x, i: x[i // 2], real(3, 2), torch.tensor([0, 3, 5]))
    assert "floordiv" in ops(found)
