"""What language models share: token inputs, the loss over valid tokens, rotary tables, heads."""

# mypy: disable-error-code="no-any-return"
from __future__ import annotations

from typing import Final, Literal

from trainverify.build.program import ProgramBuilder
from trainverify.build.tape import Tape, Tensor

IGNORED: Final = -100

# What a batch's loss is:
#   per_token     the mean over all valid tokens
#   per_sequence  the mean over sequences of each one's mean over its valid tokens
#   sum           the sum over all valid tokens
Loss = Literal["per_token", "per_sequence", "sum"]


def tokens(b: ProgramBuilder, batch: int, sequence: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    """Token ids, and the id that each position has to predict (−100: none)."""
    ids = b.input("tokens", (batch, sequence), "i64", ids=vocabulary)
    return ids, b.input("labels", (batch, sequence), "i64", ids=vocabulary, ignore=IGNORED)


def token_loss(b: ProgramBuilder, logits: Tensor, labels: Tensor, convention: Loss) -> Tensor:
    """Cross-entropy of logits [b, s, v] over the labels [b, s] that are not ignored."""
    if convention == "sum":
        return b.cross_entropy(logits, labels, reduction="sum", ignore_index=IGNORED, name="loss")
    valid = b.float(b.ne(labels, value=IGNORED, name="valid"), name="valid.float")
    if convention == "per_token":
        total = b.cross_entropy(logits, labels, reduction="sum", ignore_index=IGNORED, name="loss.sum")
        return b.div(total, b.sum(valid, name="loss.valid"), name="loss")
    each = b.sum(b.cross_entropy(logits, labels, reduction="none", ignore_index=IGNORED, name="loss.tokens"), dim=1, name="loss.sums")
    return b.mean(b.div(each, b.sum(valid, dim=1, name="loss.valid"), name="loss.sequences"), name="loss")


class Rotary:
    """Tables of cos and sin, one row for each position and one column for each pair; rows 0 … s−1, or those of `positions`."""

    def __init__(self, b: ProgramBuilder, rows: int, size: int, sequence: int, style: str, positions: Tensor | None = None):
        self.style = style
        tables = [b.state(f"rope.{name}", (rows, size // 2)) for name in ("cos", "sin")]
        if positions is None:
            self.tables = [b.slice(t, dim=0, start=0, stop=sequence, name=t.name + ".rows") for t in tables]
        else:  # [batch, 1, sequence, pairs]: the same for every head
            self.tables = [b.unsqueeze(b.embedding(positions, t, name=t.name + ".rows"), dim=1, name=t.name + ".heads") for t in tables]

    def turn(self, b: ProgramBuilder, x: Tensor, name: str) -> Tensor:
        """x [batch, heads, sequence, size], every pair turned by its position's angle."""
        return b.apply_rotary_emb(x, *self.tables, style=self.style, name=name)


def split_heads(b: Tape, x: Tensor, heads: int, name: str) -> Tensor:
    """[b, s, heads·d] → [b, heads, s, d]."""
    batch, sequence, width = x.shape
    rows = b.view(x, shape=(batch, sequence, heads, width // heads), name=name + ".split")
    return b.transpose(rows, dim0=1, dim1=2, name=name + ".heads")


def join_heads(b: Tape, x: Tensor, name: str) -> Tensor:
    """[b, heads, s, d] → [b, s, heads·d]."""
    batch, heads, sequence, size = x.shape
    rows = b.transpose(x, dim0=1, dim1=2, name=name + ".rows")
    return b.reshape(rows, shape=(batch, sequence, heads * size), name=name + ".joined")


def swiglu(b: Tape, x: Tensor, gate: Tensor, up: Tensor, down: Tensor, name: str) -> Tensor:
    """down·(silu(gate·x) ∘ up·x)."""
    opened = b.silu(b.linear(x, gate, name=name + ".gate"), name=name + ".silu")
    return b.linear(b.mul(opened, b.linear(x, up, name=name + ".up"), name=name + ".hidden"), down, name=name + ".down")
