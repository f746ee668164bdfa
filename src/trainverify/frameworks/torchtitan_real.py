"""torchtitan's training step for real at a tiny size: its files as they are installed, its data loader, ranks that talk by gloo.

What stands in for an accelerator is here, and is all that is replaced: PyTorch names the processor as the device and answers what
torchtitan asks an accelerator; FlexAttention runs uncompiled, as PyTorch's own formula; gloo multiplies before it adds, as NCCL does.
"""

from __future__ import annotations

import inspect
import json
import math
import os
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from trainverify.frameworks.job import Job, Trial, in_process
from trainverify.frameworks.torchtitan_shims import ALL_SHIMS, PIPELINE, part
from trainverify.frameworks.torchtitan_step import Alone, Ranks, Step, alone, built, facts, ranked
from trainverify.frameworks.torchtitan_tiny import LENGTH, Tiny
from trainverify.graph.mesh import Mesh

WORDS: Final = 1999  # a prime, below the vocabulary of every debug model
DOCUMENTS: Final = 16
GIGABYTES: Final = 8 << 30


def trial(options: tuple[str, ...], tiny: Tiny, folder: Path) -> Trial:
    """The same parallelism at a tiny size: captured with shims, and run without them."""
    f = in_process(lambda: facts(options, tiny.world, tiny), "torchtitan")
    shims = tuple(s for s in ALL_SHIMS if s.name in f.shims)
    small = Job("torchtitan", Mesh(f.mesh), f.batch, f.loss, Alone(options, f.rows, tiny), Ranks(options, tiny), shims)
    data(folder)
    return Trial(small, RealAlone(options, f.rows, tiny), RealRanks(options, tiny, folder, free_port()), "its debug model", True, True)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return int(s.getsockname()[1])


def data(folder: Path) -> None:
    """Files for torchtitan's tokenizer and data loader: documents of many rows, so that a row is a part of one document."""
    words = {f"w{i}": i for i in range(WORDS)}
    special = {"<|begin_of_text|>": WORDS, "<|end_of_text|>": WORDS + 1, "<unk>": WORDS + 2}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "Whitespace"},
        "model": {"type": "WordLevel", "vocab": {**words, **special}, "unk_token": "<unk>"},
    }
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer" / "tokenizer.json").write_text(json.dumps(tokenizer), "utf-8")
    marks = {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"}
    (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(marks), "utf-8")
    (folder / "documents").mkdir()
    texts = [" ".join(f"w{(i * i * 31 + i + k * 797) % WORDS}" for i in range(32 * LENGTH)) for k in range(DOCUMENTS)]
    lines = "\n".join(json.dumps({"text": t}) for t in texts)
    (folder / "documents" / "documents.json").write_text(lines, "utf-8")


# -- what stands in for an accelerator --------------------------------------------------------------------------------------


class _Properties:
    total_memory = GIGABYTES


def _answers() -> None:
    import torch

    answers = {
        "get_device_name": lambda device=None: "cpu",
        "get_device_properties": lambda device=None: _Properties(),
        "current_device": lambda: 0,
        "memory_stats": lambda device=None: {},
        "reset_peak_memory_stats": lambda device=None: None,
        "empty_cache": lambda: None,
    }
    for name, answer in answers.items():
        setattr(torch.cpu, name, answer)


def _uncompiled() -> None:
    """FlexAttention by PyTorch's formula for it, with the mask that torchtitan makes."""
    from torch.nn.attention.flex_attention import create_block_mask

    from trainverify.torch.private import context_parallel, flex_attention

    math_attention, contexts = flex_attention(), context_parallel()

    def attend(q: Any, k: Any, v: Any, *, score_mod: Any, block_mask: Any, scale: Any, kernel_options: Any, **kwargs: Any) -> Any:
        score = score_mod or (lambda s, b, h, i, j: s)
        factor = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
        return math_attention(q, k, v, score, block_mask.as_tuple(), factor, kernel_options)[0], None

    attention = part("models.common.attention")
    attention.FlexAttention._compiled_flex_attn = attend
    attention._compiled_create_block_mask = contexts._compiled_create_block_mask = create_block_mask


def _premultiplied() -> None:
    """PREMUL_SUM, which gloo has not: a product before the sum."""
    import torch.distributed as dist

    def call(original: Any, name: str) -> Any:
        signature = inspect.signature(original)

        def run(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs)
            given.apply_defaults()
            op = given.arguments["op"]
            if getattr(op, "op", op) == dist.ReduceOp.PREMUL_SUM:
                given.arguments[name] = given.arguments[name] * op.factor
                given.arguments["op"] = dist.ReduceOp.SUM
            return original(*given.args, **given.kwargs)

        return run

    for function in ("reduce_scatter_single", "reduce_scatter_tensor"):
        original = getattr(dist, function)
        setattr(dist, function, call(original, list(inspect.signature(original).parameters)[1]))


def _stand_in() -> None:
    _answers()
    _uncompiled()
    _premultiplied()


# -- steps ------------------------------------------------------------------------------------------------------------------


@dataclass
class Loaded(Step):
    """A step on what torchtitan's data loader yields, which is noted."""

    seen: list[tuple[Mapping[str, Any], Any]] = field(default_factory=list)

    def micro_batches(self, batch: Mapping[str, Any]) -> Iterator[Any]:
        for inputs, labels in self.trainer.batch_generator(self.trainer.dataloader):
            self.seen.append(({n: t.clone() for n, t in inputs.items()}, labels.clone()))
            yield inputs, labels

    def warm_up(self) -> None:
        """A first step, in which stages of a pipeline ask each other for shapes; then learning rates and optimizers as before it."""
        groups = [g for o in self.found.optimizers for g in o.param_groups]
        rates = [g["lr"] for g in groups]
        run, clip = self.trainer.forward_backward_step, part("distributed.utils").clip_grad_norm_
        self({})
        self.trainer.forward_backward_step, part("distributed.utils").clip_grad_norm_ = run, clip
        self.seen.clear()
        for o in self.found.optimizers:
            o.state.clear()
        for g, rate in zip(groups, rates, strict=True):
            g["lr"] = rate

    @property
    def batch(self) -> dict[str, Any]:
        """All micro-batches, one after the other."""
        import torch

        rows = [{**inputs, "labels": labels} for inputs, labels in self.seen]
        return {n: torch.cat([r[n] for r in rows]) for n in rows[0]}


class Given(Step):
    """A step on a given batch, through torchtitan's own loop over it."""

    def micro_batches(self, batch: Mapping[str, Any]) -> Iterator[Any]:
        yield from self.trainer.batch_generator(super().micro_batches(batch))


def _with_data(config: Any, folder: Path) -> None:
    config.hf_assets_path = str(folder / "tokenizer")
    config.dataloader.dataset_path = str(folder / "documents")
    config.dump_folder = str(folder / "outputs")
    os.environ |= {"HF_DATASETS_CACHE": str(folder / "cache"), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}


@dataclass(frozen=True)
class RealRanks:
    """torchtitan as one rank of many that talk to each other."""

    options: tuple[str, ...]
    tiny: Tiny
    folder: Path
    port: int

    def __call__(self, rank: int, world: int) -> Loaded:
        os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(self.port)}
        config = ranked(self.options, rank, world, self.tiny)
        config.training.disable_cuda_graphs = True
        _with_data(config, self.folder)
        _stand_in()
        pipelined = config.parallelism.pipeline_parallel_degree > 1
        if pipelined:
            PIPELINE[0].apply(config)
        step = built(config)
        loaded = Loaded(step.trainer, step.rows, step.found)
        if pipelined:
            loaded.warm_up()
        return loaded


@dataclass(frozen=True)
class RealAlone:
    """The same without parallelism, on a given batch."""

    options: tuple[str, ...]
    rows: int
    tiny: Tiny

    def __call__(self) -> Given:
        config = alone(self.options, self.rows, self.tiny)
        os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
        config.training.disable_cuda_graphs = True
        next(s for s in ALL_SHIMS if s.name == "data").apply(config)
        _stand_in()
        step = built(config)
        return Given(step.trainer, step.rows, step.found)


__all__ = ["RealAlone", "RealRanks", "data", "trial"]
