"""A GPT with tied embeddings, LayerNorm with biases and GELU: DDP, FSDP2, and tensor parallel by hand."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from handwritten import clip
from llama import Config, loss_of, trained
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel


class Block(nn.Module):
    def __init__(self, c: Config, drop: float = 0.0):
        super().__init__()
        self.heads, self.drop = c.heads, drop
        self.norm1, self.norm2 = nn.LayerNorm(c.dim), nn.LayerNorm(c.dim)
        self.qkv, self.out = nn.Linear(c.dim, 3 * c.dim), nn.Linear(c.dim, c.dim)
        self.up, self.down = nn.Linear(c.dim, c.hidden), nn.Linear(c.hidden, c.dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, dim = x.shape
        qkv = self.qkv(self.norm1(x)).view(rows, length, -1, 3, dim // self.heads)
        q, k, v = (t.transpose(1, 2) for t in qkv.unbind(3))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + F.dropout(self.out(y.transpose(1, 2).reshape(rows, length, -1)), self.drop, self.training)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh")), self.drop, self.training)


class GPT(nn.Module):
    def __init__(self, c: Config, drop: float = 0.0):
        super().__init__()
        self.dropout = nn.Dropout(drop)
        self.tokens, self.positions = nn.Embedding(c.vocab, c.dim), nn.Embedding(c.sequence, c.dim)
        self.blocks = nn.ModuleList(Block(c, drop) for _ in range(c.layers))
        self.norm = nn.LayerNorm(c.dim)
        self.head = nn.Linear(c.dim, c.vocab, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.dropout(self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1])))
        for block in self.blocks:
            x = block(x)
        return loss_of(self.head(self.norm(x)), labels)


def alone(c: Config, drop: float = 0.0):
    return trained(GPT(c, drop))


def ddp(c: Config, drop: float = 0.0, bug: str | None = None):
    model = GPT(c, drop)
    if bug == "one layer evaluates":
        model.blocks[1].eval()  # bug: one layer evaluates
    if bug == "other rate":
        model.blocks[0].drop = 0.2  # bug: other rate
    wrapped = DistributedDataParallel(model)
    if bug == "divided twice":
        return trained(model, lambda *args: wrapped(*args) / dist.get_world_size())  # bug: divided twice
    if bug == "never synced":
        wrapped.require_backward_grad_sync = False  # bug: never synced
    return trained(model, wrapped)


def fsdp(c: Config, world: int, bug: str | None = None):
    model = GPT(c)
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if bug == "sum in blocks":
        for block in model.blocks:
            block.set_gradient_divide_factor(1.0)  # bug: sum in blocks
    if bug == "never reduced":
        model.set_requires_gradient_sync(False)  # bug: never reduced
    if bug == "scaled":
        return trained(model, lambda *args: model(*args) * world)  # bug: scaled
    return trained(model)


# -- tensor parallel by hand, as Megatron does it: heads, the feed-forward width and the vocabulary are cut ----------------------


class Copy(torch.autograd.Function):
    """Forward nothing, backward the sum over ranks."""

    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad


class Reduce(torch.autograd.Function):
    """Forward the sum over ranks, backward nothing."""

    @staticmethod
    def forward(ctx, x):
        x = x.contiguous()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


class Row(nn.Linear):
    """A linear layer whose inputs are cut; its bias is whole on every rank."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.bug == "bias before reduce":
            return Reduce.apply(F.linear(x, self.weight, self.bias))  # bug: bias before reduce
        return Reduce.apply(F.linear(x, self.weight)) + self.bias


class CutBlock(Block):
    def __init__(self, c: Config, world: int, bug: str | None):
        super().__init__(c)
        self.qkv, self.up = nn.Linear(c.dim, 3 * c.dim // world), nn.Linear(c.dim, c.hidden // world)
        self.out, self.down = Row(c.dim // world, c.dim), Row(c.hidden // world, c.dim)
        self.out.bug = self.down.bug = bug
        self.qkv.register_forward_pre_hook(lambda module, args: (Copy.apply(args[0]),))
        if bug != "up not copied":  # bug: up not copied
            self.up.register_forward_pre_hook(lambda module, args: (Copy.apply(args[0]),))


def outside(ids: torch.Tensor, start: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Which ids other ranks have, and the others counted from `start` on."""
    mask = (ids < start) | (ids >= start + rows)
    own = ids.clone() - start
    own[mask] = 0
    return mask, own


class CutCrossEntropy(torch.autograd.Function):
    """Cross entropy of logits [tokens, classes], classes cut over ranks."""

    @staticmethod
    def forward(ctx, logits, labels, bug):
        top = torch.max(logits, dim=-1)[0]
        dist.all_reduce(top, op=dist.ReduceOp.MAX)
        logits = logits - top.unsqueeze(-1)
        mask, own = outside(labels, dist.get_rank() * logits.shape[1], logits.shape[1])
        rows = torch.arange(len(labels))
        found = logits[rows, own].clone()
        found[mask] = 0.0
        dist.all_reduce(found)
        exp = torch.exp(logits)
        total = exp.sum(dim=-1)
        if bug != "local softmax":
            dist.all_reduce(total)
        ctx.save_for_backward(exp / total.unsqueeze(-1), mask, own)  # bug: local softmax
        return torch.log(total) - found

    @staticmethod
    def backward(ctx, grad):
        softmax, mask, own = ctx.saved_tensors
        made = softmax.clone()
        made[torch.arange(len(own)), own] -= 1.0 - mask.float()
        return made * grad.unsqueeze(-1), None, None


class CutGPT(GPT):
    def __init__(self, c: Config, world: int, bug: str | None):
        super().__init__(c)
        self.bug = bug
        self.tokens = nn.Embedding(c.vocab // world, c.dim)
        self.blocks = nn.ModuleList(CutBlock(c, world, bug) for _ in range(c.layers))
        self.head = nn.Linear(c.dim, c.vocab // world, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        rows = self.tokens.num_embeddings
        mask, own = outside(tokens, dist.get_rank() * rows, rows)
        x = self.tokens(own)
        x[mask, :] = 0.0
        x = Reduce.apply(x) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits = self.head(Copy.apply(self.norm(x)))
        return CutCrossEntropy.apply(logits.flatten(0, 1), labels.flatten(), self.bug).mean()


CUTS = {"*.qkv.weight": "(tp o) i", "*.qkv.bias": "(tp o)", "*.up.weight": "(tp o) i", "*.up.bias": "(tp o)"}
CUTS |= {"tokens.weight": "(tp v) h", "*.out.weight": "o (tp i)", "*.down.weight": "o (tp i)"}


def tensor_parallel(c: Config, world: int, bug: str | None = None):
    model = CutGPT(c, world, bug)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)

    def step(batch):
        loss = model(batch["tokens"], batch["labels"])
        loss.backward()
        norm = clip(model, bug, CUTS)
        optimizer.step()
        optimizer.zero_grad()
        return {"loss": loss, "norm": norm}

    return step
