"""Mistakes in copies of Megatron-core's own files, and the options under which they count."""

from __future__ import annotations

from typing import Final

from frameworks.planted import Edit

TENSOR: Final = ("--tensor-model-parallel-size", "2")
SEQUENCE: Final = (*TENSOR, "--sequence-parallel")
DATA: Final = ("--world-size", "2")
SHARDED: Final = (*SEQUENCE, "--world-size", "4", "--use-distributed-optimizer")
PIPELINE: Final = ("--num-layers", "2", "--pipeline-model-parallel-size", "2")
GATED: Final = (
    *SEQUENCE,
    "--swiglu",
    "--normalization",
    "RMSNorm",
    "--disable-bias-linear",
    "--hidden-size",
    "24",
    "--vocab-size",
    "40",
    "--seq-length",
    "6",
)

EDITS: Final = (
    Edit(
        "a rank takes its part of gate and input in the wrong order",
        "fusions/fused_bias_swiglu.py",
        "    return F.silu(y_1) * y_2",
        "    from megatron.core.parallel_state import get_tensor_model_parallel_rank as rank\n\n"
        "    return F.silu(y_2) * y_1 if rank() else F.silu(y_1) * y_2",
        GATED,
        near=2,
    ),
    Edit(
        "norm gradients are not all-reduced over tp",
        "distributed/finalize_model_grads.py",
        'elif (config.sequence_parallel and getattr(param, "sequence_parallel", False)) or (',
        'elif (config.sequence_parallel and getattr(param, "sequence", False)) or (',
        SEQUENCE,
        elsewhere=("distributed/distributed_data_parallel.py", "param.main_grad.add_(param.grad.data)"),  # the summand that no line adds up
    ),
    Edit(
        "the denominator of the cross entropy is summed over data-parallel ranks",
        "tensor_parallel/cross_entropy.py",
        "group=get_tensor_model_parallel_group(),",
        'group=__import__("megatron.core.parallel_state").core.parallel_state.get_data_parallel_group(),',
        (*TENSOR, "--world-size", "4"),
    ),
    Edit(
        "gradients are divided by the square of the number of ranks",
        "distributed/param_and_grad_buffer.py",
        "bucket.grad_data *= bucket.gradient_scaling_factor",
        "bucket.grad_data *= bucket.gradient_scaling_factor**2",
        DATA,
    ),
    Edit(
        "ranks take each other's part of the sequence",
        "tensor_parallel/mappings.py",
        "dim_offset = rank * local_dim_size",
        "dim_offset = (rank + 1) % world_size * local_dim_size",
        SEQUENCE,
        near=2,  # the slice from there
    ),
    Edit(
        "the first backward pass is that of the last micro-batch",
        "pipeline_parallel/schedules.py",
        "input_tensor = input_tensors.pop(0)\n            output_tensor = output_tensors.pop(0)\n\n            # Enable grad sync for",
        "input_tensor = input_tensors.pop()\n            output_tensor = output_tensors.pop()\n\n            # Enable grad sync for",
        PIPELINE,
        near=10,  # the backward pass of what was popped
    ),
)
