"""A CIFAR-style ResNet whose batch norms see the whole batch, not the part that one rank has."""

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_nn
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import trainverify.torch as tvt

batch = {
    "images": tvt.Reals((8, 3, 10, 12), "(dp n) c h w"),
    "labels": tvt.Ids((8,), "(dp n)", below=7),
}
mesh = {"dp": 2}
loss = {"dp": "avg"}

LR, MOMENTUM, DECAY = 0.05, 0.9, 5e-4


# ----------------------------------------------------------------------------- model


def conv3x3(cin, cout, stride=1):
    return nn.Conv2d(cin, cout, kernel_size=3, stride=stride, padding=1, bias=False)


class BasicBlock(nn.Module):
    def __init__(self, cin, cout, stride=1):
        super().__init__()
        self.conv1 = conv3x3(cin, cout, stride)
        self.bn1 = nn.BatchNorm2d(cout)
        self.conv2 = conv3x3(cout, cout)
        self.bn2 = nn.BatchNorm2d(cout)
        self.downsample = None
        if stride != 1 or cin != cout:
            self.downsample = nn.Sequential(nn.Conv2d(cin, cout, 1, stride, bias=False), nn.BatchNorm2d(cout))

    def forward(self, x):
        identity = x if self.downsample is None else self.downsample(x)
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        return F.relu(out + identity)


class ResNet(nn.Module):
    def __init__(self, num_classes=7):
        super().__init__()
        self.conv1 = conv3x3(3, 4)
        self.bn1 = nn.BatchNorm2d(4)
        self.pool = nn.AvgPool2d(2)
        self.layer1 = BasicBlock(4, 4)
        self.layer2 = BasicBlock(4, 6, stride=2)
        self.fc = nn.Linear(6, num_classes)

    def forward(self, x):
        x = self.pool(F.relu(self.bn1(self.conv1(x))))
        x = self.layer2(self.layer1(x))
        return self.fc(x.mean(dim=(2, 3)))


# ----------------------------------------------------------------------------- synchronised norms


class SyncNorm(nn.BatchNorm2d):
    """Statistics of all ranks' pixels: E[x²] - E[x]², one message for both."""

    def forward(self, x):
        count = x.numel() // x.size(1) * dist.get_world_size()
        sums = torch.stack([x.sum(dim=(0, 2, 3)), (x * x).sum(dim=(0, 2, 3))])
        mean, square = self.reduced(sums) / count
        var = square - mean * mean
        self.remember(x, mean, var, count)
        x = (x - mean[:, None, None]) * torch.rsqrt(var + self.eps)[:, None, None]
        return x * self.weight[:, None, None] + self.bias[:, None, None]

    def reduced(self, sums):
        return dist_nn.all_reduce(sums)

    @torch.no_grad()
    def remember(self, x, mean, var, count):
        self.num_batches_tracked.add_(1)
        self.running_mean.lerp_(mean, self.momentum)
        self.running_var.lerp_(var * count / (count - 1), self.momentum)


class SyncNormLocalCount(SyncNorm):
    @torch.no_grad()
    def remember(self, x, mean, var, count):
        count = x.numel() // x.size(1)
        self.num_batches_tracked.add_(1)
        self.running_mean.lerp_(mean, self.momentum)
        self.running_var.lerp_(var * count / (count - 1), self.momentum)


class SyncNormInPlace(SyncNorm):
    def reduced(self, sums):
        others = sums.detach().clone()
        dist.all_reduce(others)
        return sums + (others - sums.detach())


class SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


class TwoPassNorm(nn.BatchNorm2d):
    """First the mean, then the variance about it."""

    def forward(self, x):
        shape = (1, -1, 1, 1)
        n = dist.get_world_size() * x.size(0) * x.size(2) * x.size(3)
        mean = SumOverRanks.apply(x.sum((0, 2, 3))) / n
        centred = x - mean.view(shape)
        var = SumOverRanks.apply(centred.square().sum((0, 2, 3))) / n
        with torch.no_grad():
            m = self.momentum
            self.num_batches_tracked += 1
            self.running_mean.copy_((1 - m) * self.running_mean + m * mean)
            self.running_var.copy_((1 - m) * self.running_var + m * var * n / (n - 1))
        return centred / torch.sqrt(var.view(shape) + self.eps) * self.weight.view(shape) + self.bias.view(shape)


def convert(module, kind):
    """Replaces every BatchNorm2d below `module`, keeping its parameters and buffers."""
    for name, child in module.named_children():
        if type(child) is nn.BatchNorm2d:
            new = kind(child.num_features, eps=child.eps, momentum=child.momentum)
            new.load_state_dict(child.state_dict())
            setattr(module, name, new)
        else:
            convert(child, kind)
    return module


def convert_blocks(net, kind):
    for block in (net, net.layer1, net.layer2):
        for name in ("bn1", "bn2"):
            if hasattr(block, name):
                old = getattr(block, name)
                setattr(block, name, kind(old.num_features, eps=old.eps, momentum=old.momentum))
    return net


# ----------------------------------------------------------------------------- steps


def sgd(net):
    return torch.optim.SGD(net.parameters(), lr=LR, momentum=MOMENTUM, weight_decay=DECAY, nesterov=True)


def reference():
    net = ResNet()
    optimizer = sgd(net)

    def step(batch):
        optimizer.zero_grad()
        loss = F.cross_entropy(net(batch["images"]), batch["labels"])
        loss.backward()
        optimizer.step()
        return loss

    return step


def ddp_step(net):
    ddp = DDP(net)
    optimizer = sgd(net)

    def step(batch):
        optimizer.zero_grad()
        loss = F.cross_entropy(ddp(batch["images"]), batch["labels"])
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def right_1(rank, world):
    return ddp_step(convert(ResNet(), SyncNorm))


def right_2(rank, world):
    net = convert(ResNet(), TwoPassNorm)
    optimizer = sgd(net)

    def step(batch):
        optimizer.zero_grad(set_to_none=False)
        loss = F.cross_entropy(net(batch["images"]), batch["labels"])
        loss.backward()
        for p in net.parameters():
            dist.all_reduce(p.grad)
            p.grad.div_(world)
        optimizer.step()
        return loss.detach()

    return step


def wrong_1(rank, world):
    return ddp_step(convert(ResNet(), SyncNormLocalCount))


def wrong_2(rank, world):
    return ddp_step(convert(ResNet(), SyncNormInPlace))


def wrong_3(rank, world):
    return ddp_step(convert_blocks(ResNet(), SyncNorm))
