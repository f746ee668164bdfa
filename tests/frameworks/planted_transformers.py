"""Mistakes in copies of Transformers' and accelerate's own files, and the options under which they count."""

from __future__ import annotations

from typing import Final

from frameworks.planted import Edit

TENSOR: Final = ("--tp_size", "2")
SHARED: Final = ("--fsdp_size", "2")
BOTH: Final = ("--fsdp_size", "2", "--tp_size", "2")
ACCELERATED: Final = ("--fsdp", "--world-size", "2")
REPLICAS: Final = ("--world-size", "2", "--ddp_broadcast_buffers", "False")

TRANSFORMERS: Final = (
    Edit(
        "outputs of row-wise layers are not added up over tp",
        "distributed/tensor_parallel.py",
        "            if output.placements != (self.output_layouts,):\n"
        "                output = output.redistribute(placements=[self.output_layouts])\n"
        "            if self.should_use_local_tensors(module) and (bias",
        "            if self.should_use_local_tensors(module) and (bias",
        TENSOR,
        near=3,  # where the summands leave DTensor
    ),
    Edit(
        "losses are scaled by the number of all ranks",
        "trainer.py",
        "loss_scale = self.accelerator.num_processes // self.get_tp_size()",
        "loss_scale = self.accelerator.num_processes",
        TENSOR,
        near=1,  # the product with it
    ),
    Edit(
        "tokens of one rank are counted",
        "trainer.py",
        "num_items_in_batch = self.accelerator.gather(num_items_in_batch.to(device)).sum()",
        "num_items_in_batch = num_items_in_batch.to(device)",
        SHARED,
        near=15,  # the next line that computes with the count
    ),
    Edit(
        "norms of norms are added up",
        "trainer.py",
        "total_norm = torch.linalg.vector_norm(torch.stack(norms))",
        "total_norm = torch.stack(norms).sum()",
        TENSOR,
    ),
)
ACCELERATE: Final = (
    Edit(
        "gradients are clipped to a part of the norm",
        "accelerator.py",
        "return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type=norm_type)",
        "return torch.nn.utils.clip_grad_norm_(parameters, max_norm / self.num_processes, norm_type=norm_type)",
        ACCELERATED,
    ),
)
