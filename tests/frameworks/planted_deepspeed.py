"""Mistakes in copies of DeepSpeed's own files, and the options under which they count."""

from __future__ import annotations

import json
from typing import Final

from frameworks.planted import Edit


def zero(stage: int, world: int = 2, **more: object) -> tuple[str, ...]:
    """Options of a job in two micro-batches."""
    config = {"gradient_accumulation_steps": 2, "gradient_clipping": 0.5}
    config |= {"zero_optimization": {"stage": stage, "reduce_bucket_size": 10000, **more}}
    return "--deepspeed_config", json.dumps(config), "--world-size", str(world)


EARLY: Final = "runtime/zero/stage_1_and_2.py"
UPDATED: Final = """                self._optimizer_step(i)
                # Step 4:- get rid of the fp32 gradients. Not needed anymore
                self.single_partition_of_fp32_groups[i].grad = None
                del single_grad_partition
"""
COPIED: Final = """                bit16_partitions = self.parallel_partitioned_bit16_groups[i]
                fp32_partition = self.single_partition_of_fp32_groups[i]
                bit16_partitions[partition_id].data.copy_(fp32_partition.data)
"""

EDITS: Final = (
    Edit(
        "the norm is one rank's",
        EARLY,
        "            dist.all_reduce(total_norm, op=dist.ReduceOp.SUM, group=self.dp_process_group)\n",
        "            pass  # the norm of this rank\n",
        zero(1),
        elsewhere=(EARLY, "combine_grad_norm_groups(norm_groups"),  # where that norm is used next
    ),
    Edit(
        "gradients are added up over half of the ranks",
        EARLY,
        "dist.all_reduce(tensor_to_allreduce, group=process_group)",
        "dist.all_reduce(tensor_to_allreduce, group=[dist.new_group([0, 1]), dist.new_group([2, 3])][dist.get_rank() // 2])",
        zero(2, 4),
    ),
    Edit(
        "gradients are divided by the number of ranks twice",
        "runtime/comm/coalesced_collectives.py",
        "tensor_partition_flat_buffer.div_(world_sz)",
        "tensor_partition_flat_buffer.div_(world_sz * world_sz)",
        zero(3),
        elsewhere=("runtime/engine.py", "loss = loss / self.gradient_accumulation_steps()"),  # a factor that could go as well
    ),
    Edit(
        "ranks get each other's part of gradients",
        "runtime/comm/coalesced_collectives.py",
        "flattened_tensor[rank * chunk_sz:rank * chunk_sz + chunk_sz] for rank in range(0, world_sz)",
        "flattened_tensor[rank * chunk_sz:rank * chunk_sz + chunk_sz] for rank in reversed(range(0, world_sz))",
        zero(3),
        elsewhere=("runtime/zero/stage3.py", ".grad.mul_(1. / combined_scale)"),  # the first use of the whole part
    ),
    Edit(
        "parameters are copied before they are updated",
        EARLY,
        UPDATED + COPIED,
        COPIED + UPDATED,
        zero(1),
        elsewhere=(EARLY, "param.data = self.round_robin_bit16_groups"),  # the parameters that are old
    ),
    Edit(
        "the copy that the next step starts from is scaled",
        EARLY,
        COPIED,
        COPIED + "                fp32_partition.data.mul_(0.5)\n",
        zero(2),
    ),
    Edit(
        "the last micro-batch alone counts",
        "runtime/zero/stage3.py",
        "if self.micro_step_id == 0:  # don't accumulate",
        "if True:",
        zero(3),
        elsewhere=("runtime/zero/linear.py", "grad_weight = grad_output.reshape"),  # the summand that no line adds up
    ),
)
