"""Train a small GPT with DistributedDataParallel.

torchrun --nproc-per-node 8 train_ddp.py --out runs/gpt --max-steps 5000
"""

import argparse
import contextlib
import itertools
import math
import os
import time
from dataclasses import asdict, dataclass

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


@dataclass
class GPTConfig:
    block_size: int = 64
    vocab_size: int = 256
    n_layer: int = 2
    n_head: int = 4
    n_embd: int = 96
    dropout: float = 0.0


class CausalSelfAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)
        self.n_head, self.n_embd, self.dropout = config.n_head, config.n_embd, config.dropout

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        q, k, v = (t.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout if self.training else 0, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd)
        up, down = nn.Linear(config.n_embd, 4 * config.n_embd), nn.Linear(4 * config.n_embd, config.n_embd)
        self.mlp = nn.Sequential(up, nn.GELU(), down, nn.Dropout(config.dropout))

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.block_size, config.n_embd)
        self.drop = nn.Dropout(config.dropout)
        self.h = nn.Sequential(*(Block(config) for _ in range(config.n_layer)))
        self.ln_f = nn.LayerNorm(config.n_embd)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.wte.weight = self.lm_head.weight  # weight tying
        self.apply(self._init_weights)

    def _init_weights(self, module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            torch.nn.init.normal_(module.weight, mean=0.0, std=0.02)

    def forward(self, idx, targets=None):
        pos = torch.arange(idx.size(1), device=idx.device)
        x = self.h(self.drop(self.wte(idx) + self.wpe(pos)))
        logits = self.lm_head(self.ln_f(x))
        loss = None if targets is None else F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))
        return logits, loss

    def configure_optimizers(self, weight_decay, learning_rate, betas):
        decay = [p for p in self.parameters() if p.dim() >= 2]
        no_decay = [p for p in self.parameters() if p.dim() < 2]
        groups = [{"params": decay, "weight_decay": weight_decay}, {"params": no_decay, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=learning_rate, betas=betas, fused=True)


class Tokens(Dataset):
    """Windows of a corpus of bytes; a real run would read it from a file."""

    def __init__(self, split, block_size, size=200_000):
        rng = np.random.default_rng(0 if split == "train" else 1)
        steps = rng.integers(-3, 4, size=size)
        self.data = torch.from_numpy((np.cumsum(steps) % 256).astype(np.int64))
        self.block_size = block_size

    def __len__(self):
        return (len(self.data) - 1) // self.block_size

    def __getitem__(self, i):
        chunk = self.data[i * self.block_size : (i + 1) * self.block_size + 1]
        return chunk[:-1], chunk[1:]


def get_lr(it, args):
    if it < args.warmup:
        return args.lr * (it + 1) / (args.warmup + 1)
    ratio = (it - args.warmup) / (args.max_steps - args.warmup)
    return args.lr * (0.1 + 0.45 * (1.0 + math.cos(math.pi * ratio)))


@torch.no_grad()
def estimate_loss(model, loader, device, ctx, batches):
    model.eval()
    total = torch.zeros((), device=device)
    for x, y in itertools.islice(loader, batches):
        with ctx:
            _, loss = model(x.to(device, non_blocking=True), y.to(device, non_blocking=True))
        total += loss.float()
    dist.all_reduce(total, op=dist.ReduceOp.SUM)
    model.train()
    return total.item() / (batches * dist.get_world_size())


def cycle(loader):
    epoch = 0
    while True:
        loader.sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="out")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--grad-accum", type=int, default=2)
    parser.add_argument("--lr", type=float, default=6e-4)
    parser.add_argument("--warmup", type=int, default=100)
    parser.add_argument("--max-steps", type=int, default=2000)
    parser.add_argument("--eval-interval", type=int, default=250)
    parser.add_argument("--dtype", default="bfloat16")
    args = parser.parse_args()

    dist.init_process_group(backend="nccl")
    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    device = f"cuda:{local_rank}"
    torch.cuda.set_device(device)
    master = rank == 0
    os.makedirs(args.out, exist_ok=True)
    torch.manual_seed(1337 + rank)
    torch.backends.cuda.matmul.allow_tf32 = True
    ctx = torch.amp.autocast(device_type="cuda", dtype=getattr(torch, args.dtype))

    config = GPTConfig()
    train_set, val_set = Tokens("train", config.block_size), Tokens("val", config.block_size, 20_000)
    sampler = DistributedSampler(train_set, shuffle=True, drop_last=True)
    train_loader = DataLoader(train_set, args.batch_size, sampler=sampler, num_workers=2, pin_memory=True)
    val_loader = DataLoader(val_set, args.batch_size, sampler=DistributedSampler(val_set, shuffle=False))

    model = GPT(config).to(device)
    if master:
        print(f"number of parameters: {sum(p.numel() for p in model.parameters()) / 1e6:.2f}M")
    scaler = torch.amp.GradScaler("cuda", enabled=args.dtype == "float16")
    optimizer = model.configure_optimizers(0.1, args.lr, (0.9, 0.95))
    start, best_val = 0, float("inf")
    if args.resume:
        checkpoint = torch.load(os.path.join(args.out, "ckpt.pt"), map_location=device)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        start, best_val = checkpoint["step"], checkpoint["best_val"]
    model = DistributedDataParallel(model, device_ids=[local_rank])

    batches = cycle(train_loader)
    t0 = time.time()
    for it in range(start, args.max_steps):
        lr = get_lr(it, args)
        for group in optimizer.param_groups:
            group["lr"] = lr

        if it % args.eval_interval == 0 and it > 0:
            val_loss = estimate_loss(model, val_loader, device, ctx, batches=20)
            if master and val_loss < best_val:
                best_val = val_loss
                state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
                state |= {"config": asdict(config), "step": it, "best_val": best_val}
                torch.save(state, os.path.join(args.out, "ckpt.pt"))

        for micro in range(args.grad_accum):
            x, y = next(batches)
            x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
            last = micro == args.grad_accum - 1
            with contextlib.nullcontext() if last else model.no_sync():
                with ctx:
                    _, loss = model(x, y)
                    loss = loss / args.grad_accum
                scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)

        if it % 10 == 0 and master:
            print(f"step {it}: loss {loss.item() * args.grad_accum:.4f}, lr {lr:.2e}, {time.time() - t0:.1f} s")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
