"""A small model for DeepSpeed: its layer `spare` is not used, and labels may be ignored."""

import torch
import torch.nn.functional as F
from torch import nn

import trainverify.torch as tvt

VOCABULARY, DIM = 7, 4
IGNORED = -100
batch = {"ids": tvt.Ids((2, 3), below=VOCABULARY), "labels": tvt.Ids((2, 3), below=VOCABULARY)}


class Model(nn.Module):
    def __init__(self, spare=True):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, DIM)
        self.head = nn.Linear(DIM, VOCABULARY)
        self.spare = nn.Linear(DIM, 3) if spare else None

    def forward(self, ids):
        return self.head(self.embedding(ids).tanh())


def model():
    return Model()


def loss(model, batch):
    return F.cross_entropy(model(batch["ids"]).flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORED)


def optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)
