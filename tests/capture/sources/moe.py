"""A mixture of experts as GShard writes it: two experts per token, buffers of fixed capacity, an all-to-all to the experts and one back."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from handwritten import clip
from llama import Attention, Config, Norm, loss_of
from torch import nn

EXPERTS, CHOSEN, CAPACITY = 4, 2, 5  # choices beyond the capacity are dropped
BALANCE = 0.01


class Exchange(torch.autograd.Function):
    """Block i along the first dimension goes to rank i; backward it comes back."""

    @staticmethod
    def forward(ctx, x):
        x = x.contiguous()
        received = torch.empty_like(x)
        dist.all_to_all_single(received, x)
        return received

    @staticmethod
    def backward(ctx, grad):
        return Exchange.apply(grad)


class Mixture(nn.Module):
    """Experts are cut over `ranks`; every row of the batch is a group with its own buffers."""

    def __init__(self, c: Config, ranks: int = 1, bug: str | None = None):
        super().__init__()
        self.ranks, self.bug = ranks, bug
        self.gate = nn.Linear(c.dim, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS // ranks, c.dim, c.hidden))
        self.down = nn.Parameter(torch.randn(EXPERTS // ranks, c.hidden, c.dim))

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights [group, token, expert, place], and how unevenly experts are chosen."""
        shares = F.softmax(self.gate(x), dim=-1)
        weights, ids = shares.topk(CHOSEN, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        chosen = F.one_hot(ids, EXPERTS)  # [group, token, choice, expert]
        first = chosen.transpose(1, 2).flatten(1, 2)  # first choices go before second ones
        place = (first.cumsum(1) - 1).unflatten(1, (CHOSEN, -1)).transpose(1, 2)
        place = (place * chosen).sum(-1)
        hot = (place.unsqueeze(-1) == torch.arange(CAPACITY)).to(x.dtype)
        balance = (chosen[:, :, 0].to(x.dtype).mean(1) * shares.mean(1)).sum(-1).mean() * EXPERTS
        return torch.einsum("gsk,gske,gskc->gsec", weights, chosen.to(x.dtype), hot), balance

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, self.balance = self.route(x)
        sent = torch.einsum("gsec,gsh->egch", (weights > 0).to(x.dtype), x)
        groups, local = x.shape[0], EXPERTS // self.ranks
        if self.ranks > 1:
            sent = Exchange.apply(sent)  # [rank, expert, group, place, width]
            if self.bug == "experts for ranks":
                sent = sent.view(local, self.ranks, groups, CAPACITY, -1).transpose(0, 1)  # bug: experts for ranks
            sent = sent.view(self.ranks, local, groups, CAPACITY, -1).transpose(0, 1).flatten(1, 2)
        y = torch.bmm(F.gelu(torch.bmm(sent.flatten(1, 2), self.up)), self.down)
        if self.ranks > 1:
            y = y.view(local, self.ranks, groups, CAPACITY, -1).transpose(0, 1).flatten(0, 1)
            y = y if self.bug == "answers not returned" else Exchange.apply(y)  # bug: answers not returned
        return torch.einsum("gsec,egch->gsh", weights, y.view(EXPERTS, groups, CAPACITY, -1))


class Block(nn.Module):
    def __init__(self, c: Config, ranks: int, bug: str | None):
        super().__init__()
        self.norm1, self.attention = Norm(c.dim), Attention(c)
        self.norm2, self.mixture = Norm(c.dim), Mixture(c, ranks, bug)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mixture(self.norm2(x))


class Model(nn.Module):
    def __init__(self, c: Config, ranks: int = 1, bug: str | None = None):
        super().__init__()
        self.embedding = nn.Embedding(c.vocab, c.dim)
        self.blocks = nn.ModuleList(Block(c, ranks, bug) for _ in range(c.layers))
        self.norm = Norm(c.dim)
        self.head = nn.Linear(c.dim, c.vocab, bias=False)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        loss = loss_of(self.head(self.norm(x)), labels)
        return loss + BALANCE * sum(block.mixture.balance for block in self.blocks)


CUTS = {"*.mixture.up": "(dp e) i o", "*.mixture.down": "(dp e) i o"}


def stepped(model: Model, ranks: int, bug: str | None = None):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)

    def step(batch):
        loss = model(batch["tokens"], batch["labels"])
        loss.backward()
        for name, p in model.named_parameters() if ranks > 1 else ():
            if not name.endswith(("mixture.up", "mixture.down")):
                dist.all_reduce(p.grad, op=dist.ReduceOp.AVG)
            elif bug == "experts averaged":
                dist.all_reduce(p.grad, op=dist.ReduceOp.AVG)  # bug: experts averaged
            elif bug != "experts not divided":
                p.grad.div_(ranks)  # an expert has seen the tokens of all ranks
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0) if ranks == 1 else clip(model, bug, CUTS)
        optimizer.step()  # bug: experts not divided
        optimizer.zero_grad()
        return {"loss": loss, "norm": norm}

    return step


def alone(c: Config):
    return stepped(Model(c), 1)


def expert_parallel(c: Config, world: int, bug: str | None = None):
    return stepped(Model(c, world, bug), world, bug)
