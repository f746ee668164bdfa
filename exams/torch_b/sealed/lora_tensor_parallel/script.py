# LoRA fine-tuning of a frozen classifier trunk. The trunk's MLPs are tensor parallel (column, then row),
# adapters sit on both linears:  y = W x + b + (alpha / r) * B A x
import math
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.optim import AdamW
import trainverify.torch as tvt

DIM, HIDDEN, RANK, ALPHA, LAYERS, CLASSES = 14, 21, 4, 8, 2, 5
MICRO = 2

batch = {
    "features": tvt.Reals((MICRO, 5, DIM), "m b k"),
    "labels": tvt.Ids((MICRO, 5), "m b", below=CLASSES),
}
mesh = {"tp": 3}
cuts = {
    "layers.*.up.weight": "(tp o) k",
    "layers.*.up.bias": "(tp o)",
    "layers.*.up.B": "(tp o) r",
    "layers.*.down.weight": "o (tp k)",
    "layers.*.down.A": "r (tp k)",
}
CUT = (".up.B", ".down.A")


class LoRALinear(nn.Linear):
    def __init__(self, n_in, n_out):
        super().__init__(n_in, n_out)
        self.A = nn.Parameter(torch.randn(RANK, n_in) / math.sqrt(n_in))
        self.B = nn.Parameter(torch.randn(n_out, RANK) * 0.1)
        self.weight.requires_grad_(False)
        self.bias.requires_grad_(False)
        self.scaling = ALPHA / RANK

    def forward(self, x):
        return F.linear(x, self.weight, self.bias) + self.scaling * F.linear(F.linear(x, self.A), self.B)


class MLP(nn.Module):
    def __init__(self, up, down):
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.norm.requires_grad_(False)
        self.up, self.down = up, down

    def forward(self, x):
        return x + self.down(F.silu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, up=LoRALinear, down=LoRALinear, shards=1):
        super().__init__()
        h = HIDDEN // shards
        self.layers = nn.ModuleList(MLP(up(DIM, h), down(h, DIM)) for _ in range(LAYERS))
        self.classifier = nn.Linear(DIM, CLASSES)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.classifier(x)

    def trainable(self):
        return {n: p for n, p in self.named_parameters() if p.requires_grad}


# f and g of Megatron
class ToRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, g):
        g = g.clone()
        dist.all_reduce(g)
        return g


class FromRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, g):
        return g

f, g = ToRegion.apply, FromRegion.apply


class ColumnLoRA(LoRALinear):
    """Rows of W, b and B are this rank's; A is whole, and its output enters the region."""

    def forward(self, x):
        low = f(F.linear(x, self.A))
        return F.linear(f(x), self.weight, self.bias) + self.scaling * F.linear(low, self.B)


class RowLoRA(LoRALinear):
    """Columns of W and A are this rank's; the small activation is summed before B."""

    def forward(self, x):
        low = g(F.linear(x, self.A))
        return g(F.linear(x, self.weight)) + self.bias + self.scaling * F.linear(low, self.B)


class ColumnLate(LoRALinear):
    """x enters the region once; the gradient of A is a share, summed in the step."""

    def forward(self, x):
        return super().forward(f(x))


class RowLate(LoRALinear):
    """One sum for base and adapter; the gradient of B is a share, summed in the step."""

    def forward(self, x):
        part = F.linear(x, self.weight) + self.scaling * F.linear(F.linear(x, self.A), self.B)
        return g(part) + self.bias


class RowOnce(LoRALinear):
    def forward(self, x):
        low = g(F.linear(x, self.A))
        part = F.linear(x, self.weight) + self.scaling * F.linear(low, self.B)
        return g(part) + self.bias


def adamw(model):
    return AdamW(model.trainable().values(), lr=5e-3, weight_decay=0.02)


def accumulate(model, batch):
    total = 0.0
    for x, y in zip(batch["features"], batch["labels"]):
        loss = F.cross_entropy(model(x), y) / MICRO
        loss.backward()
        total = total + loss.detach()
    return total


def sum_shares(model, suffixes):
    for name, p in model.trainable().items():
        if name.endswith(suffixes):
            dist.all_reduce(p.grad)


@torch.no_grad()
def clip(model, limit=0.4):
    mine, shared = torch.zeros(()), torch.zeros(())
    for name, p in model.trainable().items():
        if name.endswith(CUT):
            mine += p.grad.square().sum()
        else:
            shared += p.grad.square().sum()
    dist.all_reduce(mine)
    norm = torch.sqrt(mine + shared)
    for p in model.trainable().values():
        p.grad *= torch.clamp(limit / (norm + 1e-6), max=1.0)


def reference():
    model = Net()
    optimizer = adamw(model)

    def step(batch):
        loss = accumulate(model, batch)
        nn.utils.clip_grad_norm_(model.trainable().values(), 0.4)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def right_1(rank, world):
    model = Net(ColumnLoRA, RowLoRA, world)
    optimizer = adamw(model)

    def step(batch):
        loss = accumulate(model, batch)
        clip(model)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def right_2(rank, world):
    model = Net(ColumnLate, RowLate, world)
    optimizer = adamw(model)

    def step(batch):
        loss = accumulate(model, batch)
        sum_shares(model, (".up.A", ".down.B"))
        clip(model)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def wrong_1(rank, world):
    model = Net(ColumnLate, RowLoRA, world)
    optimizer = adamw(model)

    def step(batch):
        loss = accumulate(model, batch)
        clip(model)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def wrong_2(rank, world):
    model = Net(ColumnLoRA, RowOnce, world)
    optimizer = adamw(model)

    def step(batch):
        loss = accumulate(model, batch)
        clip(model)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def wrong_3(rank, world):
    model = Net(ColumnLate, RowLate, world)
    optimizer = adamw(model)

    def step(batch):
        loss = accumulate(model, batch)
        sum_shares(model, (".up.A", ".down.B"))
        nn.utils.clip_grad_norm_(model.trainable().values(), 0.4)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step
