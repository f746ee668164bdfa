"""Lineage is discovered: which logical tensor every local one is, placed as DTensor would say."""

from __future__ import annotations

from trainverify.prove.algebra.discover import Found
from trainverify.verdicts import lineage
from verdicts.mlp import logical, plan


def test_tensors_are_found_with_their_placement() -> None:
    found = {(f.rank, f.tensor): f for f in lineage(logical(), plan()) if isinstance(f, Found)}
    assert str(found[0, "h1"]) == "rank 0: h1 = h {dp: Shard(0), tp: Shard(1)} on dim 0: block 1 of 2, pp=0"
    assert found[0, "a0.whole"].placement.startswith("{dp: Shard(0), tp: Replicate()}")
    assert found[2, "y0.part"].logical == "y"
    assert found[2, "y0.part"].placement.startswith("{dp: Shard(0), tp: Partial()}")
    assert (found[2, "w2.grad.2"].logical, found[2, "w2.grad.2"].factor) == ("w2.grad", 2)
    assert found[2, "w2.grad.2"].placement.startswith("{dp: Partial(), tp: Shard(1)}")
    assert found[2, "mean0"].logical is None  # one micro-batch's share of a sum
