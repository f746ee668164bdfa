"""Mistakes in copies of torchtitan's own files, and the options under which they count."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

TENSOR = ("--parallelism.tensor_parallel_degree", "2")
PIPELINE = (
    "--parallelism.pipeline_parallel_degree",
    "2",
    "--parallelism.pipeline_parallel_schedule",
    "1F1B",
    "--training.disable_cuda_graphs",
)
HYBRID = ("--parallelism.data_parallel_replicate_degree", "2", "--parallelism.data_parallel_shard_degree", "2")
DATA = ("--world-size", "2")


@dataclass(frozen=True)
class Edit:
    """`old` becomes `new` where it is last in a file of the framework's.

    The report names one of these lines, or one that is at most `near` lines below; else, in `elsewhere`, a file and what its line says."""

    name: str
    path: str
    old: str
    new: str
    options: tuple[str, ...]
    near: int = 0
    elsewhere: tuple[str, str] | None = None


LOCAL_NORM: Final = """
    def forward(self, x):
        from torch.distributed.tensor import DTensor

        if not isinstance(x, DTensor):
            return super().forward(x)
        weight = self.weight.to_local() if isinstance(self.weight, DTensor) else self.weight
        made = nn.functional.rms_norm(x.to_local(), self.normalized_shape, weight, self.eps)
        return DTensor.from_local(made, x.device_mesh, x.placements)
"""

EDITS: Final = (
    Edit(
        "norm gradients are not all-reduced over tp",
        "models/common/nn_modules.py",
        "class RMSNorm(nn.RMSNorm, Module):\n",
        "class RMSNorm(nn.RMSNorm, Module):\n" + LOCAL_NORM,
        TENSOR,
    ),
    Edit(
        "tokens are counted over a part of the data-parallel ranks",
        "trainer.py",
        'batch_mesh = parallel_dims.get_mesh("batch")',
        'batch_mesh = parallel_dims.get_mesh("fsdp")',
        HYBRID,
        near=4,  # the sum over this mesh
    ),
    Edit(
        "FSDP divides gradients",
        "distributed/fsdp.py",
        "module.set_gradient_divide_factor(1.0)",
        "module.set_gradient_divide_factor(2.0)",
        DATA,
    ),
    Edit(
        "ranks look up ids of each other's rows",
        "models/common/embedding.py",
        "offset = dist.get_rank(tp_pg) * chunk_size",
        "offset = (dist.get_rank(tp_pg) + 1) % tp_size * chunk_size",
        TENSOR,
        near=12,  # the rows that are looked up
    ),
    Edit(
        "labels of micro-batches in the wrong order",
        "trainer.py",
        "target_mbs.append(labels)",
        "target_mbs.insert(0, labels)",
        PIPELINE,
        near=6,  # the step of the schedule with them
    ),
)
