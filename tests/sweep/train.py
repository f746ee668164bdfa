"""PyTorch code with a right and a wrong distributed step, as a file of a user's."""

TRAIN = """
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import trainverify.torch as tvt

batch = {"x": tvt.Reals((4, 3), "(dp b) k")}
loss = {"dp": "avg"}


def trained(called, model, scale=1.0):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch):
        loss = called(batch["x"]).square().mean()
        (loss * scale).backward()
        optimizer.step()
        return loss

    return step


def reference():
    model = nn.Linear(3, 5)
    return trained(model, model)


def distributed(rank, world, scale=1.0):
    model = nn.Linear(3, 5)
    return trained(DistributedDataParallel(model), model, scale)


def wrong(rank, world):
    return distributed(rank, world, 1 / world)
"""
