"""`local-batch-norm`: every data-parallel rank takes mean and variance over its own rows.

The rows of R ranks are R adjacent blocks of the batch. Batch norm treats channels apart, so blocks that become channels, R·c of
them, are normalised each by its own statistics. Running statistics then have a row for every rank: it keeps its own.
"""

# mypy: disable-error-code="no-any-return"
from __future__ import annotations

from collections.abc import Sequence

from trainverify.approximate.approximation import Changed, Setting
from trainverify.approximate.rewrite import Fragment, Unfit, substituted
from trainverify.build.tape import Tape, Tensor
from trainverify.graph.program import Op, Program
from trainverify.graph.types import TensorType


def local_batch_norm(program: Program, setting: Setting) -> Changed:
    found = {i: op for i, op in enumerate(program.ops) if op.name == "batch_norm" and op.get("training", True)}
    if not found:
        raise Unfit(f"{program.name} has no batch norm that takes statistics of the batch")
    axes = setting.batch_axes(program)
    parts = setting.parts(axes)
    for op in found.values():
        rows = program.tensors[str(op.inputs[0])].shape[0]
        if rows % parts:
            raise Unfit(f"{op}: {rows} rows do not divide among {parts} ranks ({' × '.join(axes)})")
    running = {n for op in found.values() for n in op.inputs[3:5] if n in program.state}
    types = {n: TensorType((parts * program.tensors[n].shape[0],), program.tensors[n].dtype) for n in running}
    changed = substituted(program, dict.fromkeys(found, _by_part(parts)), setting.ops, types)
    retyped = [n for n, t in program.tensors.items() if changed.tensors.get(n, t) != t]
    where = f"{parts} parts ({' × '.join(axes)})"
    says = (
        f"every batch norm takes mean and variance over the rows of one rank, {where}, and every rank keeps running statistics of its own"
    )
    return Changed(changed, says, dict.fromkeys(retyped, axes))


def _by_part(parts: int) -> Fragment:
    def fragment(tape: Tape, op: Op, inputs: Sequence[Tensor | None]) -> Sequence[Tensor]:
        x, *rest = inputs
        assert x is not None
        at, (rows, channels, *places) = op.outputs[0], x.shape
        order = (1, 0, 2, *range(3, 3 + len(places)))
        y = tape.reshape(x, shape=(parts, rows // parts, channels, *places), name=f"{at}.parts")
        y = tape.permute(y, dims=order, name=f"{at}.parts.moved")
        y = tape.reshape(y, shape=(rows // parts, parts * channels, *places), name=f"{at}.parts.channels")
        affine = [None if w is None else _repeated(tape, w, parts) for w in rest[:2]]
        y, *statistics = tape.emit("batch_norm", [y, *affine, *rest[2:]], op.attributes, [f"{at}.parts.normed", *op.outputs[1:]])
        y = tape.reshape(y, shape=(rows // parts, parts, channels, *places), name=f"{at}.rows")
        y = tape.permute(y, dims=order, name=f"{at}.rows.moved")
        return (tape.reshape(y, shape=x.shape, name=at), *statistics)

    return fragment


def _repeated(tape: Tape, x: Tensor, parts: int) -> Tensor:
    """A value of every channel, for the channels of all parts."""
    (channels,) = x.shape
    once = tape.reshape(x, shape=(1, channels), name=f"{x.name}.once")
    return tape.reshape(tape.expand(once, shape=(parts, channels), name=f"{x.name}.parts"), shape=(parts * channels,), name=f"{x.name}.all")
