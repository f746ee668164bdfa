"""How Megatron-core's parameters lie on ranks: names of the whole model, cuts over tensor-parallel ranks, shards of its optimizer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch import nn

from trainverify.torch.placed import Described

_GATED: Final = ".linear_fc1."  # gate and input of a gated layer, one after the other on every rank
_BY_HEAD: Final = "softmax_offset"  # cut as `DotProductAttention.sharded_state_dict` says; it has no attribute that says it


def whole(models: Sequence[Any], first_expert: int = 0) -> nn.Module:
    """The chunks of a rank as one module, with the names that the whole model has on one device."""
    made, decoder = nn.Module(), nn.Module()
    decoder.layers = nn.ModuleDict()
    made.decoder = decoder
    for model in models:
        for name, child in model.named_children():
            if name == "decoder":
                for layer in child.layers:
                    decoder.layers[str(layer.layer_number - 1)] = _experts_renamed(layer, first_expert)
                for n, c in child.named_children():
                    if n != "layers":
                        setattr(decoder, n, c)
            elif name == "output_layer" and model.share_embeddings_and_output_weights and not model.pre_process:
                made.embedding = nn.Module()
                made.embedding.word_embeddings = child  # this stage's copy of the weight that the first one looks words up in
            else:
                setattr(made, name, child)
    return made


def _experts_renamed(layer: Any, first: int) -> Any:
    experts = getattr(getattr(layer.mlp, "experts", None), "local_experts", None)
    if experts is None or not first:
        return layer
    made = nn.Module()
    for n, c in layer.named_children():
        setattr(made, n, c)
    made.mlp = nn.Module()
    for n, c in layer.mlp.named_children():
        setattr(made.mlp, n, c)
    made.mlp.experts = nn.Module()
    made.mlp.experts.local_experts = nn.ModuleDict({str(first + i): e for i, e in enumerate(experts)})
    return made


def cut_dim(name: str, p: torch.Tensor) -> int | None:
    """The dimension that tensor-parallel ranks share, as Megatron's attributes of the parameter say."""
    if name.rpartition(".")[2] == _BY_HEAD:
        return 0
    return int(p.partition_dim) if getattr(p, "tensor_model_parallel", False) else None


def pieces(name: str, p: torch.Tensor, gated: bool) -> int:
    """Into how many blocks the dimension falls of each of which a rank has its part."""
    stride = int(getattr(p, "partition_stride", 1))
    return 2 * stride if gated and _GATED in name else stride


def placed(model: nn.Module, ranks: int, gated: bool) -> dict[str, Described]:
    """Parameters that tensor-parallel ranks cut."""
    found: dict[str, Described] = {}
    for name, p in model.named_parameters():
        dim = cut_dim(name, p)
        if dim is None or ranks == 1:
            continue
        n = pieces(name, p, gated)
        names = [f"d{i}" for i in range(p.ndim)]
        names[dim] = f"({n} tp d{dim})" if n > 1 else f"(tp d{dim})"
        found[name] = {"pattern": " ".join(names)}
    return found


def shards(optimizer: Any, model: nn.Module) -> Iterator[tuple[str, torch.Tensor, tuple[int, int]]]:
    """What a rank's distributed optimizer updates: of a parameter's elements in order, those from start to stop."""
    names = {id(p): n for n, p in model.named_parameters()}
    for inner in getattr(optimizer, "chained_optimizers", [optimizer]):
        for held, parts in (("model_fp32_groups", "shard_fp32_groups"), ("model_float16_groups", "shard_fp32_from_float16_groups")):
            for params, own in zip(getattr(inner, held, ()), getattr(inner, parts, ()), strict=True):
                for p, shard in zip(params, own, strict=True):
                    where = inner._get_model_param_range_map(p)["param"]
                    yield names[id(p)], shard, (int(where.start), int(where.end))


def flat_parts(shape: Sequence[int], dim: int | None, ranks: int, rank: int, blocks: int, span: tuple[int, int]) -> list[list[int]]:
    """Elements from start to stop of a rank's part of a parameter, as runs of the whole: [where in the shard, start, block, count, stride].

    `shape` is the rank's; dimension `dim` of the whole falls into `blocks` blocks, of each of which every rank has its part."""
    start, stop = span
    if dim is None:
        return [[0, start, stop - start, 1, 0]]
    inner = 1
    for s in shape[dim + 1 :]:
        inner *= s
    run = shape[dim] // blocks * inner  # elements that lie together in the whole
    found: list[list[int]] = []
    at = start
    while at < stop:
        row, within = divmod(at, run)
        full = (stop - at) // run if within == 0 else 0
        begin = (row * ranks + rank) * run + within
        if full > 1:
            found.append([at - start, begin, run, full, run * ranks])
            at += full * run
        else:
            size = min(run - within, stop - at)
            found.append([at - start, begin, size, 1, 0])
            at += size
    return found


def by_rank(model: nn.Module, held: Mapping[str, tuple[int, int]], ranks: int, rank: int, gated: bool) -> dict[str, Described]:
    """Flat parts of gradients and states of what a distributed optimizer holds."""
    params = dict(model.named_parameters())
    found: dict[str, Described] = {}
    for name, span in held.items():
        p = params[name]
        dim = cut_dim(name, p) if ranks > 1 else None
        blocks = pieces(name, p, gated) if dim is not None else 1
        found[name] = {"flat": flat_parts(tuple(p.shape), dim, ranks, rank, blocks, span)}
    return found
