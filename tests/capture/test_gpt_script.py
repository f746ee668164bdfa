"""An ordinary GPT: a causal mask in a kept buffer, tied embeddings, learned positions, accumulation, clipping, groups of AdamW, DDP."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is absent: captured code is not tested")

import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

import trainverify.torch as tvt  # noqa: E402

WORDS, LENGTH, WIDTH, HEADS, MICRO = 29, 10, 12, 3, 2


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.c_attn = nn.Linear(WIDTH, 3 * WIDTH)
        self.c_proj = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("bias", torch.tril(torch.ones(LENGTH, LENGTH)).view(1, 1, LENGTH, LENGTH))

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = (p.view(B, T, HEADS, C // HEADS).transpose(1, 2) for p in self.c_attn(x).split(C, dim=2))
        scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        scores = scores.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
        y = F.softmax(scores, dim=-1) @ v
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(WIDTH), Attention(), nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.ln_f, self.lm_head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe(torch.arange(0, idx.size(1)))
        x = x + self.attn(self.ln_1(x))
        x = x + self.mlp(self.ln_2(x))
        logits = self.lm_head(self.ln_f(x))
        return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)


def trained(raw, model, synced=MICRO - 1):
    decayed = [p for p in raw.parameters() if p.dim() >= 2]
    plain = [p for p in raw.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=6e-4, betas=(0.9, 0.95))

    def step(batch):
        total = 0.0
        for micro in range(MICRO):
            if model is not raw:
                model.require_backward_grad_sync = micro == synced
            loss = model(batch["idx"][micro], batch["targets"][micro]) / MICRO
            loss.backward()
            total = total + loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total

    return step


def reference():
    model = GPT()
    return trained(model, model)


@pytest.mark.parametrize(("synced", "verdict"), [(MICRO - 1, "PROVED"), (0, "REFUTED")])
def test_gpt_with_accumulation(synced: int, verdict: str) -> None:
    """PROVED; REFUTED where gradients are reduced at the first micro-batch instead of the last."""

    def ranks(rank: int, world: int):
        model = GPT()
        return trained(model, DistributedDataParallel(model), synced)

    ids = tvt.Ids((MICRO, 8, LENGTH), "m (dp b) t", below=WORDS)
    report = tvt.verify(reference, ranks, 2, {"idx": ids, "targets": ids}, {"dp": 2}, loss={"dp": "avg"}, points=1)
    assert report.verdict == verdict, report.reason
