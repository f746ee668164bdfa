# Denoising diffusion on vectors ("latents"), eps-prediction, min-SNR weights, EMA of the weights.
# Noise and timesteps come with the batch so that runs can be repeated exactly.
# `keep` drops samples that failed the aesthetic filter: every rank has another number of them.
import math

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

import trainverify.torch as tvt

B, ACC, D, H, T = 12, 2, 10, 28, 17
EMA_DECAY, GAMMA = 0.97, 5.0

batch = {
    "x0": tvt.Reals((ACC, B, D), "a (dp b) d"),
    "eps": tvt.Reals((ACC, B, D), "a (dp b) d"),
    "t": tvt.Ids((ACC, B), "a (dp b)", below=T),
    "keep": tvt.Flags((ACC, B), "a (dp b)"),
    "weight": tvt.Reals((ACC, B), "a (dp b)"),
}
mesh = {"dp": 2}
loss = {"dp": "avg"}  # every rank reports world x its share


def cosine_alphas():
    bar = [math.cos((i / T + 0.008) / 1.008 * math.pi / 2) ** 2 for i in range(1, T + 1)]
    return [max(b / bar[0], 0.02) * 0.98 for b in bar]


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        a = torch.tensor(cosine_alphas())
        snr = a / (1 - a)
        self.register_buffer("signal", a.sqrt())
        self.register_buffer("sigma", (1 - a).sqrt())
        self.register_buffer("minsnr", torch.clamp(snr, max=GAMMA) / snr)
        freqs = torch.exp(torch.arange(3) * -0.9)
        ang = torch.arange(T)[:, None] * freqs[None, :]
        self.register_buffer("temb", torch.cat([ang.sin(), ang.cos()], dim=1))
        self.time = nn.Linear(6, H)
        self.inp = nn.Linear(D, H)
        self.norm = nn.LayerNorm(H)
        self.mid = nn.Linear(H, H)
        self.out = nn.Linear(H, D)

    def forward(self, x0, eps, t):
        """Squared error of every sample, times its min-SNR weight."""
        xt = self.signal[t][:, None] * x0 + self.sigma[t][:, None] * eps
        h = self.inp(xt) + F.silu(self.time(self.temb[t]))
        h = h + self.mid(F.silu(self.norm(h)))
        err = (self.out(F.silu(h)) - eps).square().mean(dim=-1)
        return err * self.minsnr[t]


def snapshot(net):
    return {n: p.detach().clone() for n, p in net.named_parameters()}


@torch.no_grad()
def ema_update(ema, net, decay=EMA_DECAY):
    for n, p in net.named_parameters():
        ema[n].mul_(decay).add_(p, alpha=1 - decay)


def make_opt(net):
    return torch.optim.AdamW(net.parameters(), lr=2e-3, weight_decay=0.01, eps=1e-6)


def sample_losses(model, batch, i):
    per = model(batch["x0"][i], batch["eps"][i], batch["t"][i])
    return torch.where(batch["keep"][i], per * batch["weight"][i].exp(), 0.0)


def reference():
    net = Denoiser()
    ema = snapshot(net)
    opt = make_opt(net)

    def step(batch):
        opt.zero_grad()
        kept = batch["keep"].sum()
        total = 0.0
        for i in range(ACC):
            l = sample_losses(net, batch, i).sum() / kept
            l.backward()
            total = total + l.detach()
        opt.step()
        ema_update(ema, net)
        return total

    return step


def global_count(keep):
    n = keep.sum()
    dist.all_reduce(n)
    return n


def right_1(rank, world):
    net = Denoiser()
    ema = snapshot(net)
    opt = make_opt(net)
    ddp = DDP(net, broadcast_buffers=False)

    def step(batch):
        opt.zero_grad()
        kept = global_count(batch["keep"])
        total = 0.0
        for i in range(ACC):
            ddp.require_backward_grad_sync = i == ACC - 1
            l = sample_losses(ddp, batch, i).sum() * world / kept
            l.backward()
            total = total + l.detach()
        opt.step()
        ema_update(ema, net)
        return total

    return step


def sharded(net, world):
    m = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    fully_shard(net.mid, mesh=m)
    fully_shard(net, mesh=m)
    return net


def right_2(rank, world):
    net = sharded(Denoiser(), world)
    ema = snapshot(net)
    opt = make_opt(net)

    def step(batch):
        kept = global_count(batch["keep"])
        total = torch.zeros(())
        for i in range(ACC):
            net.set_requires_gradient_sync(i + 1 == ACC)
            l = sample_losses(net, batch, i).sum() * (world / kept)
            l.backward()
            total += l.detach()
        opt.step()
        opt.zero_grad()
        with torch.no_grad():
            for name, p in net.named_parameters():
                ema[name].lerp_(p, 1 - EMA_DECAY)
        return total

    return step


def wrong_1(rank, world):
    net = Denoiser()
    ema = snapshot(net)
    opt = make_opt(net)
    ddp = DDP(net, broadcast_buffers=False)

    def step(batch):
        opt.zero_grad()
        kept = batch["keep"].sum()
        total = 0.0
        for i in range(ACC):
            ddp.require_backward_grad_sync = i == ACC - 1
            l = sample_losses(ddp, batch, i).sum() / kept
            l.backward()
            total = total + l.detach()
        opt.step()
        ema_update(ema, net)
        return total

    return step


def wrong_2(rank, world):
    net = Denoiser()
    ema = snapshot(net)
    opt = make_opt(net)
    ddp = DDP(net, broadcast_buffers=False)

    def step(batch):
        opt.zero_grad()
        kept = global_count(batch["keep"])
        total = 0.0
        for i in range(ACC):
            ddp.require_backward_grad_sync = i == ACC - 1
            l = sample_losses(ddp, batch, i).sum() * world / kept
            l.backward()
            total = total + l.detach()
            if ddp.require_backward_grad_sync:
                opt.step()
            ema_update(ema, net)
        return total

    return step


def wrong_3(rank, world):
    net = sharded(Denoiser(), world)
    ema = snapshot(net)
    opt = make_opt(net)

    def step(batch):
        kept = global_count(batch["keep"])
        total = torch.zeros(())
        for i in range(ACC):
            net.set_requires_gradient_sync(i + 1 == ACC)
            l = sample_losses(net, batch, i).sum() / kept
            l.backward()
            total += l.detach() * world
        opt.step()
        opt.zero_grad()
        with torch.no_grad():
            for name, p in net.named_parameters():
                ema[name].lerp_(p, 1 - EMA_DECAY)
        return total

    return step
