"""Three pipeline stages by hand: GPipe and 1F1B.

Stage 0 embeds, stage 2 owns a copy of the same table as output layer. Weights are loaded from one checkpoint,
so both copies start equal; their gradients are summed over the two stages.
"""
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import trainverify.torch as tvt

N_MICRO, MICRO_ROWS, SEQ = 4, 2, 6
VOCAB, DIM, HEADS = 23, 10, 2
LAYOUT = [(0, 1), (1, 3), (3, 4)]  # blocks of each stage

batch = {
    "tokens": tvt.Ids((N_MICRO, MICRO_ROWS, SEQ), "m b s", below=VOCAB),
    "labels": tvt.Ids((N_MICRO, MICRO_ROWS, SEQ), "m b s", below=VOCAB, ignore=-100),
}
mesh = {"pp": 3}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln1 = nn.LayerNorm(DIM)
        self.qkv = nn.Linear(DIM, 3 * DIM, bias=False)
        self.out = nn.Linear(DIM, DIM)
        self.ln2 = nn.LayerNorm(DIM)
        self.fc1 = nn.Linear(DIM, 17)
        self.fc2 = nn.Linear(17, DIM)

    def forward(self, x):
        b, s, d = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(b, s, HEADS, 3, d // HEADS).permute(3, 0, 2, 1, 4).unbind(0)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(a.transpose(1, 2).reshape(b, s, d))
        return x + self.fc2(F.gelu(self.fc1(self.ln2(x))))


class Stage(nn.Module):
    def __init__(self, first_block, last_block, first=True, last=True):
        super().__init__()
        self.first, self.last = first, last
        if first or last:
            self.wte = nn.Embedding(VOCAB, DIM)
        if first:
            self.wpe = nn.Embedding(SEQ, DIM)
        self.blocks = nn.ModuleDict({str(i): Block() for i in range(first_block, last_block)})
        if last:
            self.ln = nn.LayerNorm(DIM)

    def forward(self, x):
        if self.first:
            x = self.wte(x) + self.wpe.weight
        for block in self.blocks.values():
            x = block(x)
        if self.last:
            x = F.linear(self.ln(x), self.wte.weight)
        return x


def token_sum(logits, labels):
    return F.cross_entropy(logits.reshape(-1, VOCAB), labels.reshape(-1), ignore_index=-100, reduction="sum")


def over_all_tokens(logits, labels, every_label):
    return token_sum(logits, labels) / (every_label != -100).sum()


def over_micro_batch(logits, labels, every_label):
    return F.cross_entropy(logits.reshape(-1, VOCAB), labels.reshape(-1), ignore_index=-100) / N_MICRO


def make_optimizer(stage):
    decayed = [p for p in stage.parameters() if p.dim() > 1]
    others = [p for p in stage.parameters() if p.dim() == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=5e-3, betas=(0.9, 0.98), eps=1e-5)


class Pipeline:
    max_norm = 0.5

    def __init__(self, rank, world, criterion=over_all_tokens):
        self.rank, self.world, self.criterion = rank, world, criterion
        self.stage = Stage(*LAYOUT[rank], first=rank == 0, last=rank == world - 1)
        self.optimizer = make_optimizer(self.stage)
        self.tie_group = dist.new_group([0, world - 1])

    # -- one micro-batch ----------------------------------------------------------------------------------------------

    def forward(self, i, received, batch):
        out = self.stage(batch["tokens"][i] if self.stage.first else received)
        if self.stage.last:
            out = self.criterion(out, batch["labels"][i], batch["labels"])
            self.total = self.total + out.detach()
        return out

    def backward(self, received, out, grad):
        out.backward(grad)
        return None if received is None else received.grad

    # -- messages -----------------------------------------------------------------------------------------------------

    def empty(self):
        return torch.empty(MICRO_ROWS, SEQ, DIM)

    def exchange(self, send=None, to=None, source=None):
        """Sends and receives at once, either of which may be nothing."""
        ops, buffer = [], None
        if send is not None and 0 <= to < self.world:
            ops.append(dist.P2POp(dist.isend, send.detach().contiguous(), to))
        if source is not None and 0 <= source < self.world:
            buffer = self.empty()
            ops.append(dist.P2POp(dist.irecv, buffer, source))
        for work in dist.batch_isend_irecv(ops) if ops else []:
            work.wait()
        return buffer

    def receive_activation(self):
        x = self.exchange(source=self.rank - 1)
        return x if x is None else x.requires_grad_()

    # -- after the backward passes ------------------------------------------------------------------------------------

    def reduce_tied(self):
        if self.stage.first or self.stage.last:
            dist.all_reduce(self.stage.wte.weight.grad, group=self.tie_group)

    def clip(self):
        squares = torch.zeros(())
        for name, p in self.stage.named_parameters():
            if self.stage.last and name == "wte.weight":
                continue
            squares += p.grad.pow(2).sum()
        dist.all_reduce(squares)
        factor = (self.max_norm / (squares.sqrt() + 1e-6)).clamp(max=1.0)
        for p in self.stage.parameters():
            p.grad.mul_(factor)

    def __call__(self, batch):
        self.total = torch.zeros(())
        self.optimizer.zero_grad()
        self.schedule(batch)
        self.reduce_tied()
        self.clip()
        self.optimizer.step()
        return self.total if self.stage.last else None


class GPipe(Pipeline):
    def schedule(self, batch):
        kept = []
        for i in range(N_MICRO):
            x = None
            if not self.stage.first:
                x = self.empty()
                dist.recv(x, self.rank - 1)
                x.requires_grad_()
            y = self.forward(i, x, batch)
            if not self.stage.last:
                dist.send(y.detach(), self.rank + 1)
            kept.append((x, y))
        for x, y in reversed(kept):
            g = None
            if not self.stage.last:
                g = self.empty()
                dist.recv(g, self.rank + 1)
            gx = self.backward(x, y, g)
            if gx is not None:
                dist.send(gx, self.rank - 1)


class UntiedGPipe(GPipe):
    def reduce_tied(self):
        pass


class OneForwardOneBackward(Pipeline):
    take = 0

    def schedule(self, batch):
        above, below = self.rank + 1, self.rank - 1
        warmup = min(self.world - 1 - self.rank, N_MICRO)
        pending = []
        for i in range(warmup):
            x = self.receive_activation()
            y = self.forward(i, x, batch)
            pending.append((x, y))
            self.exchange(send=y, to=above)
        x = self.receive_activation()
        for i in range(warmup, N_MICRO):
            y = self.forward(i, x, batch)
            pending.append((x, y))
            g = None if self.stage.last else self.exchange(send=y, to=above, source=above)
            gx = self.backward(*pending.pop(self.take), g)
            if i == N_MICRO - 1:
                self.exchange(send=gx, to=below)
            else:
                x = self.exchange(send=gx, to=below, source=below)
                x = x if x is None else x.requires_grad_()
        for _ in range(warmup):
            g = self.exchange(source=above)
            gx = self.backward(*pending.pop(self.take), g)
            self.exchange(send=gx, to=below)


class NewestFirst(OneForwardOneBackward):
    take = -1


def reference():
    model = Stage(0, LAYOUT[-1][1])
    optimizer = make_optimizer(model)

    def step(batch):
        optimizer.zero_grad()
        logits = model(batch["tokens"].flatten(0, 1))
        loss = over_all_tokens(logits, batch["labels"], batch["labels"])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), Pipeline.max_norm)
        optimizer.step()
        return loss

    return step


def right_1(rank, world):
    return GPipe(rank, world)


def right_2(rank, world):
    return OneForwardOneBackward(rank, world)


def wrong_1(rank, world):
    return UntiedGPipe(rank, world)


def wrong_2(rank, world):
    return GPipe(rank, world, criterion=over_micro_batch)


def wrong_3(rank, world):
    return NewestFirst(rank, world)
