"""Repairs of positions: which part of a tensor a rank takes, writes or joins, for a whole statement, forward and backward."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from trainverify.domains.arrays import Array
from trainverify.evaluate.small import Step
from trainverify.explain.cause import Cause, base_name
from trainverify.explain.communication import Communication
from trainverify.explain.likes import Likes
from trainverify.explain.repair import Read, Repair, Site, axes_of, running
from trainverify.explain.replay import Edit, Graph, Node
from trainverify.graph.mesh import Mesh
from trainverify.graph.types import TensorType
from trainverify.ops.table import OpError, OpTable
from trainverify.primitives.node import Node as Primitive

MOST_STARTS = 16  # positions at which a block is tried
LOOKUPS = frozenset({"embedding", "one_hot"})


@dataclass(frozen=True)
class Cut:
    """Blocks of one tensor along one dimension, joined in order; starts by row."""

    whole: Node
    dim: int
    starts: tuple[tuple[int, ...], ...]  # of every block, by row
    sizes: tuple[int, ...]

    def take(self, value: Array, dim: int | None = None) -> Array:
        at = self.dim if dim is None else dim
        rows = []
        for row in range(len(value)):
            blocks = [np.take(value[row], range(s[row], s[row] + n), axis=at) for s, n in zip(self.starts, self.sizes, strict=True)]
            rows.append(np.concatenate(blocks, axis=at))
        return np.stack(rows)


class Positions:
    def __init__(self, graph: Graph, likes: Likes, talk: Communication, mesh: Mesh, table: OpTable):
        self.graph = graph
        self.likes = likes
        self.talk = talk
        self.mesh = mesh
        self.table = table
        self.classes = graph.small.classes
        self.shapes = graph.small.local_shapes

    # -- what is there -------------------------------------------------------------------------------------------------

    def cut(self, node: Node) -> Cut | None:
        """The blocks of another tensor that a tensor is."""
        op = self.graph.ops.get(node)
        if op is None or op.name not in ("slice", "concat"):
            return None
        if op.name == "concat":
            parts = [self.cut((node[0], str(i))) for i in op.inputs]
            first = parts[0]
            if first is None or any(p is None or (p.whole, p.dim) != (first.whole, first.dim) for p in parts):
                return None
            starts = tuple(s for p in parts if p is not None for s in p.starts)
            return Cut(first.whole, first.dim, starts, tuple(n for p in parts if p is not None for n in p.sizes))
        nodes = self._nodes(node)
        if nodes is None or any(n[0].prim != "slice" for n in nodes):
            return None
        dim = int(nodes[0][0].attrs[0])
        return Cut((node[0], str(op.inputs[0])), dim, (tuple(int(n[0].attrs[1]) for n in nodes),), (self.shapes[node[0]][node[1]][dim],))

    def _nodes(self, node: Node) -> list[tuple[Primitive, ...]] | None:
        steps = [w for i in self.graph.makers.get(node, ()) if isinstance(w := self.graph.tasks[i].what, Step)]
        return next(self.likes.nodes_for(node[0], node[0], steps), None) if steps else None

    def _own(self, rank: int, axes: tuple[str, ...]) -> int:
        return self.mesh.group(rank, axes).index(rank)

    # -- other blocks --------------------------------------------------------------------------------------------------

    def other_block(self, site: Site) -> Iterator[Repair]:
        """Slices, with their gradients, that start at a rank's own block, somewhere else, or so many positions further."""
        cuts = {n: c for n in site if (c := self._sliced(n)) is not None}
        if len(cuts) < len(site):
            return
        room = min(self.shapes[c.whole[0]][c.whole[1]][c.dim] for c in cuts.values())
        for axes in axes_of(self.mesh):
            text = f"the block of the rank's own {'+'.join(axes)}"
            yield from self._starting(cuts, text, lambda c, n, axes=axes: self._blocks(c, n, axes))  # type: ignore[misc]
        for at in range(min(room, MOST_STARTS)):
            yield from self._starting(cuts, f"from {at} on", lambda c, n, at=at: tuple(at for _ in c.starts[0]))  # type: ignore[misc]
        for d in (d for size in range(1, min(room, MOST_STARTS)) for d in (size, -size)):
            yield from self._starting(cuts, f"{d:+d} from there", lambda c, n, d=d: tuple(s + d for s in c.starts[0]))  # type: ignore[misc]

    def reordered(self, site: Site) -> Iterator[Repair]:
        """Parts of one tensor that a line takes one after the other: in the order in which they lie, or the other way round."""
        order = {t: i for i, op in enumerate(self.classes[site[0][0]].program.ops) for t in op.outputs}
        cuts = {n: c for n in sorted(site, key=lambda n: order[n[1]]) if (c := self.cut(n)) is not None}
        if len(cuts) < len(site) or len({(c.whole, c.dim, c.sizes) for c in cuts.values()}) > 1:
            return
        taken = list(dict.fromkeys(c.starts[0] for c in cuts.values()))
        for wanted in (sorted(taken), taken[::-1]):
            new = dict(zip(taken, wanted, strict=True))
            for repair in self._starting(cuts, "parts one after the other", lambda c, n, new=new: new[c.starts[0]]):  # type: ignore[misc]
                yield replace(repair, cause=Cause.WRONG_ORDER)

    def _blocks(self, cut: Cut, node: Node, axes: tuple[str, ...]) -> tuple[int, ...]:
        return tuple(self._own(r, axes) * cut.sizes[0] for r in self.classes[node[0]].ranks)

    def _sliced(self, node: Node) -> Cut | None:
        """The block that a slice takes, or that the slice takes whose gradient a tensor is."""
        op = self.graph.ops[node]
        if op.name == "slice":
            return self.cut(node)
        forward = (o for o in self.classes[node[0]].program.ops if o.name == "slice" and o.inputs == op.inputs[:1])
        same = next((o for o in forward if all(op.get(k) == v for k, v in o.attrs)), None)
        return None if same is None or op.name != "slice.grad" else self.cut((node[0], same.outputs[0]))

    def _starting(self, cuts: dict[Node, Cut], text: str, starts: Callable[[Cut, Node], tuple[int, ...]]) -> Iterator[Repair]:
        edits: dict[Node, Edit] = {}
        shown = ""
        for node, cut in cuts.items():
            new, size = starts(cut, node), self.shapes[cut.whole[0]][cut.whole[1]][cut.dim]
            if any(s < 0 or s + cut.sizes[0] > size for s in new):
                return
            other = replace(cut, starts=(new,))
            op = self.graph.ops[node]
            if op.name == "slice":
                edits[node] = Edit((cut.whole,), lambda read, cut=other: cut.take(read(cut.whole)))  # type: ignore[misc]
            else:
                grad = (node[0], str(op.inputs[1]))
                edits[node] = Edit((grad,), lambda read, n=node, g=grad, cut=other: self._padded(n, read(g), cut))  # type: ignore[misc]
            row = next((i for i, (a, b) in enumerate(zip(cut.starts[0], new, strict=True)) if a != b), 0)
            rank = self.classes[node[0]].ranks[row]
            was, want, n = cut.starts[0][row], new[row], cut.sizes[0]
            where = f"{_span(want, n)} of {cut.whole[1]} on rank {rank}, not {_span(was, n)}"
            shown = shown or f"takes other positions than needed: {text}: {where}"
        yield Repair(shown, edits, Cause.WRONG_BLOCK)

    def _padded(self, node: Node, grad: Array, cut: Cut) -> Array:
        result = np.zeros((len(grad), *self.shapes[node[0]][node[1]]))
        for row, start in enumerate(cut.starts[0]):
            np.moveaxis(result[row], cut.dim, 0)[start : start + cut.sizes[0]] = np.moveaxis(grad[row], cut.dim, 0)
        return result

    def other_slot(self, site: Site) -> Iterator[Repair]:
        """A position that is compared with, to write there: the rank's own along some axes."""
        if any(self.graph.ops[n].name != "eq" or len(self.graph.ops[n].inputs) != 1 for n in site):
            return
        for axes in axes_of(self.mesh):
            edits: dict[Node, Edit] = {}
            for c, t in site:
                given = (c, str(self.graph.ops[c, t].inputs[0]))
                wide = (-1, *(1 for _ in self.shapes[c][t]))
                own = np.asarray([self._own(r, axes) for r in self.classes[c].ranks]).reshape(wide)
                edits[c, t] = Edit((given,), lambda read, g=given, own=own: read(g) == own)  # type: ignore[misc]
            yield Repair(f"marks another position than the rank's own along {'+'.join(axes)}", edits, Cause.WRONG_BLOCK)

    @cached_property
    def lookups(self) -> list[Site]:
        """Ops that ranks look rows up with from some row on, forward and backward, by the ids."""
        found: dict[str, list[Node]] = {}
        for (c, t), op in self.graph.ops.items():
            if op.name in LOOKUPS and op.get("start") is not None:
                found.setdefault(str(op.inputs[0]), []).append((c, t))
        return [tuple(nodes) for nodes in found.values()]

    def other_rows(self, site: Site) -> Iterator[Repair]:
        """Rows of a cut table that are looked up: those of the rank's own part."""
        if any(self.graph.ops[n].name not in LOOKUPS for n in site):
            return
        for axes in axes_of(self.mesh):
            edits: dict[Node, Edit] = {}
            for c, t in site:
                ids, *weight = ((c, str(i)) for i in self.graph.ops[c, t].inputs)
                count = self.shapes[c][weight[0][1]][0] if weight else self.shapes[c][t][-1]
                starts = [self._own(r, axes) * count for r in self.classes[c].ranks]
                edits[c, t] = Edit((ids, *weight), lambda read, i=ids, w=weight, s=starts, n=count: _looked_up(read, i, w, s, n))  # type: ignore[misc]
            yield Repair(f"{self.graph.ops[site[0]].name} of other rows than the rank has along {'+'.join(axes)}", edits, Cause.WRONG_BLOCK)

    def permuted_slots(self, site: Site, logical: Mapping[str, Array]) -> Iterator[Repair]:
        """Positions that are compared with, to write there: those at which the logical tensor has the rows that are written."""
        if any(self.graph.ops[n].name != "eq" or len(self.graph.ops[n].inputs) != 1 for n in site):
            return
        size = self.shapes[site[0][0]][site[0][1]]
        for c, t in sorted(self.graph.after(list(site)), key=lambda n: self.graph.position[n]) if len(size) == 1 else ():
            value = np.asarray(self.talk.base.values[c][t])
            for name, whole in logical.items():
                if value.dtype.kind != "f" or value.shape[1:] != np.shape(whole) or value.ndim < 3 or value.shape[1] != size[0]:
                    continue
                to = [np.flatnonzero([np.allclose(row, want, rtol=1e-9, atol=0) for want in whole]) for row in value[0]]
                if all(len(i) == 1 for i in to) and sorted(int(i[0]) for i in to) == list(range(size[0])):
                    table = np.asarray([int(i[0]) for i in to])
                    yield Repair(f"marks other rows than those of {name}", {n: self._marked(n, table) for n in site}, Cause.WRONG_BLOCK)

    def _marked(self, node: Node, table: Array) -> Edit:
        """A mask with every mark where a table says."""

        def make(read: Read) -> Array:
            mask = read(node)
            result = np.zeros_like(mask)
            result[:, table] = mask
            return result

        return Edit((node,), make, frozenset({node}))

    def shifted_buffer(self, pads: Site, slices: Site) -> Iterator[Repair]:
        """Where a tensor is written to a buffer and where it is read: both so many positions further."""
        cuts = {n: found for n in slices if (found := self._sliced(n)) is not None}
        if len(cuts) < len(slices) or any(self.graph.ops[n].name != "pad" for n in pads):
            return
        for d in (1, -1, 2, -2):
            shifted = next(self._starting(cuts, f"{d:+d} from there", lambda c, n, d=d: tuple(s + d for s in c.starts[0])), None)  # type: ignore[misc]
            if shifted is None:
                continue
            edits = dict(shifted.edits)
            for c, t in pads:
                edits[c, t] = Edit(((c, t),), lambda read, n=(c, t), d=d: np.roll(read(n), d, axis=1), frozenset({(c, t)}))  # type: ignore[misc]
            name = pads[0][1]
            yield Repair(f"{name} is written {-d:+d} from where it should be in the buffer, and read there", edits, Cause.WRONG_BLOCK)

    # -- other dimensions ----------------------------------------------------------------------------------------------

    def other_dimension(self, site: Site) -> Iterator[Repair]:
        """A reshape of what was cut, or gathered, along one dimension: of the same along another."""
        for dim in range(4):
            edits: dict[Node, Edit] = {}
            wrong: Node | None = None
            for node in site:
                given = (node[0], str(self.graph.ops[node].inputs[0]))
                edit = self._cut_along(node, given, dim) or self._gathered_along(node, given, dim)
                if edit is None:
                    break
                edits[node] = edit
                wrong = wrong or given
            if wrong is not None and len(edits) == len(site):
                old = self.graph.ops[wrong].get("dim", 0)
                made = "joined" if self.graph.ops[wrong].name in ("all_gather", "concat") else "cut"
                yield Repair(f"{made} along dimension {old} where dimension {dim} is needed", edits, Cause.WRONG_DIMENSION, named=wrong)

    def _cut_along(self, node: Node, given: Node, dim: int) -> Edit | None:
        cut, target = self.cut(given), self.shapes[node[0]][node[1]]
        if cut is None or cut.dim == dim or dim >= len(self.shapes[given[0]][given[1]]):
            return None
        shape = self.shapes[cut.whole[0]][cut.whole[1]]
        if any(s + n > shape[dim] for starts, n in zip(cut.starts, cut.sizes, strict=True) for s in starts):
            return None
        if math.prod(shape) // shape[dim] * sum(cut.sizes) != math.prod(target):
            return None
        return Edit((cut.whole,), lambda read: cut.take(read(cut.whole), dim).reshape((-1, *target)))

    def _gathered_along(self, node: Node, given: Node, dim: int) -> Edit | None:
        op, rows, target = self.graph.ops.get(given), self.likes.arrivals(given), self.shapes[node[0]][node[1]]
        if op is None or rows is None or op.name != "all_gather" or int(op.get("dim", 0)) == dim:
            return None
        if dim >= len(self.shapes[given[0]][given[1]]):
            return None
        reads = tuple(dict.fromkeys((c, t) for a in rows for c, _, t in a.senders))

        def make(read: Read) -> Array:
            whole = [np.concatenate([read((c, t))[row] for c, row, t in a.senders], axis=dim) for a in rows]
            return np.stack([w.reshape(target) for w in whole])

        return Edit(reads, make)

    def after_the_cut(self, site: Site) -> Iterator[Repair]:
        """An op that moves elements of a block, where the block of what it makes of the whole tensor is meant."""
        edits: dict[Node, Edit] = {}
        for node in site:
            op = self.graph.ops[node]
            cut = self.cut((node[0], str(op.inputs[0]))) if len(op.inputs) == 1 else None
            if cut is None:
                return
            kind = self.classes[node[0]].program.tensors[cut.whole[1]].dtype
            try:
                lowered = self.table.lower(op.name, dict(op.attrs), (TensorType(self.shapes[node[0]][cut.whole[1]], kind),))
            except OpError:
                return
            whole = running([lowered.outputs] * len(self.classes[node[0]].ranks), 0, node[0], [cut.whole[1]])
            edits[node] = Edit((cut.whole,), lambda read, whole=whole, cut=cut: cut.take(whole(read)))  # type: ignore[misc]
        op = self.graph.ops[site[0]]
        yield Repair(f"{op.name} of {op.inputs[0]}, a part: the part of the {op.name} of the whole is needed", edits, Cause.WRONG_BLOCK)

    def viewed_shard(self, site: Site) -> Iterator[Repair]:
        """A reshape of what each rank has of a cut tensor, where its part of the reshaped whole is meant."""
        for partition in self.talk.partitions.values():
            for a in range(3):
                for b in range(3):
                    edits = {n: e for n in site if (e := self._viewed(n, partition, a, b)) is not None}
                    if len(edits) == len(site):
                        op = self.graph.ops[site[0]]
                        text = f"a rank's own {base_name(op)} of {op.inputs[0]}: the elements of the whole tensor are in another order"
                        yield Repair(text, edits, Cause.WRONG_ORDER)

    def _viewed(self, node: Node, partition: object, a: int, b: int) -> Edit | None:
        """The part of the reshaped whole: gathered along a, cut along b; of a gradient the other way round."""
        op = self.graph.ops[node]
        given = (node[0], str(op.inputs[-1]))
        if op.name.endswith(".grad"):
            a, b = b, a
        before, after = self.shapes[given[0]][given[1]], self.shapes[node[0]][node[1]]
        groups = self.talk.groups((given,), partition)  # type: ignore[arg-type]
        if groups is None or a >= len(before) or b >= len(after):
            return None
        n = len(next(iter(groups.values())))
        target = tuple(s * n if d == b else s for d, s in enumerate(after))

        def combine(stack: Array, at: int) -> Array:
            return np.split(np.concatenate(list(stack), axis=a).reshape(target), n, axis=b)[at]

        member = {(node[0], row): (node[0], row, given[1]) for row in range(len(self.classes[node[0]].ranks))}
        return Edit((given,), self.talk.by_groups(node[0], groups, member, combine))


def _looked_up(read: Read, ids: Node, weight: Sequence[Node], starts: Sequence[int], count: int) -> Array:
    """Rows of a table by id, or their one-hots without one; zeros for ids outside of a rank's rows."""
    at = read(ids)
    marks = (at - np.asarray(starts).reshape(-1, *(1 for _ in at.shape[1:])))[..., None] == np.arange(count)
    if not weight:
        return np.asarray(marks.astype(np.int64))
    return np.stack([m.astype(np.float64) @ rows for m, rows in zip(marks, read(weight[0]), strict=True)])


def _span(start: int, size: int) -> str:
    return f"{start}…{start + size - 1}" if size > 1 else f"{start}"


def pairs(first: Sequence[Site], second: Sequence[Site], most: int) -> Iterator[tuple[Site, Site]]:
    """A few pairs of sites."""
    found = [(a, b) for a in first for b in second]
    yield from found[:most]
