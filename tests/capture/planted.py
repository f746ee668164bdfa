"""Bugs planted into the sources: one line of a file becomes another one, so that every line keeps its number.

Only the ranks run the changed file; the reference runs it as it is. A report is right if it names the planted line, or one of the lines
in `also`: those that lack what was left out.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from capture.cases import CASES, SOURCES, Case
from trainverify.graph.program import Source

Where = tuple[str, str, str]  # file, the function or class, a part of a line in it
Line = tuple[str, int]


def line_of(where: Where) -> Line:
    """The first line after the start of a definition that has a text in it."""
    file, inside, text = where
    lines = (SOURCES / file).read_text("utf-8").splitlines()
    start = next(i for i, line in enumerate(lines) if line.lstrip().startswith((f"def {inside}(", f"class {inside}(")))
    return file, next(i for i, line in enumerate(lines[start:], start + 1) if text in line)


@dataclass(frozen=True)
class Bug:
    """One mistake in one line. `now` takes the place of the text that `where` names."""

    case: str
    name: str
    where: Where
    now: str
    also: tuple[Where, ...] = ()
    change: Callable[[Case], Case] = lambda case: case

    @property
    def id(self) -> str:
        return f"{self.case}: {self.name}"

    @property
    def lines(self) -> set[Line]:
        """Where a report is right."""
        return {line_of(w) for w in (self.where, *self.also)}

    def source(self) -> str:
        """The whole file with the bug in it."""
        file, number = line_of(self.where)
        lines = (SOURCES / file).read_text("utf-8").splitlines()
        lines[number - 1] = lines[number - 1].replace(self.where[2], self.now, 1)
        return "\n".join(lines) + "\n"

    def verify(self) -> Any:
        case = self.change(CASES[self.case])
        return replace(case, distributed=partial(self._planted, case)).verify()

    def _planted(self, case: Case, c: Any, rank: int, world: int, bug: str | None) -> Any:
        """Runs in the process of a rank, so that nobody else sees the changed file."""
        path = SOURCES / self.where[0]
        exec(compile(self.source(), str(path), "exec"), importlib.import_module(path.stem).__dict__)
        for other in sorted(SOURCES.glob("*.py")):  # files that import names from it
            if other != path and f"from {path.stem} import" in other.read_text("utf-8"):
                exec(compile(other.read_text("utf-8"), str(other), "exec"), importlib.import_module(other.stem).__dict__)
        return case.distributed(c, rank, world, bug)


def named(report: Any) -> Source | None:
    """The line that a report blames: of its first finding, or of the first wrong tensor."""
    errors = [f for f in report.findings if f.severity == "error"]
    if errors:
        found: Source | None = errors[0].source
        return found
    return None if report.place is None else report.place.line


def located(report: Any) -> Line | None:
    source = named(report)
    return None if source is None else (Path(source.file).name, source.line)


def called(report: Any) -> list[Line]:
    """The lines that led to the blamed one, as the report lists them."""
    source = named(report)
    return [] if source is None else [(Path(c.file).name, c.line) for c in source.callers]


def unequal(case: Case) -> Case:
    """Labels may be ignored: ranks have unequal numbers of tokens."""
    return replace(case, ignore=True)


RANK = "torch.distributed.get_rank()"
BACKWARD = ("llama.py", "trained", "loss.backward()")
CLIP = ("llama.py", "trained", "clip_grad_norm_(model.parameters(), 1.0)")
STEP = ("llama.py", "trained", "optimizer.step()")
LOSS = ("llama.py", "loss_of", "F.cross_entropy(")
LR = ("llama.py", "optimizer_of", "lr=1e-3")

BUGS: tuple[Bug, ...] = (
    # -- DDP
    Bug(
        "ddp",
        "not wrapped",
        ("data.py", "plain", "trained(model, DistributedDataParallel(model))"),
        "trained(model)",
        (BACKWARD, CLIP, STEP),
    ),
    Bug("ddp", "lr of one rank", LR, f"lr=1e-3 * (1 + {RANK})", (STEP,)),
    Bug("ddp", "means of unequal counts", LOSS, "F.cross_entropy(", (), unequal),
    Bug("ddp", "clipped to another norm", CLIP, f"clip_grad_norm_(model.parameters(), 1.0 + {RANK})"),
    Bug("ddp accumulation", "divided by ranks too", ("data.py", "accumulated", "loss / parts"), "loss / (parts * world)"),
    Bug(
        "ddp accumulation", "first part twice", ("data.py", "accumulated", "wrapped(tokens[i], labels[i])"), "wrapped(tokens[0], labels[0])"
    ),
    Bug(
        "dp by hand",
        "one parameter left out",
        ("data.py", "by_hand", "model.parameters():"),
        "list(model.parameters())[1:]:",
        (("data.py", "by_hand", "optimizer.step()"),),
    ),
    Bug("dp by hand", "max for mean", ("data.py", "by_hand", "ReduceOp.AVG"), "ReduceOp.MAX", (("data.py", "by_hand", "dist.all_reduce"),)),
    Bug(
        "dp by hand",
        "reduced twice",
        ("data.py", "by_hand", "works = []"),
        "works = [dist.all_reduce(model.head.weight.grad, async_op=False)]; works = []",
    ),
    Bug(
        "zero redundancy",
        "not wrapped",
        ("data.py", "zero", "wrapped(batch"),
        "model(batch",
        (("data.py", "zero", "loss.backward()"), ("data.py", "zero", "clip_grad_norm_")),
    ),
    Bug(
        "zero redundancy",
        "decay of one rank",
        ("data.py", "zero", "weight_decay=0.1"),
        f"weight_decay=0.1 * {RANK}",
        (("data.py", "zero", "optimizer.step()"),),
    ),
    # -- tensor parallelism by hand
    Bug(
        "tp by hand",
        "no copy",
        ("handwritten.py", "Attention", "Copy.apply(x, None)"),
        "x",
        (("handwritten.py", "Attention", "q, k, v ="),),
    ),
    Bug(
        "tp by hand",
        "not reduced",
        ("handwritten.py", "Reduce", "dist.all_reduce(x)"),
        "pass",
        (
            ("handwritten.py", "Reduce", "return x"),
            ("handwritten.py", "MLP", "return Reduce.apply(y, None)"),
            ("handwritten.py", "Attention", "y = self.wo("),  # what is not reduced, first
        ),
    ),
    Bug(
        "tp by hand",
        "whole norm reduced too",
        ("handwritten.py", "clip", "dist.all_reduce(squares)"),
        "dist.all_reduce(squares.add_(torch.stack([g.pow(2).sum() for g in whole]).sum()))",
    ),
    Bug(
        "tp by hand",
        "stale gradients",
        ("handwritten.py", "distributed", "loss.backward()"),
        "loss.backward(retain_graph=True); loss.backward()",
    ),
    # -- a grid of groups
    Bug("grid by hand", "wrong group of the gradients", ("grid.py", "reduced", 'group=GROUPS["dp"]'), 'group=GROUPS["tp"]'),
    Bug("grid by hand", "wrong group of the layer", ("grid.py", "added", 'group=GROUPS["tp"]'), 'group=GROUPS["dp"]'),
    Bug(
        "grid by hand",
        "norm gradients not reduced",
        ("grid.py", "distributed", '"norm." in n or '),
        "",
        (("grid.py", "distributed", "dist.all_reduce(p.grad"), ("grid.py", "distributed", "shards =")),
    ),
    Bug(
        "grid by hand",
        "bias before the reduce",
        ("grid.py", "Block", "self.down(F.gelu(self.up(y)))"),
        "self.down(F.gelu(self.up(y))) + self.bias; self.bias.requires_grad",
        (("grid.py", "Block", "y = y + self.bias"),),
    ),
    Bug("grid by hand", "not divided by micro-batches", ("grid.py", "distributed", "(loss / PARTS).backward()"), "loss.backward()"),
    Bug("grid by hand", "optimizer on another shard", ("grid.py", "updated", "dist.get_rank() // TP"), "dist.get_rank() % TP"),
    Bug(
        "grid by hand",
        "clip norm local",
        ("grid.py", "clipped", 'dist.all_reduce(total, group=GROUPS["dp"])'),
        "pass",
        (("grid.py", "clipped", "return"), ("grid.py", "clipped", "total =")),
    ),
    Bug(
        "grid by hand",
        "not averaged",
        ("grid.py", "reduced", "shard / DP"),
        "shard",
        (("grid.py", "reduced", "dist.reduce_scatter_tensor"),),
    ),
    Bug("grid by hand", "wrong shard dim", ("grid.py", "added", "x.chunk(TP, 1)"), "x.flatten(0, 1).chunk(TP, 0)"),
    Bug(
        "grid by hand",
        "reduced in every micro-batch",
        ("grid.py", "distributed", "losses.append(loss.detach())"),
        'losses.append(loss.detach()); [dist.all_reduce(p.grad, group=GROUPS["tp"]) for p in partial]',
    ),
    Bug("grid by hand", "no sum in backward", ("grid.py", "Gather", "return added(grad)"), "return own_part(grad)"),
    Bug("grid by hand", "stale buffer", ("grid.py", "Model", "* self.scale"), f"* self.scale.add_({RANK})"),
    # -- DTensor and FSDP2
    Bug("dtensor tp", "loss divided by ranks", ("dtensor.py", "tensor_parallel", "loss = model(batch"), "loss = 1 / world * model(batch"),
    Bug(
        "dtensor tp",
        "gradients reduced again",
        ("dtensor.py", "tensor_parallel", "optimizer.step()"),
        "[torch.distributed.all_reduce(p.grad) for p in (model.norm.weight,)]; optimizer.step()",
    ),
    Bug(
        "dtensor vocabulary",
        "lr of one rank",
        ("dtensor.py", "tensor_parallel", "lr=1e-3"),
        f"lr=1e-3 * (1 + {RANK})",
        (("dtensor.py", "tensor_parallel", "optimizer.step()"),),
    ),
    Bug("dtensor vocabulary", "loss scaled", ("dtensor.py", "tensor_parallel", "loss = model(batch"), "loss = world * model(batch"),
    Bug(
        "dtensor tp sp",
        "norm gradients reduced too",
        BACKWARD,
        "loss.backward(); torch.distributed.all_reduce(model.norm.weight.grad._local_tensor)",
    ),
    Bug("dtensor tp sp", "gradient of one rank", CLIP, f"clip_grad_norm_(model.parameters(), 1.0 + {RANK})"),
    Bug("fsdp", "means of unequal counts", LOSS, "F.cross_entropy(", (), unequal),
    Bug("fsdp", "stepped on one rank", STEP, f"{RANK} == 0 and optimizer.step()"),
    Bug("fsdp 4", "loss divided by ranks", BACKWARD, "(loss / 4).backward()"),
    Bug(
        "fsdp 4",
        "sum for mean",
        ("dtensor.py", "both", 'bug == "sum for mean"'),
        "True",
        (("dtensor.py", "both", "set_gradient_divide_factor"),),
    ),
    Bug("fsdp bf16", "loss scaled", BACKWARD, "(loss * 1024).backward()"),
    Bug("fsdp bf16", "lr of one rank", LR, f"lr=1e-3 * (1 + {RANK})", (STEP,)),
    Bug(
        "fsdp checkpoint",
        "detached",
        ("dtensor.py", "recomputed", "checkpoint(forward, *args"),
        "checkpoint(forward, args[0].detach()",
        (("llama.py", "Llama", "self.embedding(tokens)"),),
    ),
    Bug(
        "fsdp checkpoint",
        "run twice",
        ("dtensor.py", "recomputed", "checkpoint(forward, *args, use_reentrant=False)"),
        "checkpoint(forward, checkpoint(forward, *args, use_reentrant=False), use_reentrant=False)",
    ),
    Bug("fsdp tp sp", "divided by all ranks", BACKWARD, "(loss / 2).backward()"),
    Bug("fsdp tp sp", "means of unequal counts", LOSS, "F.cross_entropy(", (), unequal),
    Bug(
        "hsdp",
        "replicas not reduced",
        ("dtensor.py", "hybrid", 'mesh_dim_names=("replicas", "dp"))'),
        'mesh_dim_names=("replicas", "dp"))["dp"]',
        (BACKWARD, CLIP, STEP),
    ),
    Bug("hsdp", "loss divided by shards", BACKWARD, "(loss / 2).backward()"),
    Bug("gpt ddp", "positions backwards", ("gpt.py", "GPT", "torch.arange(tokens.shape[1])"), "torch.arange(tokens.shape[1] - 1, -1, -1)"),
    Bug("gpt ddp", "not causal", ("gpt.py", "Block", "is_causal=True"), "is_causal=False"),
    # -- pipelines
    Bug("pipeline by hand", "not divided", ("pipeline.py", "by_hand", "(loss / parts).backward()"), "loss.backward()"),
    Bug(
        "pipeline by hand",
        "gradients in another order",
        ("pipeline.py", "by_hand", "for y in kept:"),
        "for y in kept[:: 1 if rank else -1]:",
        (("pipeline.py", "by_hand", "dist.recv(grad, 1)"), ("pipeline.py", "by_hand", "y.backward(grad)")),
    ),
    Bug("pipeline by hand", "wrong peer", ("pipeline.py", "by_hand", "dist.recv(grad, 1)"), "dist.recv(grad, 0)"),
    Bug(
        "pipeline 1f1b",
        "lr of one stage",
        ("pipeline.py", "optimizer_of", "lr=0.1"),
        f"lr=0.1 * (1 + {RANK})",
        (("pipeline.py", "scheduled", "optimizer.step()"),),
    ),
    Bug("pipeline 1f1b", "sum of losses", ("pipeline.py", "scheduled", "torch.stack(losses).mean()"), "torch.stack(losses).sum()"),
    # -- Ulysses
    Bug(
        "ulysses",
        "mean of gradients",
        ("context.py", "ulysses", "dist.all_reduce(p.grad)"),
        "dist.all_reduce(p.grad, op=dist.ReduceOp.AVG)",
    ),
    Bug("ulysses", "pieces in another order", ("context.py", "Exchange", "torch.stack(pieces)"), "torch.stack(pieces[::-1])"),
    Bug("ulysses", "queries not rotated", ("context.py", "attention", "rotate(q, start)"), "q"),
)

__all__ = ["BUGS", "Bug", "located", "named"]
