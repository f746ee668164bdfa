"""Train a small Llama from scratch with Transformers' Trainer: torchrun --nproc-per-node 8 train_trainer.py"""

import argparse
import logging
import os

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments, set_seed

logger = logging.getLogger(__name__)
VOCAB, PAD = 160, 0


class Arithmetic(Dataset):
    """Lines like `17+25=42` as bytes, padded on the right; only the answer is learnt."""

    def __init__(self, count, length, seed):
        generator = torch.Generator().manual_seed(seed)
        self.pairs = torch.randint(0, 1000, (count, 2), generator=generator).tolist()
        self.length = length

    def __len__(self):
        return len(self.pairs)

    def __getitem__(self, index):
        a, b = self.pairs[index]
        question, answer = f"{a}+{b}=", f"{a + b}\n"
        ids = list((question + answer).encode())
        labels = [-100] * len(question) + ids[len(question) :]
        return {"ids": ids, "labels": labels}


class Collator:
    def __init__(self, length):
        self.length = length

    def __call__(self, rows):
        ids = torch.full((len(rows), self.length), PAD)
        labels = torch.full((len(rows), self.length), -100)
        mask = torch.zeros(len(rows), self.length, dtype=torch.long)
        for i, row in enumerate(rows):
            size = len(row["ids"])
            ids[i, :size] = torch.tensor(row["ids"])
            labels[i, :size] = torch.tensor(row["labels"])
            mask[i, :size] = 1
        return {"input_ids": ids, "labels": labels, "attention_mask": mask}


class LogMemory(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step % 100 == 0 and state.is_world_process_zero:
            logger.info("step %d: %d MB", state.global_step, torch.cuda.max_memory_allocated() // 2**20)


def compute_metrics(prediction):
    wanted = torch.as_tensor(prediction.label_ids)[:, 1:]
    found = torch.as_tensor(prediction.predictions)[:, :-1]
    known = wanted != -100
    return {"accuracy": (found[known] == wanted[known]).float().mean().item()}


class ArithmeticTrainer(Trainer):
    """The model's loss, with a penalty that keeps the logits small."""

    penalty = 1e-4

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch)
        if model.training:
            z = torch.logsumexp(outputs.logits.float(), dim=-1)
            micro_batches = self.args.gradient_accumulation_steps
            loss = loss + self.penalty * z.pow(2).mean() / micro_batches
        return (loss, outputs) if return_outputs else loss


def parameter_groups(model, weight_decay):
    decay, rest = [], []
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2 or "embed_tokens" in name:
            rest.append(parameter)
        else:
            decay.append(parameter)
    return [{"params": decay, "weight_decay": weight_decay}, {"params": rest, "weight_decay": 0.0}]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output-dir", default="arithmetic")
    parser.add_argument("--hidden-size", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--length", type=int, default=16)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--max-steps", type=int, default=400)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=42)
    args = parser.parse_args()

    logging.basicConfig(level=logging.INFO)
    training = TrainingArguments(
        output_dir=args.output_dir,
        per_device_train_batch_size=args.batch_size,
        per_device_eval_batch_size=args.batch_size,
        gradient_accumulation_steps=args.accumulate,
        max_steps=args.max_steps,
        learning_rate=args.lr,
        lr_scheduler_type="cosine",
        warmup_steps=20,
        max_grad_norm=1.0,
        bf16=True,
        logging_steps=10,
        eval_strategy="steps",
        eval_steps=100,
        save_strategy="steps",
        save_steps=200,
        dataloader_num_workers=2,
        remove_unused_columns=False,
        report_to="none",
        seed=args.seed,
    )
    set_seed(training.seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=args.hidden_size,
        intermediate_size=3 * args.hidden_size,
        num_hidden_layers=args.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=args.length,
        pad_token_id=PAD,
        use_cache=False,
    )
    model = LlamaForCausalLM(config)
    logger.info("%d parameters", model.num_parameters())
    optimizer = torch.optim.AdamW(parameter_groups(model, 0.1), lr=args.lr, betas=(0.9, 0.95))
    trainer = ArithmeticTrainer(
        model=model,
        args=training,
        data_collator=Collator(args.length),
        train_dataset=Arithmetic(4096, args.length, seed=1),
        eval_dataset=Arithmetic(64, args.length, seed=2),
        compute_metrics=compute_metrics,
        preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(dim=-1),
        callbacks=[LogMemory()],
        optimizers=(optimizer, None),
    )
    result = trainer.train()
    trainer.save_model(os.path.join(args.output_dir, "final"))
    trainer.log_metrics("train", result.metrics)
    metrics = trainer.evaluate()
    trainer.log_metrics("eval", metrics)


if __name__ == "__main__":
    main()
