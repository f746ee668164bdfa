# Copyright-free toy in the manner of Megatron-LM: tensor parallel + sequence parallel, tensors are [sequence, batch, hidden].
# Low-precision weights, fp32 masters, fp32 accumulation of gradients over micro-batches, momentum SGD by hand.
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_fn
import torch.nn as nn
import torch.nn.functional as F

import trainverify.torch as tvt

COMPUTE_DTYPE = torch.bfloat16
MASTER_DTYPE = torch.float32

VOCAB, HIDDEN, HEADS, FFN, SEQ, MBS, NUM_MICRO = 29, 10, 2, 26, 14, 3, 3
LR, MOMENTUM, WEIGHT_DECAY = 0.1, 0.9, 0.01

batch = {
    "tokens": tvt.Ids((NUM_MICRO, MBS, SEQ), "m b (tp s)", below=VOCAB),
    "labels": tvt.Ids((NUM_MICRO, MBS, SEQ), "m b (tp s)", below=VOCAB, ignore=-100),
}
mesh = {"tp": 2}
cuts = {
    "*.query": "(tp o) k",
    "*.key": "(tp o) k",
    "*.value": "(tp o) k",
    "*.dense": "o (tp k)",
    "*.fc1_weight": "(tp o) k",
    "*.fc1_bias": "(tp o)",
    "*.fc2_weight": "o (tp k)",
}

######## mappings ########

class GatherFromSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, shard):
        whole = torch.empty(shard.size(0) * dist.get_world_size(), *shard.shape[1:], dtype=shard.dtype)
        dist.all_gather_into_tensor(whole, shard.contiguous())
        return whole

    @staticmethod
    def backward(ctx, grad):
        shard = torch.empty(grad.size(0) // dist.get_world_size(), *grad.shape[1:], dtype=grad.dtype)
        dist.reduce_scatter_tensor(shard, grad.contiguous())
        return shard

class GatherThenSplit(torch.autograd.Function):
    @staticmethod
    def forward(ctx, shard):
        return GatherFromSequence.forward(ctx, shard)

    @staticmethod
    def backward(ctx, grad):
        return grad.chunk(dist.get_world_size(), dim=0)[dist.get_rank()].contiguous()

class ScatterToSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, part):
        shard = torch.empty(part.size(0) // dist.get_world_size(), *part.shape[1:], dtype=part.dtype)
        dist.reduce_scatter_tensor(shard, part.contiguous())
        return shard

    @staticmethod
    def backward(ctx, grad):
        whole = torch.empty(grad.size(0) * dist.get_world_size(), *grad.shape[1:], dtype=grad.dtype)
        dist.all_gather_into_tensor(whole, grad.contiguous())
        return whole

class OneDevice:
    size, rank = 1, 0

    def gather(self, x):
        return x

    def scatter(self, x):
        return x

    def row_linear(self, x, weight, bias):
        return self.scatter(F.linear(x, weight)) + bias

class SequenceParallel(OneDevice):
    def __init__(self, rank, size, gather=GatherFromSequence):
        self.rank, self.size, self.function = rank, size, gather

    def gather(self, x):
        return self.function.apply(x)

    def scatter(self, x):
        return ScatterToSequence.apply(x)

class LibraryMappings(OneDevice):
    """The same with torch.distributed.nn; a row's bias is divided among the summands."""

    def __init__(self, rank, size):
        self.rank, self.size = rank, size

    def gather(self, x):
        return torch.cat(dist_fn.all_gather(x.contiguous()), dim=0)

    def scatter(self, x):
        pieces = [p.contiguous() for p in x.chunk(self.size, dim=0)]
        return dist_fn.reduce_scatter(torch.empty_like(pieces[0]), pieces)

    def row_linear(self, x, weight, bias):
        return self.scatter(F.linear(x, weight, bias / self.size))

######## model ########

def weight(*shape):
    return nn.Parameter(torch.randn(*shape) / shape[-1] ** 0.5)

class Layer(nn.Module):
    def __init__(self, par):
        super().__init__()
        self.par = par
        h, f = HIDDEN // par.size, FFN // par.size
        self.norm1 = nn.LayerNorm(HIDDEN)
        self.query, self.key, self.value = weight(h, HIDDEN), weight(h, HIDDEN), weight(h, HIDDEN)
        self.dense, self.dense_bias = weight(HIDDEN, h), nn.Parameter(torch.zeros(HIDDEN))
        self.norm2 = nn.LayerNorm(HIDDEN)
        self.fc1_weight, self.fc1_bias = weight(f, HIDDEN), nn.Parameter(torch.zeros(f))
        self.fc2_weight, self.fc2_bias = weight(HIDDEN, f), nn.Parameter(torch.zeros(HIDDEN))

    def attention(self, x):
        s, b, _ = x.shape
        q, k, v = (F.linear(x, w).view(s, b, HEADS // self.par.size, -1).permute(1, 2, 0, 3) for w in (self.query, self.key, self.value))
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return o.permute(2, 0, 1, 3).reshape(s, b, -1)

    def forward(self, x):
        par = self.par
        x = x + par.row_linear(self.attention(par.gather(self.norm1(x))), self.dense, self.dense_bias)
        h = F.gelu(F.linear(par.gather(self.norm2(x)), self.fc1_weight, self.fc1_bias), approximate="tanh")
        return x + par.row_linear(h, self.fc2_weight, self.fc2_bias)

class GPT(nn.Module):
    def __init__(self, par):
        super().__init__()
        self.par = par
        self.word, self.position = nn.Embedding(VOCAB, HIDDEN), nn.Embedding(SEQ, HIDDEN)
        self.layers = nn.ModuleList([Layer(par), Layer(par)])
        self.final_norm = nn.LayerNorm(HIDDEN)
        self.output = weight(VOCAB, HIDDEN)

    def forward(self, tokens):
        n = tokens.size(1)
        places = torch.arange(n) + self.par.rank * n
        x = (self.word(tokens) + self.position(places)).transpose(0, 1)
        for layer in self.layers:
            x = layer(x)
        return F.linear(self.final_norm(x), self.output).transpose(0, 1)

######## training ########

def token_loss(logits, labels):
    return F.cross_entropy(logits.to(MASTER_DTYPE).flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")

def by_dimension(p):
    return WEIGHT_DECAY if p.dim() > 1 else 0.0

def by_size(p):
    return WEIGHT_DECAY if p.numel() >= HIDDEN * HIDDEN else 0.0

class MomentumSGD:
    def __init__(self, model, decay=by_dimension):
        self.weights = dict(model.named_parameters())
        self.decay = {n: decay(p) for n, p in self.weights.items()}
        self.master = {n: p.detach().to(MASTER_DTYPE).clone() for n, p in self.weights.items()}
        self.momentum = {n: torch.zeros_like(m) for n, m in self.master.items()}

    @torch.no_grad()
    def step(self, grads):
        for n, w in self.weights.items():
            g = grads[n] + self.decay[n] * self.master[n]
            self.momentum[n].mul_(MOMENTUM).add_(g)
            self.master[n].sub_(self.momentum[n], alpha=LR)
            w.copy_(self.master[n])

def accumulate(model, batch, tokens):
    """Summed loss, and fp32 gradients by name."""
    main = {n: torch.zeros(p.shape, dtype=MASTER_DTYPE) for n, p in model.named_parameters()}
    total = torch.zeros((), dtype=MASTER_DTYPE)
    for m in range(NUM_MICRO):
        loss = token_loss(model(batch["tokens"][m]), batch["labels"][m]) / tokens
        loss.backward()
        total += loss.detach()
        for n, p in model.named_parameters():
            main[n] += p.grad
            p.grad = None
    return total, main

CUT = ("query", "key", "value", "dense", "fc1_weight", "fc1_bias", "fc2_weight")
WHOLE = ("norm1", "norm2", "final_norm", "word", "position", "output")

def not_cut(name):
    return not name.endswith(CUT)

def of_whole_modules(name):
    return any(part in WHOLE for part in name.split("."))

def reference():
    model = GPT(OneDevice()).to(COMPUTE_DTYPE)
    optimizer = MomentumSGD(model)

    def step(batch):
        tokens = (batch["labels"] >= 0).sum()
        loss, grads = accumulate(model, batch, tokens)
        optimizer.step(grads)
        return loss

    return step

def parallel_step(par, shares=not_cut, decay=by_dimension):
    model = GPT(par).to(COMPUTE_DTYPE)
    optimizer = MomentumSGD(model, decay)

    def step(batch):
        tokens = (batch["labels"] >= 0).sum()
        dist.all_reduce(tokens)
        loss, grads = accumulate(model, batch, tokens)
        for n, g in grads.items():
            if shares(n):
                dist.all_reduce(g)
        optimizer.step(grads)
        dist.all_reduce(loss)
        return loss

    return step

def right_1(rank, world):
    return parallel_step(SequenceParallel(rank, world))

def right_2(rank, world):
    return parallel_step(LibraryMappings(rank, world))

def wrong_1(rank, world):
    return parallel_step(SequenceParallel(rank, world), shares=of_whole_modules)

def wrong_2(rank, world):
    return parallel_step(SequenceParallel(rank, world), decay=by_size)

def wrong_3(rank, world):
    return parallel_step(SequenceParallel(rank, world, GatherThenSplit))
