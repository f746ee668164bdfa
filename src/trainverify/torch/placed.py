"""How a tensor of one rank lies on the mesh, read from DTensor: plain data that travels between processes."""

from __future__ import annotations

from typing import Any

import torch

from trainverify.torch.private import _disable_current_modes, strided_shard

Described = dict[str, Any]  # {"shape": global shape, "axes": [[ranks of the group, placement], …]}


def local(t: torch.Tensor) -> torch.Tensor:
    """The tensor that this rank really holds."""
    from torch.distributed.tensor import DTensor

    return t._local_tensor if isinstance(t, DTensor) else t


def described(t: torch.Tensor) -> Described | None:
    """Placements along every dimension of the device mesh; None for a plain tensor, about which nothing is known."""
    from torch.distributed.tensor import DTensor

    if not isinstance(t, DTensor):
        return None
    with _disable_current_modes():
        mesh = t.device_mesh
        where = mesh.get_coordinate()
        axes: list[list[Any]] = []
        for d, placement in enumerate(t.placements):
            index = tuple(slice(None) if i == d else c for i, c in enumerate(where or ()))
            ranks = [int(r) for r in mesh.mesh[index].reshape(-1).tolist()]
            axes.append([ranks, _placement(placement)])
    return {"shape": [int(s) for s in t.shape], "axes": axes}


def _placement(p: Any) -> str:
    from torch.distributed.tensor import Partial, Replicate, Shard

    kind = type(p)  # another class may be called alike
    if kind is Shard:
        return f"shard {p.dim}"
    if kind is strided_shard():
        return f"strided {p.dim} {p.split_factor}"
    if kind is Replicate:
        return "replicate"
    if kind is Partial:
        return f"partial {p.reduce_op}"
    return f"other {p}"
