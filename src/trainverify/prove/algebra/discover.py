"""Discovered lineage: which logical tensor a plan's tensor is, and how it lies on the mesh. No annotation needed.

A local tensor whose form is that of a logical tensor with some indices replaced by mesh coordinates or constants *is*
that tensor, sharded so. One that becomes it after a Σ over mesh axes is a partial sum.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

from trainverify.prove.algebra.engine import Prover
from trainverify.prove.algebra.terms import Coef, Index, Mono, Poly, TooLarge, Unsupported, variables

_Known = dict[tuple[tuple[int, object], ...], list[tuple[str, Mono, Coef]]]  # atoms and powers → (logical tensor, form)


@dataclass(frozen=True)
class Found:
    """A local tensor of the ranks that `rank` stands for."""

    rank: int
    tensor: str
    logical: str | None
    placement: str  # DTensor notation, with constant indices (a micro-batch) behind
    factor: Coef = 1
    scalars: bool = False  # also multiplied by numbers of the program, such as one over the count of tokens
    blocks: tuple[tuple[int, int, int], ...] = ()  # (leaf, constant index, size) where a micro-batch or the like is fixed
    partial: bool = False

    def __str__(self) -> str:
        if self.logical is None:
            return f"rank {self.rank}: {self.tensor}: no logical tensor"
        scale = ("" if self.factor == 1 else f" ×{self.factor}") + (" ×scalars" if self.scalars else "")
        return f"rank {self.rank}: {self.tensor} = {self.logical}{scale} {self.placement}"


def discover(prover: Prover, sums: bool = True) -> Iterator[Found]:
    """Every tensor of every distinct program, in execution order; also as a partial sum, which takes most of the time. The prover must
    have run."""
    known: _Known = {}
    for name, value in prover.logical.all_items():
        if not isinstance(value, Exception) and list(value) == [()] and len(value[()]) == 1:
            ((m, c),) = value[()].items()
            known.setdefault(_skeleton(_indexed(m)), []).append((name, m, c))
    for i, instance in enumerate(prover.instances):
        unit = prover.system.schedule.classes[instance.class_index].unit
        program = prover.system.unit_programs[unit]
        for tensor in (*program.sources, *(o for op in program.ops for o in op.outputs)):
            held = prover.local[i].get(tensor)
            if held is None or isinstance(held, Exception) or list(held) != [()]:
                yield Found(instance.rank, tensor, None, "")
            else:
                yield _found(prover, i, tensor, held[()], known, sums)


def _indexed(m: Mono) -> Mono:
    """The factors that depend on an index; the others scale the whole tensor."""
    return tuple(f for f in m if f[1])


def _skeleton(m: Mono) -> tuple[tuple[int, object], ...]:
    return tuple((u, w) for u, _, w in m)


def _found(prover: Prover, i: int, tensor: str, p: Poly, known: _Known, sums: bool) -> Found:
    rank = prover.instances[i].rank
    folded = prover.instances[i].folded if sums else ()
    for partial in itertools.chain([()], itertools.combinations(folded, 1), itertools.combinations(folded, 2)):
        over = {v: a.size for axis in partial for v, a in prover.ranks.mesh_vars[axis]}
        if partial and not set(over) & variables(p):
            continue
        try:
            total = prover.kernel.settle(prover.kernel.sum(p, over)) if partial else p
        except (Unsupported, TooLarge):
            continue
        if len(total) != 1:
            continue
        ((m, c),) = total.items()
        hits = []
        for name, whole, coef in known.get(_skeleton(_indexed(m)), ()):
            names = _names(_indexed(whole), _indexed(m))
            if names is not None and set(prover.kernel.substitute({_indexed(whole): 1}, names)) == {_indexed(m)}:
                scalars = set(m) - set(_indexed(m)) != set(whole) - set(_indexed(whole))
                hits.append((scalars, Fraction(c) / coef != 1, name, names, Fraction(c) / coef))
        if hits:
            scalars, _, name, names, factor = min(hits, key=lambda h: h[:2])
            text, blocks = _placement(prover, i, name, names, partial)
            return Found(rank, tensor, name, text, factor, scalars, blocks, bool(partial))
    return Found(rank, tensor, None, "")


def covered(prover: Prover) -> tuple[dict[tuple[int, str], str], set[str]]:
    """What each tensor of each instance is (by the instance's first rank), and the logical tensors that are all there."""
    held: dict[tuple[int, str], str] = {}
    seen: dict[str, set[tuple[tuple[int, int, int], ...]]] = {}
    for f in discover(prover, sums=False):
        if f.logical is not None:
            held[f.rank, f.tensor] = f.logical
            seen.setdefault(f.logical, set()).add(f.blocks)
    whole = set()
    for name, blocks in seen.items():
        sizes = {leaf: size for b in blocks for leaf, _, size in b}
        there = {tuple(i for leaf in sorted(sizes) for at, i, _ in b if at == leaf) for b in blocks if len(b) == len(sizes)}
        if not sizes or () in blocks or there == set(itertools.product(*(range(sizes[leaf]) for leaf in sorted(sizes)))):
            whole.add(name)
    return held, whole


def _names(whole: Mono, piece: Mono) -> dict[Index, Index] | None:
    """What the variables of a logical form are in a local one with the same atoms."""
    found: dict[Index, Index] = {}
    for (_, a, _), (_, b, _) in zip(whole, piece, strict=True):
        for x, y in zip(a, b, strict=True):
            if (x >= 0 and x != y) or (x < 0 and found.setdefault(x, y) != y):
                return None
    return found


def _placement(
    prover: Prover, i: int, name: str, names: dict[Index, Index], partial: tuple[str, ...]
) -> tuple[str, tuple[tuple[int, int, int], ...]]:
    grid = prover.forms.grid(prover.system.scope.dims[name])
    owner = {v: axis for axis, leaves in prover.ranks.mesh_vars.items() for v, _ in leaves}
    shards: dict[str, str] = {}
    fixed: list[str] = []
    blocks: list[tuple[int, int, int]] = []
    for d, span in enumerate(grid.spans):
        for n in span:
            index = names.get(-1 - n)
            if index is None:
                continue
            if index >= 0:
                fixed.append(f"dim {d}: block {index} of {grid.leaves[n].axis.size}")
                blocks.append((n, index, grid.leaves[n].axis.size))
            elif index in owner:
                shards[owner[index]] = f"Shard({d})"
    here = prover.instances[i]
    for axis, at in here.fixed:
        fixed.append(f"{axis}={at}")
    text = ", ".join(
        f"{axis}: {'Partial()' if axis in partial else shards.get(axis, 'Replicate()')}"
        for axis in here.folded
        if prover.ranks.mesh_vars[axis]
    )
    return "{" + text + "}" + (f" on {', '.join(fixed)}" if fixed else ""), tuple(blocks)
