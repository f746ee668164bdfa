# a GPT small enough to read in one sitting; trains on one device or with DDP.
import math
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import trainverify.torch as tvt

# -----------------------------------------------------------------------------
gradient_accumulation_steps = 3
batch_size = 4  # sequences of one micro-step, over all ranks
block_size = 10
learning_rate = 3e-3
min_lr = 3e-4
warmup_iters = 2
lr_decay_iters = 9
weight_decay = 1e-1
beta1, beta2 = 0.9, 0.95
grad_clip = 1.0
# -----------------------------------------------------------------------------

batch = {
    "x": tvt.Ids((gradient_accumulation_steps, batch_size, block_size), "m (dp b) t", below=29),
    "y": tvt.Ids((gradient_accumulation_steps, batch_size, block_size), "m (dp b) t", below=29),
}
mesh = {"dp": 2}
loss = {"dp": "avg"}


@dataclass
class GPTConfig:
    block_size: int = 11
    vocab_size: int = 29
    n_layer: int = 2
    n_head: int = 3
    n_embd: int = 12


class CausalSelfAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=False)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)
        self.n_head = config.n_head

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = (t.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for t in self.c_attn(x).split(C, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd)

    def forward(self, x):
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd)
        self.mlp = MLP(config)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        x = x + self.mlp(self.ln_2(x))
        return x


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.transformer = nn.ModuleDict(
            dict(
                wte=nn.Embedding(config.vocab_size, config.n_embd),
                wpe=nn.Embedding(config.block_size, config.n_embd),
                h=nn.ModuleList([Block(config) for _ in range(config.n_layer)]),
                ln_f=nn.LayerNorm(config.n_embd),
            )
        )
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.transformer.wte.weight = self.lm_head.weight  # weight tying
        self.apply(self._init_weights)

    def _init_weights(self, module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            torch.nn.init.normal_(module.weight, mean=0.0, std=0.02)
        if getattr(module, "bias", None) is not None:
            torch.nn.init.zeros_(module.bias)

    def forward(self, idx, targets):
        pos = torch.arange(0, idx.size(1), dtype=torch.long)
        x = self.transformer.wte(idx) + self.transformer.wpe(pos)
        for block in self.transformer.h:
            x = block(x)
        logits = self.lm_head(self.transformer.ln_f(x))
        return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))

    def configure_optimizers(self):
        param_dict = {pn: p for pn, p in self.named_parameters() if p.requires_grad}
        groups = [
            {"params": [p for p in param_dict.values() if p.dim() >= 2], "weight_decay": weight_decay},
            {"params": [p for p in param_dict.values() if p.dim() < 2], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=learning_rate, betas=(beta1, beta2), foreach=True)


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    if it > lr_decay_iters:
        return min_lr
    ratio = (it - warmup_iters) / (lr_decay_iters - warmup_iters)
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)


def train(wrap=lambda m: m, sync_at=gradient_accumulation_steps - 1, stride=1):
    raw_model = GPT(GPTConfig())
    optimizer = raw_model.configure_optimizers()
    model = wrap(raw_model)
    iter_num = 0

    def step(batch):
        nonlocal iter_num
        for group in optimizer.param_groups:
            group["lr"] = get_lr(iter_num)
        total = 0.0
        for micro_step in range(gradient_accumulation_steps):
            if isinstance(model, DDP):
                model.require_backward_grad_sync = micro_step == sync_at
            loss = model(batch["x"][micro_step], batch["y"][micro_step]) / gradient_accumulation_steps
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(raw_model.parameters(), grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        iter_num += stride
        return total

    return step


# no DDP: one flat all-reduce after the last micro-step
def average_gradients(model, world):
    grads = [p.grad for p in model.parameters()]
    flat = torch._utils._flatten_dense_tensors(grads)
    dist.all_reduce(flat)
    flat /= world
    for g, f in zip(grads, torch._utils._unflatten_dense_tensors(flat, grads)):
        g.copy_(f)


def clip_gradients(model):
    grads = [p.grad for p in model.parameters()]
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
    torch._foreach_mul_(grads, (grad_clip / (norm + 1e-6)).clamp(max=1.0))


def clip_then_average(model, world):
    clip_gradients(model)
    average_gradients(model, world)


def average_then_clip(model, world):
    average_gradients(model, world)
    clip_gradients(model)


def train_flat(world, finish):
    model = GPT(GPTConfig())
    optimizer = model.configure_optimizers()
    iter_num = 0

    def step(batch):
        nonlocal iter_num
        for group in optimizer.param_groups:
            group["lr"] = get_lr(iter_num)
        losses = []
        for x, y in zip(batch["x"].unbind(0), batch["y"].unbind(0)):
            loss = model(x, y)
            (loss / len(batch["x"])).backward()
            losses.append(loss.detach())
        finish(model, world)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        iter_num += 1
        return torch.stack(losses).mean()

    return step


def train_no_sync():
    raw_model = GPT(GPTConfig())
    optimizer = raw_model.configure_optimizers()
    model = DDP(raw_model, gradient_as_bucket_view=True)
    iter_num = 0

    def step(batch):
        nonlocal iter_num
        total = 0.0
        for group in optimizer.param_groups:
            group["lr"] = get_lr(iter_num)
        for i in range(gradient_accumulation_steps):
            with model.no_sync() if i < gradient_accumulation_steps - 1 else nullcontext():
                loss = model(batch["x"][i], batch["y"][i])
                loss.div(gradient_accumulation_steps).backward()
            total = total + loss.detach() / gradient_accumulation_steps
        torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
        optimizer.step()
        optimizer.zero_grad()
        iter_num += 1
        return total

    return step


def reference():
    return train()


def right_1(rank, world):
    return train_no_sync()


def right_2(rank, world):
    return train_flat(world, average_then_clip)


def wrong_1(rank, world):
    return train(DDP, sync_at=gradient_accumulation_steps)


def wrong_2(rank, world):
    return train_flat(world, clip_then_average)


def wrong_3(rank, world):
    return train(DDP, stride=world)
