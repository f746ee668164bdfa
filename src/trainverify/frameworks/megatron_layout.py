"""How Megatron-core's parameters lie on ranks: names of the whole model, cuts over tensor-parallel ranks, shards of its optimizer."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from trainverify.torch.placed import Described
from trainverify.translate.targets import CaptureError

_GATED: Final = ".linear_fc1."  # gate and input of a gated layer, one after the other on every rank
_BY_HEAD: Final = "softmax_offset"  # cut as `DotProductAttention.sharded_state_dict` says; it has no attribute that says it


def whole(models: Sequence[Any]) -> nn.Module:
    """The chunks of a rank as one module, with the names that the whole model has on one device."""
    made, decoder = nn.Module(), nn.Module()
    decoder.layers = nn.ModuleDict()
    made.decoder = decoder
    for model in models:
        for name, child in model.named_children():
            if name == "decoder":
                for layer in child.layers:
                    decoder.layers[str(layer.layer_number - 1)] = layer
                for n, c in child.named_children():
                    if n != "layers":
                        setattr(decoder, n, c)
            elif name == "output_layer" and model.share_embeddings_and_output_weights and not model.pre_process:
                made.embedding = nn.Module()
                made.embedding.word_embeddings = child  # this stage's copy of the weight that the first one looks words up in
            else:
                setattr(made, name, child)
    return made


def cut_dim(name: str, p: torch.Tensor) -> int | None:
    """The dimension that tensor-parallel ranks share, as Megatron's attributes of the parameter say."""
    if name.rpartition(".")[2] == _BY_HEAD:
        return 0
    return int(p.partition_dim) if getattr(p, "tensor_model_parallel", False) else None


def pieces(name: str, p: torch.Tensor, gated: bool) -> int:
    """Into how many blocks the dimension falls of each of which a rank has its part.

    A gated layer's are two; Megatron-core 0.16 says so itself, older ones do not."""
    stride = int(getattr(p, "partition_stride", 1))
    return max(2, stride) if gated and _GATED in name else stride


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


@dataclass(frozen=True)
class Cut:
    """How tensor-parallel ranks share a parameter: dimension `dim` falls into blocks, of each of which every rank has its part."""

    dim: int | None
    blocks: int
    ranks: int
    rank: int

    def rows(self, size: int, start: int, stop: int) -> Iterator[tuple[int, int, int, int, int]]:
        """Rows from start to stop of the rank's `size` rows: where they begin there, and a run of the whole's rows."""
        if self.dim != 0:
            yield start, start, stop - start, 1, 0
            return
        own = size // self.blocks
        if (start, stop) == (0, size):
            yield 0, self.rank * own, own, self.blocks, own * self.ranks if self.blocks > 1 else 0
            return
        while start < stop:
            block, within = divmod(start, own)
            count = min(own - within, stop - start)
            yield start, (block * self.ranks + self.rank) * own + within, count, 1, 0
            start += count


def whole_rows(shape: Sequence[int], span: tuple[int, int]) -> tuple[int, int] | None:
    """The rows of a parameter that a range of its elements is; None if it ends within one."""
    width = math.prod(shape[1:])
    return None if span[0] % width or span[1] % width else (span[0] // width, span[1] // width)


def boxes(shape: Sequence[int], cut: Cut, rows: tuple[int, int]) -> list[list[Any]]:
    """Rows of a rank's part of a parameter as boxes of the whole: [where, runs]."""
    runs = [[0, s, 1, 0] for s in shape]
    if cut.dim is not None and cut.dim > 0:
        if cut.blocks > 1:
            raise CaptureError(f"a distributed optimizer of a parameter whose dimension {cut.dim} falls into {cut.blocks} blocks")
        runs[cut.dim] = [cut.rank * shape[cut.dim], shape[cut.dim], 1, 0]
    return [
        [[at - rows[0], *[0] * (len(shape) - 1)], [[start, block, count, stride], *runs[1:]]]
        for at, start, block, count, stride in cut.rows(shape[0], *rows)
    ]


def flat_parts(shape: Sequence[int], cut: Cut, span: tuple[int, int]) -> list[list[int]]:
    """Elements from start to stop of a rank's part, as runs of the flattened whole: [where in the shard, start, count]."""
    start, stop = span
    if cut.dim is None:
        return [[0, start, stop - start]]
    run = shape[cut.dim] // cut.blocks * math.prod(shape[cut.dim + 1 :])  # elements that lie together in the whole
    found, at = [], start
    while at < stop:
        row, within = divmod(at, run)
        count = min(run - within, stop - at)
        found.append([at - start, (row * cut.ranks + cut.rank) * run + within, count])
        at += count
    return found


def held(model: nn.Module, spans: Mapping[str, tuple[int, int]], ranks: int, rank: int, gated: bool) -> dict[str, Described]:
    """How gradients and states lie of what a distributed optimizer holds; rows of a parameter have their own shape there."""
    params = dict(model.named_parameters())
    found: dict[str, Described] = {}
    for name, span in spans.items():
        p = params[name]
        dim = cut_dim(name, p) if ranks > 1 else None
        cut = Cut(dim, pieces(name, p, gated) if dim is not None else 1, ranks, rank)
        rows = whole_rows(p.shape, span)
        if rows is None:
            found[name] = {"flat": flat_parts(p.shape, cut, span)}
        else:
            found[name] = {"shape": [rows[1] - rows[0], *p.shape[1:]], "boxes": boxes(p.shape, cut, rows)}
    return found
