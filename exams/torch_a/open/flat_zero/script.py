"""
Optimizer state sharding with one flat buffer.

All weights live in one contiguous vector (parameters are views into it), and so do their gradients.
A rank owns one piece of that vector: it keeps Adam's moments for its piece, updates it,
and everybody gathers the pieces.

  stage 1   gradients are all-reduced, every rank reads its piece
  stage 2   gradients are reduce-scattered after every micro-batch and summed in the piece
"""
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import trainverify.torch as tvt

FEATURES, CLASSES, MICRO, ROWS = 7, 5, 2, 12

batch = {
    "x": tvt.Reals((MICRO, ROWS, FEATURES), "m (dp b) f"),
    "y": tvt.Ids((MICRO, ROWS), "m (dp b)", below=CLASSES),
}
mesh = {"dp": 3}
loss = {"dp": "avg"}
cuts = {"*exp_avg": "(dp n)", "*exp_avg_sq": "(dp n)"}


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(FEATURES, 13)
        self.norm = nn.LayerNorm(13)
        self.mid = nn.Linear(13, 9)
        self.out = nn.Linear(9, CLASSES)

    def forward(self, x):
        h = F.silu(self.norm(self.inp(x)))
        return self.out(torch.tanh(self.mid(h)))


class FlatWeights:
    """Moves the parameters of a model into one buffer, padded so that `world` pieces are equal."""

    def __init__(self, model, world):
        self.params = list(model.parameters())
        used = sum(p.numel() for p in self.params)
        self.piece = (used + world - 1) // world
        length = self.piece * world
        self.weight = torch.zeros(length)
        self.grad = torch.zeros(length)
        self.decay = torch.zeros(length)
        at = 0
        for p in self.params:
            end = at + p.numel()
            self.weight[at:end].copy_(p.data.reshape(-1))
            if p.dim() > 1:
                self.decay[at:end] = 1.0
            p.data = self.weight[at:end].view(p.shape)
            p.grad = self.grad[at:end].view(p.shape)
            at = end


class PieceAdam:
    """Adam with decoupled decay, on [lo, hi) of the flat buffer."""

    def __init__(self, flat, rank, world, lr=0.01, betas=(0.8, 0.95), eps=1e-6, decay=0.1):
        self.flat, self.world = flat, world
        self.lo, self.hi = rank * flat.piece, (rank + 1) * flat.piece
        self.lr, self.betas, self.eps, self.rate = lr, betas, eps, decay
        self.exp_avg = torch.zeros(flat.piece)
        self.exp_avg_sq = torch.zeros(flat.piece)
        self.t = 0

    def decay_mask(self):
        return self.flat.decay[self.lo : self.hi]

    @torch.no_grad()
    def update(self, grad):
        self.t += 1
        b1, b2 = self.betas
        weight = self.flat.weight[self.lo : self.hi]
        weight.mul_(1 - self.lr * self.rate * self.decay_mask())
        self.exp_avg.mul_(b1).add_(grad, alpha=1 - b1)
        self.exp_avg_sq.mul_(b2).addcmul_(grad, grad, value=1 - b2)
        denominator = (self.exp_avg_sq / (1 - b2**self.t)).sqrt().add_(self.eps)
        weight.addcdiv_(self.exp_avg / (1 - b1**self.t), denominator, value=-self.lr)

    def gather(self):
        if self.world > 1:
            mine = self.flat.weight[self.lo : self.hi].clone()
            dist.all_gather_into_tensor(self.flat.weight, mine)


class HeadMaskAdam(PieceAdam):
    def decay_mask(self):
        return self.flat.decay[: self.hi - self.lo]


class ListGatherAdam(PieceAdam):
    def gather(self):
        pieces = list(self.flat.weight.split(self.flat.piece))
        received = [torch.empty_like(p) for p in pieces]
        dist.all_gather(received, pieces[self.lo // self.flat.piece].clone())
        for kept, new in zip(pieces, received):
            kept.copy_(new)


def clip(grad, squares, limit=0.3):
    return grad * torch.clamp(limit / (squares.sqrt() + 1e-6), max=1.0)


def whole_squares(piece):
    squares = piece.square().sum()
    dist.all_reduce(squares)
    return squares


def own_squares(piece):
    return piece.square().sum()


# --- one device and stage 1 -------------------------------------------------------------------------------------------


def stage1(rank=0, world=1, adam_class=PieceAdam):
    model = Classifier()
    flat = FlatWeights(model, world)
    adam = adam_class(flat, rank, world)

    def step(batch):
        total = 0.0
        for x, y in zip(batch["x"], batch["y"]):
            value = F.cross_entropy(model(x), y) / MICRO
            value.backward()
            total = total + value.detach()
        if world > 1:
            dist.all_reduce(flat.grad)
            flat.grad.div_(world)
        grad = clip(flat.grad, flat.grad.square().sum())
        adam.update(grad[adam.lo : adam.hi])
        adam.gather()
        flat.grad.zero_()
        return total

    return step


# --- stage 2 ----------------------------------------------------------------------------------------------------------


def scatter_fresh(flat, into, world):
    """Adds the mean of what this micro-batch left in the flat gradient to the rank's piece."""
    part = torch.empty(flat.piece)
    dist.reduce_scatter_tensor(part, flat.grad)
    into.add_(part, alpha=1 / world)
    flat.grad.zero_()


def scatter_running(flat, into, world):
    part = torch.empty(flat.piece)
    dist.reduce_scatter_tensor(part, flat.grad / world)
    into += part


def stage2(rank, world, scatter=scatter_fresh, squares=whole_squares):
    model = Classifier()
    flat = FlatWeights(model, world)
    adam = ListGatherAdam(flat, rank, world)

    def step(batch):
        piece = torch.zeros(flat.piece)
        losses = []
        for m in range(MICRO):
            value = F.cross_entropy(model(batch["x"][m]), batch["y"][m])
            (value / MICRO).backward()
            losses.append(value.detach())
            scatter(flat, piece, world)
        adam.update(clip(piece, squares(piece)))
        adam.gather()
        flat.grad.zero_()
        return torch.stack(losses).mean()

    return step


def reference():
    return stage1()


def right_1(rank, world):
    return stage1(rank, world)


def right_2(rank, world):
    return stage2(rank, world)


def wrong_1(rank, world):
    return stage1(rank, world, HeadMaskAdam)


def wrong_2(rank, world):
    return stage2(rank, world, squares=own_squares)


def wrong_3(rank, world):
    return stage2(rank, world, scatter=scatter_running)
