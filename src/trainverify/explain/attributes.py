"""Repairs of what an op is given beside its first inputs: attributes, and an input that is left out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property

from trainverify.explain.cause import Cause, base_name, of_change
from trainverify.explain.repair import Repair, Site, running, short
from trainverify.explain.replay import Edit, Graph, Node
from trainverify.graph.program import Op, Value, has_ref
from trainverify.graph.types import TensorType
from trainverify.ops.table import OpError, OpTable

FEW = 4  # values of an attribute that are tried


class Attributes:
    def __init__(self, graph: Graph, table: OpTable):
        self.graph = graph
        self.table = table
        self.classes = graph.small.classes
        self.shapes = graph.small.local_shapes

    def as_logical(self, site: Site) -> Iterator[Repair]:
        """Attributes that no op of its kind has in the logical program: those of one that it has."""
        first = self._local(site)
        theirs = {s.op.attrs for s in self.graph.small.logical_steps if first is not None and s.op.name == first.name}
        if first is None or first.attrs in theirs:
            return
        for attrs in sorted(theirs, key=repr):
            edits = self._lowered(site, attrs)
            if edits is not None:
                other = [f"{n}={v}" for n, v in attrs if (n, v) not in first.attrs]
                other += [f"no {n}" for n, _ in first.attrs if n not in dict(attrs)]
                cause = of_change(first, replace(first, attrs=attrs))
                yield Repair(f"{short(first)} where the logical program has {', '.join(other)}", edits, cause)

    def one_count(self, site: Site) -> Iterator[Repair]:
        """A count that ranks have different values of, where the logical program has one for all."""
        ops = [self.graph.ops[n] for n in site]
        theirs = [s.op for s in self.graph.small.logical_steps if s.op.name == base_name(ops[0])]
        for name, value in ops[0].attrs:
            mine = {o.get(name) for o in ops}
            right = {o.get(name) for o in theirs}
            if type(value) is not int or len(mine) < 2 or len(right) != 1 or any(has_ref(v) for o in ops for _, v in o.attrs):
                continue
            (want,) = right
            edits: dict[Node, Edit] = {}
            for n, op in zip(site, ops, strict=True):
                edits |= self._lowered((n,), tuple((k, want if k == name else v) for k, v in op.attrs)) or {}
            if len(edits) == len(site):
                shown = " and ".join(sorted(f"{name}={v}" for v in mine))
                yield Repair(f"{base_name(ops[0])} with {shown} where all ranks need {name}={want}", edits, Cause.UNEQUAL_WEIGHTS)

    def missing_input(self, site: Site) -> Iterator[Repair]:
        """An op with fewer inputs than one of its kind has in the logical program: with what that one is given."""
        first = self._local(site)
        if first is None:
            return
        have = len([i for i in first.inputs if i is not None])
        for theirs in [s.op for s in self.graph.small.logical_steps if s.op.name == first.name and len(s.op.inputs) > have]:
            for k, wanted in enumerate(theirs.inputs):
                if wanted is None or (k < len(first.inputs) and first.inputs[k] is not None):
                    continue
                if any(i is not None for i in theirs.inputs[len(first.inputs) : k]):
                    continue  # others before it are missing too
                for local in self._holders.get((site[0][0], wanted), ()):
                    edits = self._lowered(site, first.attrs, (k, local))
                    if edits is not None:
                        yield Repair(f"{first.name} without {local}", edits, Cause.LOST_CONTRIBUTION)

    def other_attribute(self, site: Site) -> Iterator[Repair]:
        """One attribute as ops of the same kind have it elsewhere in the plan, one more or less, or left out."""
        first = self._local(site)
        if first is None or first.name == "slice":
            return
        for name, value in first.attrs:
            others: list[Value | None] = [v for v in self._values.get((first.name, name), ()) if v != value]
            if type(value) is int:
                others += [value - 1, value + 1]
            elif type(value) is bool:
                others += [not value]
            for other in [None, *dict.fromkeys(others)]:
                kept = tuple((n, v) for n, v in first.attrs if n != name or other is not None)
                attrs = tuple((n, v if n != name or other is None else other) for n, v in kept)
                edits = self._lowered(site, attrs)
                if edits is not None:
                    cause = of_change(first, replace(first, attrs=attrs))
                    yield Repair(f"{short(first)} where {'no ' + name if other is None else f'{name}={other}'} is needed", edits, cause)

    @cached_property
    def _values(self) -> dict[tuple[str, str], list[Value]]:
        """What attributes of a kind of op are in the plan."""
        found: dict[tuple[str, str], dict[Value, None]] = {}
        for k in self.classes:
            for op in k.program.ops:
                for name, value in op.attrs:
                    if not has_ref(value):
                        found.setdefault((op.name, name), {})[value] = None
        return {key: list(values)[:FEW] for key, values in found.items()}

    @cached_property
    def _holders(self) -> dict[tuple[int, str], list[str]]:
        """Sources of a class of ranks by the logical tensor that they are a part of."""
        found: dict[tuple[int, str], list[str]] = {}
        for lay, rank in self.graph.small.parts:
            c = self.graph.small.places[rank][0]
            names = found.setdefault((c, lay.logical), [])
            if lay.local in self.classes[c].program.sources and lay.local not in names:
                names.append(lay.local)
        return found

    def _local(self, site: Site) -> Op | None:
        """The op of a site, if it is the same local one for all of it."""
        ops = [self.graph.ops.get(n) for n in site]
        first = ops[0]
        if first is None or any(o is None or o.name != first.name or o.attrs != first.attrs for o in ops):
            return None
        if first.name not in self.table or self.table[first.name].collective or any(has_ref(v) for _, v in first.attrs):
            return None
        return first

    def _lowered(self, site: Site, attrs: tuple[tuple[str, object], ...], more: tuple[int, str] | None = None) -> dict[Node, Edit] | None:
        """The same ops with other attributes, or with one more input; None if that is no such op."""
        edits: dict[Node, Edit] = {}
        for c, t in site:
            op, types = self.graph.ops[c, t], self.classes[c].program.tensors
            inputs = list(op.inputs)
            if more is not None:
                inputs += [None] * (more[0] + 1 - len(inputs))
                inputs[more[0]] = more[1]
            if any(i is not None and i not in self.shapes[c] for i in inputs):
                return None
            shapes = tuple(None if i is None else TensorType(self.shapes[c][i], types[i].dtype) for i in inputs)
            sizes = {
                f: n for name in (*op.inputs, *op.outputs) if name for f, n in zip(types[name].shape, self.shapes[c][name], strict=True)
            }
            slot, lowered = op.outputs.index(t), None
            for some in (dict(attrs), {name: _resized(v, sizes) for name, v in attrs}):  # as it says, else at the sizes that are run
                try:
                    made = self.table.lower(op.name, some, shapes)
                except OpError:
                    continue
                if len(made.outputs) == len(op.outputs) and made.outputs[slot].shape == self.shapes[c][t]:
                    lowered = made
                    break
            if lowered is None:
                return None
            reads = tuple((c, i) for i in dict.fromkeys(inputs) if i is not None)
            edits[c, t] = Edit(reads, running([lowered.outputs] * len(self.classes[c].ranks), slot, c, inputs))
        return edits


def _resized(value: object, sizes: Mapping[int, int]) -> object:
    """An attribute with the small size in place of the real one."""
    if isinstance(value, tuple):
        return tuple(_resized(v, sizes) for v in value)
    return sizes.get(value, value) if type(value) is int and value > 1 else value
