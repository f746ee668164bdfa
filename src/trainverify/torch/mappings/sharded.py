"""Ops that FSDP2 registers for its buckets."""

from __future__ import annotations

import math

from trainverify.torch.mappings.table import Arguments, rows
from trainverify.torch.values import Unmapped

ROWS, row = rows()


@row("fsdp::split_with_sizes_copy")
def split_with_sizes_copy(a: Arguments) -> list[str]:
    """Pieces of the gathered buffer [ranks, …] along dim, each in the shape of its `out`."""
    pieces = a.e.several(
        "split", (a.tensor("all_gather_output"),), {"sizes": a.ints("all_gather_input_split_sizes"), "dim": a.integer("dim")}
    )
    made = []
    for piece, kind in zip(pieces, a.out, strict=True):
        assert kind is not None
        if math.prod(kind.shape) != math.prod(a.e.shape(piece)):
            raise Unmapped(f"a piece {list(a.e.shape(piece))} for an output {list(kind.shape)}")
        made.append(a.e.reshape(piece, kind.shape))
    return made


@row("fsdp::chunk_cat", "aten::_chunk_cat", "fsdp::chunk_cat_mixed_dtype")
def chunk_cat(a: Arguments) -> str:
    """Every tensor padded along dim to a multiple of the chunks, cut into chunks, flattened; chunk i of all of them side by side."""
    chunks, dim, names = a.integer("num_chunks"), a.integer("dim"), a.tensors("tensors")
    if len({a.e.tensors[n].dtype for n in names}) > 1 and a.out[0] is not None:
        names = [a.e.cast(n, a.out[0].dtype) for n in names]
    flat = []
    for name in names:
        shape = a.e.shape(name)
        short = -shape[dim] % chunks
        if short:
            pads = [0, 0] * (len(shape) - 1 - dim) + [0, short]
            name = a.e.op("pad", (name,), {"pads": tuple(pads), "value": 0})
        if dim != 0:
            raise Unmapped(f"argument dim={dim}")
        flat.append(a.e.reshape(name, (chunks, math.prod(a.e.shape(name)) // chunks)))
    made = flat[0] if len(flat) == 1 else a.e.op("concat", flat, {"dim": 1})
    kind = a.out[0]
    assert kind is not None
    return a.e.reshape(made, kind.shape)


@row("fsdp::all_gather_copy_in")
def all_gather_copy_in(a: Arguments) -> tuple[str, None]:
    """The own part of the buffer: all inputs flat, one after the other. The buffer itself is written by the all-gather."""
    a.ignore("all_gather_output", "rank")
    names, sizes = a.tensors("all_gather_inputs"), a.ints("inp_split_sizes")
    flat = [a.e.reshape(n, (math.prod(a.e.shape(n)),)) for n in names]
    if sizes != tuple(a.e.shape(n)[0] for n in flat) or a.integer("all_gather_input_numel") != sum(sizes):
        raise Unmapped("inputs that do not fill the buffer")
    return (flat[0] if len(flat) == 1 else a.e.op("concat", flat, {"dim": 0})), None
