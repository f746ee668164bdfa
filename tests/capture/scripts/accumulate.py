"""Gradients of several micro-batches under DDP: torchrun --nproc_per_node=8 accumulate.py"""

import argparse
import contextlib
import logging
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

import trainverify.torch as tvt

log = logging.getLogger("train")


class Points(Dataset):
    """Random features, and the class that a hidden linear function gives them."""

    def __init__(self, count, features, classes):
        torch.manual_seed(3)
        self.x = torch.randn(count, features)
        self.labels = (self.x @ torch.randn(features, classes)).argmax(dim=1)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return {"x": self.x[i], "labels": self.labels[i]}


class Net(nn.Module):
    def __init__(self, features, width, classes):
        super().__init__()
        self.first, self.norm = nn.Linear(features, width), nn.LayerNorm(width)
        self.last = nn.Linear(width, classes)

    def forward(self, x):
        return self.last(F.silu(self.norm(self.first(x))))


def evaluate(model, batch):
    model.eval()
    with torch.no_grad():
        loss = F.cross_entropy(model(batch["x"]), batch["labels"])
    model.train()
    return loss


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=4, help="of a micro-batch on one GPU")
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=0.1)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO)

    world = int(os.environ.get("WORLD_SIZE", "1"))
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if world > 1:
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    device = torch.device(f"cuda:{local}" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)

    model = Net(5, 6, 3).to(device)
    raw = model
    if world > 1:
        model = DistributedDataParallel(model, device_ids=[local], gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, nesterov=True)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.9)
    data = Points(96, 5, 3)
    sampler = DistributedSampler(data, shuffle=True, seed=1) if world > 1 else None
    loader = DataLoader(data, batch_size=args.rows * args.accumulate, sampler=sampler, shuffle=sampler is None, num_workers=1)

    for epoch in range(args.epochs):
        if sampler is not None:
            sampler.set_epoch(epoch)
        for batch in loader:
            batch = {name: t.to(device) for name, t in batch.items()}
            cut = {"x": "(dp b) f", "labels": "(dp b)"}
            with tvt.step(raw, optimizer, batch, cut=cut, below=3, loss_over={"dp": "avg"}) as step:
                total = torch.zeros((), device=device)
                for i in range(args.accumulate):
                    last = i + 1 == args.accumulate
                    rows = slice(i * args.rows, (i + 1) * args.rows)
                    context = model.no_sync() if world > 1 and not last else contextlib.nullcontext()
                    with context:
                        loss = F.cross_entropy(model(batch["x"][rows]), batch["labels"][rows]) / args.accumulate
                        loss.backward()
                    total += loss.detach()
                step.loss = total
                optimizer.step()
                optimizer.zero_grad()
        schedule.step()
        log.info("epoch %d: loss %.3f", epoch, evaluate(raw, batch).item())
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
