"""Train a small image classifier with Lightning on two GPUs: python train_lightning.py --max-epochs 5"""

import argparse

import lightning as L
import torch
import torch.nn as nn
import torch.nn.functional as F
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader, Dataset


class Stripes(Dataset):
    """Images of stripes in one of several directions, with noise."""

    def __init__(self, count, size, classes, seed):
        generator = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(0, classes, (count,), generator=generator)
        angle = self.labels.float() * torch.pi / classes
        grid = torch.arange(size).float()
        phase = angle.cos()[:, None, None] * grid[:, None] + angle.sin()[:, None, None] * grid
        noise = torch.randn(count, size, size, generator=generator)
        self.images = (phase.sin() + 0.3 * noise).unsqueeze(1)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.images[index], self.labels[index]


class StripesData(L.LightningDataModule):
    def __init__(self, batch_size=8, size=16, classes=6):
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage):
        self.train_data = Stripes(1024, self.hparams.size, self.hparams.classes, seed=1)
        self.val_data = Stripes(64, self.hparams.size, self.hparams.classes, seed=2)

    def train_dataloader(self):
        return DataLoader(self.train_data, self.hparams.batch_size, shuffle=True, num_workers=2, pin_memory=True, drop_last=True)

    def val_dataloader(self):
        return DataLoader(self.val_data, self.hparams.batch_size, num_workers=2)


class MixerBlock(nn.Module):
    def __init__(self, patches, width):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.tokens = nn.Sequential(nn.Linear(patches, 2 * patches), nn.GELU(), nn.Linear(2 * patches, patches))
        self.channels = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x):
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norm2(x))


class Mixer(nn.Module):
    def __init__(self, size, patch, width, depth, classes):
        super().__init__()
        self.patch = patch
        patches = (size // patch) ** 2
        self.embed = nn.Linear(patch * patch, width)
        self.blocks = nn.Sequential(*(MixerBlock(patches, width) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, images):
        b, _, h, w = images.shape
        p = self.patch
        x = images.reshape(b, h // p, p, w // p, p).transpose(2, 3).reshape(b, -1, p * p)
        return self.head(self.norm(self.blocks(self.embed(x))).mean(dim=1))


class StripesClassifier(L.LightningModule):
    def __init__(self, size=16, patch=4, width=48, depth=2, classes=6, lr=1e-3, weight_decay=0.05):
        super().__init__()
        self.save_hyperparameters()
        self.model = Mixer(size, patch, width, depth, classes)
        self.register_buffer("brightness", torch.zeros(()))

    def training_step(self, batch, batch_idx):
        images, labels = batch
        with torch.no_grad():
            mean = self.trainer.strategy.reduce(images.mean(), reduce_op="mean")
            self.brightness.lerp_(mean, 0.1)
        logits = self.model(images - self.brightness)
        loss = F.cross_entropy(logits, labels)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        images, labels = batch
        logits = self.model(images - self.brightness)
        self.log("val/loss", F.cross_entropy(logits, labels), sync_dist=True)
        self.log("val/accuracy", (logits.argmax(-1) == labels).float().mean(), sync_dist=True)

    def configure_optimizers(self):
        decay = [p for p in self.parameters() if p.ndim > 1]
        rest = [p for p in self.parameters() if p.ndim <= 1]
        groups = [
            {"params": decay, "weight_decay": self.hparams.weight_decay},
            {"params": rest, "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=self.hparams.lr)
        steps = self.trainer.estimated_stepping_batches
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, self.hparams.lr, total_steps=int(steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--max-epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--precision", default="bf16-mixed")
    parser.add_argument("--output-dir", default="stripes")
    parser.add_argument("--seed", type=int, default=7)
    args = parser.parse_args()

    L.seed_everything(args.seed, workers=True)
    torch.set_float32_matmul_precision("high")
    data = StripesData(batch_size=args.batch_size)
    model = StripesClassifier(lr=args.lr)
    callbacks = [
        LearningRateMonitor("step"),
        ModelCheckpoint(monitor="val/accuracy", mode="max", save_last=True),
    ]
    trainer = L.Trainer(
        accelerator="gpu",
        devices=2,
        strategy="ddp",
        precision=args.precision,
        max_epochs=args.max_epochs,
        accumulate_grad_batches=args.accumulate,
        gradient_clip_val=args.clip,
        callbacks=callbacks,
        logger=CSVLogger(args.output_dir),
        log_every_n_steps=10,
    )
    trainer.fit(model, datamodule=data)
    trainer.validate(model, datamodule=data)


if __name__ == "__main__":
    main()
