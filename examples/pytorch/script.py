"""A script as people run it with torchrun: FSDP2, one line added around the step.

trainverify torch run --world-size 2 --reference-args "--rows 8" -- examples/pytorch/script.py --rows 4
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard

import trainverify.torch as tvt

parser = argparse.ArgumentParser()
parser.add_argument("--rows", type=int, default=4)
parser.add_argument("--classes", type=int, default=10)
rows = parser.parse_args().rows

dist.init_process_group("gloo")
model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 10))
if dist.get_world_size() > 1:
    fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

for _ in range(3):
    x, labels = torch.randn(rows, 16), torch.randint(10, (rows,))
    batch, cut = {"x": x, "labels": labels}, {"x": "(dp b) k", "labels": "(dp b)"}
    with tvt.step(model, optimizer, batch, cut=cut, below=10, loss_over={"dp": "avg"}):
        loss = F.cross_entropy(model(x), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
dist.destroy_process_group()
