"""DeepSpeed-Ulysses on a 2 x 2 mesh: rows over dp, tokens over sp, heads over sp inside attention."""

from typing import Callable, NamedTuple, Optional

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd

import trainverify.torch as tvt

rows, length, vocabulary = 6, 10, 27
heads, size, hidden = 6, 2, 20
width = heads * size

batch = {
    "token": tvt.Ids((rows, length), "(dp b) (sp s)", below=vocabulary),
    "label": tvt.Ids((rows, length), "(dp b) (sp s)", below=vocabulary, ignore=-100),
}
mesh = {"dp": 2, "sp": 2}


class Place(NamedTuple):
    sp: int = 1
    index: int = 0
    group: Optional[dist.ProcessGroup] = None
    replicas: Optional[dist.ProcessGroup] = None


def place_of(rank: int) -> Place:
    dp, sp = mesh["dp"], mesh["sp"]
    sequence_groups = [dist.new_group([d * sp + s for s in range(sp)]) for d in range(dp)]
    replica_groups = [dist.new_group([d * sp + s for d in range(dp)]) for s in range(sp)]
    return Place(sp, rank % sp, sequence_groups[rank // sp], replica_groups[rank % sp])


# ---------------------------------------------------------------------------------------------------------------------
# exchanges


def exchange(x: Tensor, group) -> Tensor:
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x, group=group)
    return out


def to_heads(x: Tensor, place: Place) -> Tensor:
    """[batch, tokens/sp, heads, size] -> [batch, tokens, heads/sp, size]"""
    b, s, h, d = x.shape
    x = x.view(b, s, place.sp, h // place.sp, d).permute(2, 0, 1, 3, 4).contiguous()
    x = exchange(x, place.group)
    return x.permute(1, 0, 2, 3, 4).reshape(b, place.sp * s, h // place.sp, d)


def to_tokens(x: Tensor, place: Place) -> Tensor:
    """[batch, tokens, heads/sp, size] -> [batch, tokens/sp, heads, size]"""
    b, s, h, d = x.shape
    x = x.view(b, place.sp, s // place.sp, h, d).transpose(0, 1).contiguous()
    x = exchange(x, place.group)
    return x.permute(1, 2, 0, 3, 4).reshape(b, s // place.sp, place.sp * h, d)


def to_tokens_interleaved(x: Tensor, place: Place) -> Tensor:
    b, s, h, d = x.shape
    x = x.view(b, place.sp, s // place.sp, h, d).transpose(0, 1).contiguous()
    x = exchange(x, place.group)
    return x.permute(1, 2, 3, 0, 4).reshape(b, s // place.sp, place.sp * h, d)


def from_tokens_interleaved(x: Tensor, place: Place) -> Tensor:
    b, s, h, d = x.shape
    x = x.view(b, s, h // place.sp, place.sp, d).permute(3, 0, 1, 2, 4).contiguous()
    x = exchange(x, place.group)
    return x.permute(1, 0, 2, 3, 4).reshape(b, place.sp * s, h // place.sp, d)


class Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, place, there, back):
        ctx.place, ctx.back = place, back
        return there(x, place)

    @staticmethod
    def backward(ctx, grad):
        return ctx.back(grad.contiguous(), ctx.place), None, None, None


# ---------------------------------------------------------------------------------------------------------------------
# attention


def rotary(x: Tensor, first: int) -> Tensor:
    """Rotates pairs; x is [batch, tokens, heads, 2] and its first token stands at position `first`."""
    angle = (torch.arange(x.size(1)) + first).to(x.dtype).view(1, -1, 1) * 0.3
    a, b = x.unbind(-1)
    return torch.stack((a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()), dim=-1)


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def alone(q, k, v, place):
    return causal(rotary(q, 0), rotary(k, 0), v)


def three_exchanges(q, k, v, place, first=lambda place, tokens: place.index * tokens, home=(to_tokens, to_heads)):
    start = first(place, q.size(1))
    q, k = rotary(q, start), rotary(k, start)
    q, k, v = (Exchange.apply(t, place, to_heads, to_tokens) for t in (q, k, v))
    return Exchange.apply(causal(q, k, v).contiguous(), place, *home)


def one_exchange(q, k, v, place):
    """Queries, keys and values travel together and are rotated where the whole sequence is."""
    b, s, _, d = q.shape
    sp, h = place.sp, heads // place.sp
    together = torch.stack((q, k, v)).unflatten(3, (sp, h)).permute(3, 2, 0, 1, 4, 5).reshape(sp * s, 3 * b * h * d)
    together = all_to_all_single_autograd(together, [s] * sp, [s] * sp, place.group)
    q, k, v = together.reshape(sp * s, 3, b, h, d).permute(1, 2, 0, 3, 4).unbind(0)
    y = causal(rotary(q, 0), rotary(k, 0), v)
    y = y.transpose(0, 1).reshape(sp * s, b * h * d)
    y = all_to_all_single_autograd(y, [s] * sp, [s] * sp, place.group)
    return y.reshape(sp, s, b, h, d).permute(2, 1, 0, 3, 4).reshape(b, s, heads, d)


class Layer(nn.Module):
    def __init__(self, attend: Callable, place: Place):
        super().__init__()
        self.attend, self.place = attend, place
        self.norm_a, self.norm_f = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.o = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        n = self.norm_a(x)
        q, k, v = (w(n).unflatten(-1, (heads, size)) for w in (self.q, self.k, self.v))
        x = x + self.o(self.attend(q, k, v, self.place).flatten(-2))
        return x + self.down(F.relu(self.up(self.norm_f(x))).square())


class Net(nn.Module):
    def __init__(self, attend: Callable, place: Place):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Layer(attend, place) for _ in range(2))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, token: Tensor) -> Tensor:
        x = self.embedding(token)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


# ---------------------------------------------------------------------------------------------------------------------
# the step: momentum by hand


def everywhere(place: Place):
    return None


def replicas_only(place: Place):
    return place.replicas


def build(attend: Callable, place: Place = Place(), reduced_over: Callable = everywhere):
    net = Net(attend, place)
    velocity = {name: torch.zeros_like(p) for name, p in net.named_parameters()}
    distributed = place.group is not None

    def step(batch):
        kept = (batch["label"] != -100).sum().to(torch.get_default_dtype())
        if distributed:
            dist.all_reduce(kept)
        logits = net(batch["token"]).flatten(0, 1)
        loss = F.cross_entropy(logits, batch["label"].flatten(), ignore_index=-100, reduction="sum") / kept
        net.zero_grad()
        loss.backward()
        result = loss.detach().clone()
        if distributed:
            dist.all_reduce(result)
            for p in net.parameters():
                dist.all_reduce(p.grad, group=reduced_over(place))
        with torch.no_grad():
            for name, p in net.named_parameters():
                velocity[name].mul_(0.9).add_(p.grad)
                p.sub_(0.15 * velocity[name])
        return result

    return step


def reference():
    return build(alone)


def right_1(rank, world):
    return build(three_exchanges, place_of(rank))


def right_2(rank, world):
    return build(one_exchange, place_of(rank))


def wrong_1(rank, world):
    def attend(q, k, v, place):
        return three_exchanges(q, k, v, place, home=(to_tokens_interleaved, from_tokens_interleaved))

    return build(attend, place_of(rank))


def wrong_2(rank, world):
    return build(three_exchanges, place_of(rank), reduced_over=replicas_only)


def wrong_3(rank, world):
    def attend(q, k, v, place):
        return three_exchanges(q, k, v, place, first=lambda place, tokens: 0)

    return build(attend, place_of(rank))
