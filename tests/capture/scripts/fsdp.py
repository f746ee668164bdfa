"""FSDP2 with bf16 parameters: torchrun --nproc_per_node=8 fsdp.py"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import trainverify.torch as tvt


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, features, width, classes, layers):
        super().__init__()
        self.first = nn.Linear(features, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.last = nn.Linear(width, classes)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def parsed():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--lr", type=float, default=1e-3)
    return parser.parse_args()


def main():
    args = parsed()
    local = int(os.environ["LOCAL_RANK"])
    world = int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(local)
    dist.init_process_group(backend="nccl", device_id=torch.device("cuda", local))
    torch.manual_seed(7)

    model = Model(6, 8, 4, 2).cuda()
    if world > 1:
        mesh = init_device_mesh("cuda", (world,), mesh_dim_names=("dp",))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    data = TensorDataset(torch.randn(256, 6), torch.randint(4, (256,)))
    sampler = DistributedSampler(data, num_replicas=world, rank=dist.get_rank(), shuffle=False)
    loader = DataLoader(data, batch_size=args.rows, sampler=sampler, pin_memory=True)

    for epoch in range(2):
        sampler.set_epoch(epoch)
        for i, (x, labels) in enumerate(loader):
            x, labels = x.cuda(non_blocking=True), labels.cuda(non_blocking=True)
            batch = {"x": x, "labels": labels}
            cut = {"x": "(dp b) f", "labels": "(dp b)"}
            with tvt.step(model, optimizer, batch, cut=cut, below=4, loss_over={"dp": "avg"}):
                loss = F.cross_entropy(model(x).float(), labels)
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            if i % 10 == 0 and dist.get_rank() == 0:
                print(f"epoch {epoch} step {i} loss {loss.item():.3f} memory {torch.cuda.max_memory_allocated() / 2**20:.0f} MB")
            if i + 1 == args.steps:
                break
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
