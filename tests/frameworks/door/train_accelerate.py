"""Train a small Transformer encoder on sequence classification with accelerate.

accelerate launch --num_processes 8 --mixed_precision bf16 train_accelerate.py --epochs 5
"""

import argparse
import os

import torch
import torch.nn as nn
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, Dataset, random_split

logger = get_logger(__name__)


class Sequences(Dataset):
    """Sequences of digits; the class is which half of the digits is more frequent."""

    def __init__(self, count, length, vocab, seed):
        generator = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(0, vocab, (count, length), generator=generator)
        self.labels = (self.tokens < vocab // 2).float().mean(1).mul(4).long().clamp(max=3)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.tokens[index], self.labels[index]


def collate(rows):
    return {"tokens": torch.stack([t for t, _ in rows]), "labels": torch.stack([y for _, y in rows])}


class EncoderLayer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        b, s, w = x.shape
        h = self.norm1(x)
        q, k, v = (f(h).view(b, s, self.heads, -1).transpose(1, 2) for f in (self.query, self.key, self.value))
        a = F.scaled_dot_product_attention(q, k, v)
        x = x + self.out(a.transpose(1, 2).reshape(b, s, w))
        return x + self.mlp(self.norm2(x))


class Classifier(nn.Module):
    def __init__(self, vocab, length, classes, width=64, heads=4, layers=2):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.position = nn.Parameter(torch.zeros(length, width))
        self.layers = nn.ModuleList(EncoderLayer(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)
        nn.init.trunc_normal_(self.position, std=0.02)

    def forward(self, tokens):
        x = self.embed(tokens) + self.position[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x).mean(dim=1))


def evaluate(accelerator, model, loader):
    model.eval()
    correct, seen = 0, 0
    for batch in loader:
        with torch.no_grad():
            predictions = model(batch["tokens"]).argmax(dim=-1)
        predictions, labels = accelerator.gather_for_metrics((predictions, batch["labels"]))
        correct += (predictions == labels).sum().item()
        seen += labels.numel()
    model.train()
    return correct / seen


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--weight-decay", type=float, default=0.01)
    parser.add_argument("--label-smoothing", type=float, default=0.0)
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--mixed-precision", default="bf16", choices=["no", "bf16", "fp16"])
    parser.add_argument("--output-dir", default="classifier")
    args = parser.parse_args()

    accelerator = Accelerator(mixed_precision=args.mixed_precision, gradient_accumulation_steps=args.accumulate)
    set_seed(args.seed)
    if accelerator.is_main_process:
        os.makedirs(args.output_dir, exist_ok=True)
    accelerator.wait_for_everyone()

    vocab, length, classes = 32, 24, 4
    with accelerator.main_process_first():
        data = Sequences(1088, length, vocab, seed=7)
    train_data, eval_data = random_split(data, [1024, 64], generator=torch.Generator().manual_seed(0))
    train_loader = DataLoader(train_data, args.batch_size, shuffle=True, collate_fn=collate, drop_last=True)
    eval_loader = DataLoader(eval_data, args.batch_size, collate_fn=collate)

    model = Classifier(vocab, length, classes)
    decay = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decay, "weight_decay": args.weight_decay}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.lr)
    total_steps = args.epochs * len(train_loader) // args.accumulate
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=args.lr, total_steps=total_steps)
    model, optimizer, train_loader, eval_loader, scheduler = accelerator.prepare(model, optimizer, train_loader, eval_loader, scheduler)
    criterion = nn.CrossEntropyLoss(label_smoothing=args.label_smoothing)
    logger.info(f"{accelerator.num_processes} processes on {accelerator.device}, {total_steps} steps")

    completed = 0
    for epoch in range(args.epochs):
        model.train()
        total_loss = 0.0
        for batch in train_loader:
            with accelerator.accumulate(model):
                logits = model(batch["tokens"])
                loss = criterion(logits, batch["labels"])
                total_loss += loss.detach().float()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), args.clip)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                completed += 1
                if completed % 50 == 0:
                    accelerator.print(f"step {completed}: lr {scheduler.get_last_lr()[0]:.2e}")
        accuracy = evaluate(accelerator, model, eval_loader)
        mean = accelerator.gather(total_loss).mean().item() / len(train_loader)
        accelerator.print(f"epoch {epoch}: loss {mean:.4f}, accuracy {accuracy:.3f}")
        accelerator.save_state(os.path.join(args.output_dir, f"epoch-{epoch}"))

    accelerator.wait_for_everyone()
    unwrapped = accelerator.unwrap_model(model)
    accelerator.save(unwrapped.state_dict(), os.path.join(args.output_dir, "model.pt"))
    accelerator.end_training()


if __name__ == "__main__":
    main()
