"""Train a small Llama with FSDP2: torchrun --nproc-per-node 8 train_fsdp2.py --steps 1000"""

import argparse
import logging
import os

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

logger = logging.getLogger("train")


def precompute_freqs(head_dim, seq_len, theta=10000.0):
    freqs = 1.0 / (theta ** (torch.arange(0, head_dim, 2).float() / head_dim))
    angles = torch.outer(torch.arange(seq_len).float(), freqs)
    return torch.cat([angles, angles], dim=-1)


def rotate_half(x):
    a, b = x.chunk(2, dim=-1)
    return torch.cat([-b, a], dim=-1)


class Attention(nn.Module):
    def __init__(self, dim, n_heads, n_kv_heads):
        super().__init__()
        self.n_heads, self.n_kv_heads, self.head_dim = n_heads, n_kv_heads, dim // n_heads
        self.wq = nn.Linear(dim, n_heads * self.head_dim, bias=False)
        self.wk = nn.Linear(dim, n_kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(dim, n_kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(n_heads * self.head_dim, dim, bias=False)

    def forward(self, x, cos, sin):
        b, s, _ = x.shape
        q = self.wq(x).view(b, s, self.n_heads, self.head_dim).transpose(1, 2)
        k = self.wk(x).view(b, s, self.n_kv_heads, self.head_dim).transpose(1, 2)
        v = self.wv(x).view(b, s, self.n_kv_heads, self.head_dim).transpose(1, 2)
        q, k = q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin
        repeat = self.n_heads // self.n_kv_heads
        k, v = k.repeat_interleave(repeat, dim=1), v.repeat_interleave(repeat, dim=1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(out.transpose(1, 2).reshape(b, s, -1))


class FeedForward(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.w1 = nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class TransformerBlock(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.attention = Attention(args.dim, args.heads, args.kv_heads)
        self.feed_forward = FeedForward(args.dim, 4 * args.dim)
        self.attention_norm = nn.RMSNorm(args.dim, eps=1e-5)
        self.ffn_norm = nn.RMSNorm(args.dim, eps=1e-5)

    def forward(self, x, cos, sin):
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.tok_embeddings = nn.Embedding(args.vocab, args.dim)
        self.layers = nn.ModuleList(TransformerBlock(args) for _ in range(args.layers))
        self.norm = nn.RMSNorm(args.dim, eps=1e-5)
        self.output = nn.Linear(args.dim, args.vocab, bias=False)
        self.register_buffer("freqs", precompute_freqs(args.dim // args.heads, args.seq_len), persistent=False)

    def forward(self, tokens):
        x = self.tok_embeddings(tokens)
        angles = self.freqs[: tokens.shape[1]]
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.output(self.norm(x))


class RandomWalks(Dataset):
    def __init__(self, count, seq_len, vocab, seed):
        generator = np.random.default_rng(seed)
        walks = generator.integers(0, 7, size=(count, seq_len + 1)).cumsum(axis=1) % vocab
        self.walks = torch.as_tensor(walks, dtype=torch.long)

    def __len__(self):
        return len(self.walks)

    def __getitem__(self, index):
        walk = self.walks[index]
        return {"input_ids": walk[:-1], "labels": walk[1:]}


def build_model(args, mesh):
    with torch.device("cuda"):
        model = Llama(args)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


@torch.no_grad()
def evaluate(model, loader, device):
    model.eval()
    losses = []
    for batch in loader:
        logits = model(batch["input_ids"].to(device))
        losses.append(F.cross_entropy(logits.flatten(0, 1).float(), batch["labels"].to(device).flatten()))
    mean = torch.stack(losses).mean()
    dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    model.train()
    return mean.item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--vocab", type=int, default=320)
    parser.add_argument("--seq-len", type=int, default=48)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--warmup", type=int, default=50)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--max-norm", type=float, default=1.0)
    parser.add_argument("--save-every", type=int, default=200)
    parser.add_argument("--checkpoint-dir", default="checkpoints")
    args = parser.parse_args()

    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank)
    dist.init_process_group("nccl", device_id=device)
    logging.basicConfig(level=logging.INFO if dist.get_rank() == 0 else logging.WARNING)
    torch.manual_seed(0)

    mesh = init_device_mesh("cuda", (dist.get_world_size(),), mesh_dim_names=("dp",))
    model = build_model(args, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.01, total_iters=args.warmup)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.steps - args.warmup)
    scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, cosine], milestones=[args.warmup])
    train_data = RandomWalks(4096, args.seq_len, args.vocab, seed=1)
    eval_data = RandomWalks(64, args.seq_len, args.vocab, seed=2)
    sampler = DistributedSampler(train_data, drop_last=True)
    loader = DataLoader(train_data, args.batch_size, sampler=sampler, num_workers=4, pin_memory=True)
    eval_loader = DataLoader(eval_data, args.batch_size, sampler=DistributedSampler(eval_data, shuffle=False))
    logger.info("parameters: %d", sum(p.numel() for p in model.parameters()))

    step, epoch = 0, 0
    while step < args.steps:
        sampler.set_epoch(epoch)
        for batch in loader:
            inputs = batch["input_ids"].to(device, non_blocking=True)
            labels = batch["labels"].to(device, non_blocking=True)
            logits = model(inputs)
            loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
            loss.backward()
            grad_norm = nn.utils.clip_grad_norm_(model.parameters(), args.max_norm)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            step += 1

            if step % 10 == 0:
                mean = loss.detach().clone()
                dist.all_reduce(mean, op=dist.ReduceOp.AVG)
                logger.info("step %d loss %.4f grad norm %.3f", step, mean.item(), grad_norm.full_tensor().item())
            if step % args.save_every == 0:
                logger.info("eval loss %.4f", evaluate(model, eval_loader, device))
                model_state, optim_state = get_state_dict(model, optimizer)
                state = {"model": model_state, "optim": optim_state}
                dcp.save(state, checkpoint_id=os.path.join(args.checkpoint_dir, f"step-{step}"))
            if step >= args.steps:
                break
        epoch += 1
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
