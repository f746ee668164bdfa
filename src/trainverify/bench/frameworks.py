"""`trainverify bench frameworks`: every parallelism of a framework that is captured, with its verdict and what it costs."""

from __future__ import annotations

import importlib.util
import itertools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from rich.table import Table

from trainverify.frameworks import deepspeed, megatron, torchtitan, transformers
from trainverify.frameworks.job import Job, captured, judged
from trainverify.frameworks.trust import checked
from trainverify.ops import OPS
from trainverify.translate.targets import CaptureError

_P: Final = "--parallelism"
_DEBUG: Final = ("--config", "llama3_debugmodel")
_QWEN: Final = ("--config", "qwen3_debugmodel")
_1F1B: Final = (f"{_P}.pipeline_parallel_degree", "2", f"{_P}.pipeline_parallel_schedule", "1F1B", "--training.disable_cuda_graphs")
_SIZES: Final = {"num-layers": 2, "hidden-size": 24, "num-attention-heads": 4, "ffn-hidden-size": 40, "vocab-size": 28, "seq-length": 10}
_GPT: Final = tuple(x for n, v in {**_SIZES, "micro-batch-size": 3}.items() for x in (f"--{n}", str(v)))  # no two sizes are equal
_TP: Final = ("--tensor-model-parallel-size", "2")
_SP: Final = (*_TP, "--sequence-parallel")
_PP: Final = ("--pipeline-model-parallel-size", "2")
_SHARDED: Final = "--use-distributed-optimizer"
_LLAMA: Final = (
    "--config_overrides",
    "vocab_size=96,hidden_size=64,intermediate_size=80,num_hidden_layers=2,num_attention_heads=8,num_key_value_heads=4,head_dim=8",
    "--per_device_train_batch_size",
    "1",
    "--gradient_accumulation_steps",
    "2",
)


def _zero(stage: int, **more: int) -> tuple[str, ...]:
    zero = {"stage": stage, "reduce_bucket_size": 10000, **more}
    config = {"gradient_accumulation_steps": 2, "gradient_clipping": 0.5, "zero_optimization": zero}
    return "--deepspeed_config", json.dumps(config)


_PACKAGES: Final = {"torchtitan": "torchtitan", "Megatron-core": "megatron", "Transformers": "transformers", "DeepSpeed": "deepspeed"}
_JOBS: Final = {"torchtitan": torchtitan.job, "Megatron-core": megatron.job, "Transformers": transformers.job, "DeepSpeed": deepspeed.job}


@dataclass(frozen=True)
class Case:
    framework: str
    text: str
    options: tuple[str, ...]
    world: int
    long: bool = False


CASES: Final = (
    Case("torchtitan", "FSDP2 2", _DEBUG, 2),
    Case("torchtitan", "TP 2 + SP", (*_DEBUG, f"{_P}.tensor_parallel_degree", "2"), 2),
    Case("torchtitan", "FSDP2 2 × TP 2 + SP", (*_DEBUG, f"{_P}.tensor_parallel_degree", "2"), 4),
    Case("torchtitan", "HSDP 2 × 2", (*_DEBUG, f"{_P}.data_parallel_replicate_degree", "2"), 4),
    Case("torchtitan", "PP 2, 1F1B", (*_DEBUG, *_1F1B), 2),
    Case("torchtitan", "CP 2", (*_DEBUG, f"{_P}.context_parallel_degree", "2", f"{_P}.context_parallel_load_balancer", "None"), 2),
    Case("torchtitan", "Qwen 3, FSDP2 2", _QWEN, 2),
    Case("torchtitan", "Qwen 3, FSDP2 2 × TP 2 + SP", (*_QWEN, f"{_P}.tensor_parallel_degree", "2"), 4),
    Case("torchtitan", "Llama-3-8B, FSDP2 8 × TP 8 + SP", ("--config", "llama3_8b", f"{_P}.tensor_parallel_degree", "8"), 64, True),
    Case("Megatron-core", "TP 2", (*_GPT, *_TP), 2),
    Case("Megatron-core", "TP 2 + SP", (*_GPT, *_SP), 2),
    Case("Megatron-core", "DP 2", _GPT, 2),
    Case("Megatron-core", "DP 2, per-token loss", (*_GPT, "--calculate-per-token-loss"), 2),
    Case("Megatron-core", "DP 2, distributed optimizer", (*_GPT, _SHARDED), 2),
    Case("Megatron-core", "DP 2 × TP 2 + SP, distributed optimizer", (*_GPT, *_SP, _SHARDED), 4),
    Case("Megatron-core", "PP 2, 1F1B", (*_GPT, *_PP), 2),
    Case("Megatron-core", "PP 2, interleaved", (*_GPT, *_PP, "--num-layers", "4", "--num-layers-per-virtual-pipeline-stage", "1"), 2),
    Case("Megatron-core", "PP 2 × TP 2 + SP", (*_GPT, *_PP, *_SP), 4),
    Case("Transformers", "TP 2", (*_LLAMA, "--tp_size", "2"), 2),
    Case("Transformers", "FSDP2 2", (*_LLAMA, "--fsdp_size", "2"), 2),
    Case("Transformers", "FSDP2 2 × TP 2", (*_LLAMA, "--fsdp_size", "2", "--tp_size", "2"), 4),
    Case("Transformers", "FSDP2 2, by accelerate", (*_LLAMA, "--fsdp"), 2),
    Case("Transformers", "DDP 2, by accelerate", (*_LLAMA, "--ddp_broadcast_buffers", "False"), 2),
    Case("DeepSpeed", "ZeRO 1", _zero(1), 2),
    Case("DeepSpeed", "ZeRO 1, 4 ranks", _zero(1), 4),
    Case("DeepSpeed", "ZeRO 2", _zero(2), 2),
    Case("DeepSpeed", "ZeRO 3", _zero(3), 2),
    Case("DeepSpeed", "ZeRO 3, parameters gathered for every use", _zero(3, stage3_param_persistence_threshold=0), 2),
)


@dataclass(frozen=True)
class Row:
    """One case: its verdict, and what it took. Seconds are those of the clock."""

    framework: str
    parallelism: str
    verdict: str
    reason: str
    ops: int  # of the longest rank
    captured: int
    ranks: int
    capture_seconds: float
    proof_seconds: float
    shims: int
    checked: int = 0  # of the shims, by a real run without them
    real_run: str = ""  # what it shows
    check_seconds: float = 0.0


def measured(case: Case, job: Job, tell: Callable[[str], None]) -> Row:
    """The verdict with shims as they are, and next to it a real run without them."""
    times = [time.perf_counter()]
    subject = captured(job, OPS, tell)
    times.append(time.perf_counter())
    report = judged(job, subject, OPS, tell)
    times.append(time.perf_counter())
    real = checked(job, OPS, tell)
    times.append(time.perf_counter())
    capture, proof, check = (round(b - a, 1) for a, b in itertools.pairwise(times))
    ops = max(len(c.program.ops) for c in subject.ranks)
    seen = sum(not s.stays for s in job.shims) if real.agrees else 0
    counts = len(subject.ranks), job.mesh.size
    return Row(
        job.framework, case.text, report.verdict, report.reason, ops, *counts, capture, proof, len(job.shims), seen, real.text, check
    )


def bench(long: bool, tell: Callable[[str], None]) -> Iterator[Row]:
    """Cases of frameworks that are installed; if none is, all are refused, with what to install."""
    installed = {f for f, package in _PACKAGES.items() if importlib.util.find_spec(package) is not None} or set(_PACKAGES)
    for case in CASES:
        if case.framework not in installed or (case.long and not long):
            continue
        tell(f"{case.framework}, {case.text}")
        try:
            yield measured(case, _JOBS[case.framework](case.options, case.world), tell)
        except CaptureError as error:
            yield Row(case.framework, case.text, "UNKNOWN", str(error), 0, 0, case.world, 0.0, 0.0, 0)


def table(rows: Sequence[Row]) -> Table:
    columns = "framework", "parallelism", "verdict", "ops a rank", "ranks captured", "capture s", "proof s", "shims", "checked", "check s"
    made = Table(*columns, box=None)
    for r in rows:
        counts = str(r.ops), f"{r.captured} of {r.ranks}", f"{r.capture_seconds:g}", f"{r.proof_seconds:g}"
        made.add_row(r.framework, r.parallelism, r.verdict, *counts, str(r.shims), str(r.checked), f"{r.check_seconds:g}")
    return made
