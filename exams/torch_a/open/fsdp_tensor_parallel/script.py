# 2D parallel decoder on DTensor: FSDP2 over "dp", tensor + sequence parallel over "tp".
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

import trainverify.torch as tvt

vocab, width, heads, inner, depth, seqlen, rows = 34, 12, 6, 20, 2, 10, 4
batch = {
    "tokens": tvt.Ids((rows, seqlen), "(dp b) s", below=vocab),
    "labels": tvt.Ids((rows, seqlen), "(dp b) s", below=vocab, ignore=-1),
}
mesh = {"dp": 2, "tp": 2}
loss = {"dp": "avg"}


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.wq = nn.Linear(width, width, bias=False)
        self.wk = nn.Linear(width, width, bias=False)
        self.wv = nn.Linear(width, width, bias=False)
        self.wo = nn.Linear(width, width, bias=False)

    def forward(self, x):
        b, s, _ = x.shape
        # heads are counted from the projection: under tp each rank has its own
        q, k, v = (w(x).view(b, s, -1, width // heads).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(y.transpose(1, 2).reshape(b, s, -1))


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1 = nn.Linear(width, inner)
        self.w2 = nn.Linear(inner, width, bias=False)

    def forward(self, x):
        return self.w2(F.gelu(self.w1(x)))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention()
        self.ffn_norm = nn.LayerNorm(width)
        self.feed_forward = FeedForward()

    def forward(self, x):
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocab, width)
        self.pos_embeddings = nn.Embedding(seqlen, width)
        self.layers = nn.ModuleDict({str(i): Block() for i in range(depth)})
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, vocab, bias=False)

    def forward(self, tokens):
        positions = torch.arange(tokens.size(1)).unsqueeze(0)
        h = self.tok_embeddings(tokens) + self.pos_embeddings(positions)
        for layer in self.layers.values():
            h = layer(h)
        return self.output(self.norm(h))


def sequence_parallel(model, tp, block_norms=("attention_norm", "ffn_norm")):
    parallelize_module(
        model,
        tp,
        {
            "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "pos_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        },
    )
    for block in model.layers.values():
        plan = {name: SequenceParallel() for name in block_norms}
        plan["attention"] = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
        plan["feed_forward"] = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
        plan |= {f"attention.{w}": ColwiseParallel() for w in ("wq", "wk", "wv")}
        plan["attention.wo"] = RowwiseParallel(output_layouts=Shard(1))
        plan["feed_forward.w1"] = ColwiseParallel()
        plan["feed_forward.w2"] = RowwiseParallel(output_layouts=Shard(1))
        parallelize_module(block, tp, plan)
    return model


def vocabulary_parallel(model, tp):
    parallelize_module(
        model,
        tp,
        {
            "tok_embeddings": ColwiseParallel(output_layouts=Replicate()),
            "output": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
        },
    )
    for block in model.layers.values():
        plan = {f"attention.{w}": ColwiseParallel() for w in ("wq", "wk", "wv")}
        plan |= {"attention.wo": RowwiseParallel(), "feed_forward.w1": ColwiseParallel(), "feed_forward.w2": RowwiseParallel()}
        parallelize_module(block, tp, plan)
    return model


def shard(model, dp):
    for block in model.layers.values():
        fully_shard(block, mesh=dp)
    fully_shard(model, mesh=dp)
    return model


# -- gradient norms ---------------------------------------------------------------------------------------------------


def full_norm(model):
    total = 0.0
    for p in model.parameters():
        g = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        total = total + g.pow(2).sum()
    return total.sqrt()


def shard_norm(model):
    squares = torch.zeros(())
    for p in model.parameters():
        squares = squares + p.grad.to_local().pow(2).sum()
    dist.all_reduce(squares)
    return squares.sqrt()


# -- the step ---------------------------------------------------------------------------------------------------------


def optimizer_of(model):
    return torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.8, weight_decay=0.01, foreach=False)


def scaled(model, norm, limit=0.25):
    factor = torch.clamp(limit / (norm(model) + 1e-6), max=1.0)
    for p in model.parameters():
        (p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad).mul_(factor)


def trained(model, norm=full_norm, count_group=None, replicas=1, parallel_loss=False):
    optimizer = optimizer_of(model)

    def summed(tokens, labels):
        logits = model(tokens)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-1, reduction="sum")

    def step(batch):
        tokens, labels = batch["tokens"], batch["labels"]
        count = labels.ne(-1).sum()
        if dist.is_initialized() and replicas > 1:
            dist.all_reduce(count, group=count_group)
        if parallel_loss:
            with loss_parallel():
                value = summed(tokens, labels) * (replicas / count)
                value.backward()
            value = value.full_tensor() if isinstance(value, DTensor) else value
        else:
            value = summed(tokens, labels) * (replicas / count)
            value.backward()
        scaled(model, norm)
        optimizer.step()
        optimizer.zero_grad()
        return value.detach()

    return step


def ranks(world):
    return init_device_mesh("cpu", (mesh["dp"], mesh["tp"]), mesh_dim_names=("dp", "tp"))


def reference():
    return trained(Decoder())


def right_1(rank, world):
    m = ranks(world)
    model = shard(sequence_parallel(Decoder(), m["tp"]), m["dp"])
    return trained(model, count_group=m.get_group("dp"), replicas=m["dp"].size())


def right_2(rank, world):
    m = ranks(world)
    model = shard(vocabulary_parallel(Decoder(), m["tp"]), m["dp"])
    return trained(model, count_group=m.get_group("dp"), replicas=m["dp"].size(), parallel_loss=True)


def wrong_1(rank, world):
    m = ranks(world)
    model = shard(sequence_parallel(Decoder(), m["tp"], block_norms=("attention_norm",)), m["dp"])
    return trained(model, count_group=m.get_group("dp"), replicas=m["dp"].size())


def wrong_2(rank, world):
    m = ranks(world)
    model = shard(sequence_parallel(Decoder(), m["tp"]), m["dp"])
    return trained(model, replicas=m["dp"].size())


def wrong_3(rank, world):
    m = ranks(world)
    model = shard(sequence_parallel(Decoder(), m["tp"]), m["dp"])
    return trained(model, norm=shard_norm, count_group=m.get_group("dp"), replicas=m["dp"].size())
