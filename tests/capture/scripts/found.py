"""A language model and its critic with two optimizers, two micro-batches in a step, and nothing that marks a step."""

import argparse
import contextlib
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Rows(Dataset):
    def __init__(self, count, length, vocabulary):
        self.tokens = [[(7 * i + 3 * j * j + i * j) % vocabulary for j in range(length + 1)] for i in range(count)]

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, i):
        row = torch.tensor(self.tokens[i])
        return {"ids": row[:-1], "next": {"labels": row[1:]}, "name": f"row {i}"}


class Model(nn.Module):
    def __init__(self, vocabulary, width):
        super().__init__()
        self.table = nn.Embedding(vocabulary, width)
        self.last = nn.Linear(width, vocabulary)

    def forward(self, ids):
        return self.last(F.gelu(self.table(ids)))


parser = argparse.ArgumentParser()
parser.add_argument("--rows", type=int, default=2)
parser.add_argument("--accumulate", type=int, default=2)
args = parser.parse_args()
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo")

raw, critic = Model(11, 6), nn.Linear(11, 1)
model = DistributedDataParallel(raw) if world > 1 else raw
optimizer = torch.optim.SGD(raw.parameters(), lr=0.1, momentum=0.9)
others = torch.optim.SGD(critic.parameters(), lr=0.01)
train, held = Rows(26, 5, 11), Rows(4, 5, 11)
sampler = DistributedSampler(train, num_replicas=world, rank=rank, seed=3)
loader = DataLoader(train, batch_size=args.rows, sampler=sampler, drop_last=True)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / (2 * len(loader)))


def losses(batch):
    scores = model(batch["ids"])
    return F.cross_entropy(scores.flatten(0, 1), batch["next"]["labels"].flatten()) / args.accumulate


for epoch in range(2):
    sampler.set_epoch(epoch)
    for i, batch in enumerate(loader):
        last = (i + 1) % args.accumulate == 0
        with contextlib.nullcontext() if last or world == 1 else model.no_sync():
            losses(batch).backward()
        if not last:
            continue
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()

        def closure():
            others.zero_grad()
            guess = critic(torch.ones(2, 11)).square().mean()
            guess.backward()
            return guess

        others.step(closure)
    raw.eval()
    for batch in DataLoader(held, batch_size=4):  # no_grad comes after the batch, as in many scripts
        with torch.no_grad():
            print(f"held out {losses(batch).item():.3f}")
    raw.train()
dist.destroy_process_group()
