"""A small language model for DeepSpeed, and how it is trained: what `trainverify deepspeed` verifies if no file is given."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import trainverify.torch as tvt

VOCABULARY, DIM, ROWS, LENGTH = 11, 6, 1, 5
HIDDEN = 10, 8  # of every block; two ranks cut within a parameter, and pad the last one
batch = {
    "ids": tvt.Ids((ROWS, LENGTH), below=VOCABULARY),
    "labels": tvt.Ids((ROWS, LENGTH), below=VOCABULARY),
}


class Block(nn.Module):  # type: ignore[misc]
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up = nn.Linear(DIM, hidden)
        self.down = nn.Linear(hidden, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return y


class Language(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, DIM)
        self.blocks = nn.Sequential(*map(Block, HIDDEN))
        self.head = nn.Linear(DIM, VOCABULARY, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.head(self.blocks(self.embedding(ids)))
        return scores


def model() -> nn.Module:
    return Language()


def loss(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch["ids"]).flatten(0, 1), batch["labels"].flatten())


def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.1)
