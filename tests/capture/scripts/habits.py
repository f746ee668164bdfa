"""What many scripts do around a step: data drawn from a generator, a seed read of another one, batches loaded together, a running loss."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, random_split

dist.init_process_group("nccl")
local = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local)
torch.manual_seed(5)
seed = int(torch.empty((), dtype=torch.int64).random_().item())
generator = torch.Generator().manual_seed(3)
rows = torch.randint(0, 11, (60, 5), generator=generator).tolist()
ids = torch.tensor([r[:-1] for r in rows])
train, held = random_split(TensorDataset(ids, torch.tensor([r[-1] for r in rows])), [56, 4], generator=generator)
sampler = DistributedSampler(train, seed=seed % 1000)
loader = DataLoader(train, batch_size=2, sampler=sampler)

raw = nn.Sequential(nn.Embedding(11, 6), nn.Flatten(), nn.Linear(24, 11)).cuda()
nn.init.trunc_normal_(raw[2].weight, std=0.02)
model = DistributedDataParallel(raw, device_ids=[local])
optimizer = torch.optim.AdamW(raw.parameters(), lr=0.1)


def train_epoch():
    total = 0.0
    batches = iter(loader)
    for _ in range(len(loader) // 2):
        for x, y in [next(batches) for _ in range(2)]:
            loss = F.cross_entropy(model(x.cuda()), y.cuda()) / 2
            total += loss.detach()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"{total.item() / len(loader):.3f}")


train_epoch()
dist.destroy_process_group()
