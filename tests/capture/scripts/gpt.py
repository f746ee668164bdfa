"""A small GPT under DDP: torchrun --nproc_per_node=8 gpt.py"""

import argparse
import math
import os
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

import trainverify.torch as tvt


class Tokens(Dataset):
    def __init__(self, length, block, vocabulary):
        generator = torch.Generator().manual_seed(0)
        self.data = torch.randint(vocabulary, (length * block + 1,), generator=generator)
        self.length, self.block = length, block

    def __len__(self):
        return self.length

    def __getitem__(self, i):
        at = i * self.block
        return self.data[at : at + self.block], self.data[at + 1 : at + 1 + self.block]


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        b, s, w = x.shape
        q, k, v = (t.view(b, s, self.heads, -1).transpose(1, 2) for t in self.qkv(self.before(x)).split(w, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, s, w))
        return x + self.down(F.gelu(self.up(self.after(x))))


class GPT(nn.Module):
    def __init__(self, vocabulary, block, width, heads, layers):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(block, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids, labels):
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=11)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16"])
    parser.add_argument("--out", default="out")
    args = parser.parse_args()

    distributed = int(os.environ.get("WORLD_SIZE", 1)) > 1
    rank = int(os.environ.get("RANK", 0))
    local = int(os.environ.get("LOCAL_RANK", 0))
    assert torch.cuda.is_available(), "a GPU is needed"
    if distributed:
        dist.init_process_group("nccl")
    torch.cuda.set_device(local)
    device = torch.device("cuda", local)
    torch.manual_seed(1337)
    torch.cuda.manual_seed_all(1337)
    torch.backends.cuda.matmul.allow_tf32 = True
    dtype = getattr(torch, args.dtype)

    model = GPT(args.vocabulary, 4, 8, 2, 1).to(device)
    if distributed:
        model = DistributedDataParallel(model, device_ids=[local])
    raw = model.module if isinstance(model, DistributedDataParallel) else model
    decayed = [p for p in raw.parameters() if p.dim() >= 2]
    others = [p for p in raw.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: min(1.0, (i + 1) / 10) * (1 + math.cos(i / 100)) / 2)
    scaler = torch.amp.GradScaler("cuda", enabled=args.dtype == "float16")

    data = Tokens(1000, 4, args.vocabulary)
    sampler = DistributedSampler(data, shuffle=True) if distributed else None
    loader = DataLoader(data, batch_size=args.rows, sampler=sampler, num_workers=2, pin_memory=True, drop_last=True)
    if rank == 0:
        os.makedirs(args.out, exist_ok=True)

    model.train()
    began = time.time()
    for i, (ids, labels) in enumerate(loader):
        ids, labels = ids.to(device, non_blocking=True), labels.to(device, non_blocking=True)
        batch = {"ids": ids, "labels": labels}
        with tvt.step(raw, optimizer, batch, cut="(dp b) s", below=args.vocabulary, loss_over={"dp": "avg"}) as step:
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast("cuda", dtype=dtype):
                loss = model(ids, labels)
            step.loss = loss
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(raw.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            schedule.step()
        if rank == 0:
            print(f"step {i}: loss {loss.item():.4f}, lr {schedule.get_last_lr()[0]:.2e}, {time.time() - began:.1f} s")
            torch.save({"model": raw.state_dict(), "optimizer": optimizer.state_dict(), "step": i}, f"{args.out}/last.pt")
        if i + 1 == args.steps:
            break
    if distributed:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
