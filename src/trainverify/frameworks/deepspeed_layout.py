"""Where ZeRO keeps parameters on a rank: flat partitions, read from its optimizer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from typing import Any

import torch

from trainverify.torch.discover import Copy
from trainverify.translate.names import clean
from trainverify.translate.targets import CaptureError

Range = tuple[str, int, int, int]  # parameter, where it begins in the flat memory, where that is in the parameter, count


def copies(engine: Any) -> list[Copy]:
    """All memory that holds parameters from step to step, besides the module's."""
    names = {id(p): clean(n) for n, p in engine.module.named_parameters()}
    zero = engine.optimizer
    if hasattr(zero, "single_partition_of_fp32_groups"):
        return list(_early(zero, names))
    return list(_late(zero, names))


def _early(zero: Any, names: Mapping[int, str]) -> Iterator[Copy]:
    """Stages 1 and 2: a rank's partition of all parameters of a group, end to end, is copied."""
    import torch.distributed as dist

    for i, flat in enumerate(zero.single_partition_of_fp32_groups):
        size = int(zero.partition_size[i])
        first = dist.get_rank(zero.real_dp_process_group[i]) * size
        ranges: list[Range] = []
        for p, offset in zip(zero.round_robin_bit16_groups[i], zero.round_robin_bit16_offsets[i], strict=True):
            start, stop = max(offset, first), min(offset + p.numel(), first + size)
            if start < stop:
                ranges.append((names[id(p)], start - first, start - offset, stop - start))
        last = names[id(zero.round_robin_bit16_groups[i][-1])]
        yield from _ranges(flat, ranges, last)


def _ranges(flat: torch.Tensor, ranges: Sequence[Range], last: str) -> Iterator[Copy]:
    """Flat memory cut at its parameters; a gap is padding of the one before it, or of the first. Without any, all of it is padding."""
    if not ranges:
        yield Copy(f"{last}.master", last, flat.detach(), (), flat, 0)
    for i, (name, at, start, count) in enumerate(ranges):
        begin = at if i else 0
        end = ranges[i + 1][1] if i + 1 < len(ranges) else flat.numel()
        yield Copy(f"{name}.master", name, flat.detach()[begin:end], ((at - begin, start, count),), flat, begin)


def _late(zero: Any, names: Mapping[int, str]) -> Iterator[Copy]:
    """Stage 3: every parameter is cut by itself, and its part of a rank is copied into flat memory too."""
    import torch.distributed as dist

    for flat, group in zip(zero.fp32_partitioned_groups_flat, zero.fp16_groups, strict=True):
        at = 0
        for p in group:
            name, size = names[id(p)], int(p.partition_numel())
            if p.ds_numel % size:
                ranks = dist.get_world_size(p.ds_process_group)
                raise CaptureError(f"stage 3 pads {name} ({p.ds_numel} elements, {ranks} ranks) with memory as it is: that is not captured")
            parts = ((0, dist.get_rank(p.ds_process_group) * size, size),)
            yield Copy(f"{name}.master", name, flat.detach()[at : at + size], parts, flat, at)
            if _memory(p.ds_tensor) != _memory(flat):
                yield Copy(f"{name}.shard", name, p.ds_tensor.detach().view(-1), parts)
            at += size
        if at != flat.numel():
            raise CaptureError(f"ZeRO's flat memory holds {flat.numel()} elements, and its parameters are {at}")


def same_memory(before: Sequence[Copy], after: Sequence[Copy]) -> bool:
    """Whether the next step begins with the memory that this one began with."""
    return [_place(c) for c in before] == [_place(c) for c in after]


def _place(c: Copy) -> tuple[object, ...]:
    return c.name, c.parts, _memory(c.tensor), c.tensor.storage_offset(), c.tensor.numel(), c.start


def misplaced(found: Sequence[Copy], values: Mapping[str, torch.Tensor]) -> str | None:
    """The first copy that does not hold the part of its parameter that it is said to hold."""
    for c in found:
        whole = values[c.of].reshape(-1)
        if any(not torch.equal(c.tensor[at : at + n], whole[start : start + n]) for at, start, n in c.parts):
            return c.name
    return None


def optimizer(engine: Any) -> Any:
    """PyTorch's optimizer inside ZeRO's, with all flat memory that it updates: stage 3 hands it over only while it steps."""
    zero = engine.optimizer
    if hasattr(zero, "single_partition_of_fp32_groups"):
        return zero.optimizer
    shown = copy(zero.optimizer)
    flats: dict[int, list[torch.Tensor]] = {}
    for i, flat in enumerate(zero.fp32_partitioned_groups_flat):
        flats.setdefault(zero.sub_group_to_group_id[i], []).append(flat)
    shown.param_groups = [{**g, "params": flats.get(i, [])} for i, g in enumerate(zero.optimizer.param_groups)]
    return shown


def _memory(t: torch.Tensor) -> int:
    return int(t.untyped_storage()._cdata)
