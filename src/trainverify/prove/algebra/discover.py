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
from trainverify.prove.algebra.kernel import Coef, Index, Mono, Poly, TooLarge, Unsupported, variables

_Known = dict[tuple[tuple[int, object], ...], list[tuple[str, Mono, Coef]]]  # atoms and powers → (logical tensor, form)


@dataclass(frozen=True)
class Found:
    """A local tensor of the ranks that `rank` stands for."""

    rank: int
    tensor: str
    logical: str | None
    placement: str  # DTensor notation, with constant indices (a micro-batch) behind
    factor: Coef = 1

    def __str__(self) -> str:
        if self.logical is None:
            return f"rank {self.rank}: {self.tensor}: no logical tensor"
        scale = "" if self.factor == 1 else f" ×{self.factor}"
        return f"rank {self.rank}: {self.tensor} = {self.logical}{scale} {self.placement}"


def discover(prover: Prover) -> Iterator[Found]:
    """Every tensor of every distinct program, in execution order. The prover must have run."""
    known: _Known = {}
    for name, value in prover.logical.items():
        if not isinstance(value, Exception) and list(value) == [()] and len(value[()]) == 1:
            ((m, c),) = value[()].items()
            known.setdefault(_skeleton(m), []).append((name, m, c))
    for i, instance in enumerate(prover.instances):
        unit = prover.system.schedule.classes[instance.class_index].unit
        program = prover.system.unit_programs[unit]
        for tensor in (*program.sources, *(o for op in program.ops for o in op.outputs)):
            held = prover.local[i].get(tensor)
            if held is None or isinstance(held, Exception) or list(held) != [()]:
                yield Found(instance.rank, tensor, None, "")
            else:
                yield _found(prover, i, tensor, held[()], known)


def _skeleton(m: Mono) -> tuple[tuple[int, object], ...]:
    return tuple((u, w) for u, _, w in m)


def _found(prover: Prover, i: int, tensor: str, p: Poly, known: _Known) -> Found:
    rank = prover.instances[i].rank
    folded = prover.instances[i].folded
    for partial in itertools.chain([()], itertools.combinations(folded, 1), itertools.combinations(folded, 2)):
        over = {v: a.size for axis in partial for v, a in prover.mesh_vars[axis]}
        if partial and not set(over) & variables(p):
            continue
        try:
            total = prover.kernel.settle(prover.kernel.sum(p, over)) if partial else p
        except (Unsupported, TooLarge):
            continue
        if len(total) != 1:
            continue
        ((m, c),) = total.items()
        for name, whole, coef in known.get(_skeleton(m), ()):
            names = _names(whole, m)
            if names is not None and set(prover.kernel.substitute({whole: 1}, names)) == {m}:
                factor = Fraction(c) / coef
                return Found(rank, tensor, name, _placement(prover, i, name, names, partial), factor)
    return Found(rank, tensor, None, "")


def _names(whole: Mono, piece: Mono) -> dict[Index, Index] | None:
    """What the variables of a logical form are in a local one with the same atoms."""
    found: dict[Index, Index] = {}
    for (_, a, _), (_, b, _) in zip(whole, piece, strict=True):
        for x, y in zip(a, b, strict=True):
            if (x >= 0 and x != y) or (x < 0 and found.setdefault(x, y) != y):
                return None
    return found


def _placement(prover: Prover, i: int, name: str, names: dict[Index, Index], partial: tuple[str, ...]) -> str:
    grid = prover.forms.grid(prover.system.scope.dims[name])
    owner = {v: axis for axis, leaves in prover.mesh_vars.items() for v, _ in leaves}
    shards: dict[str, str] = {}
    fixed: list[str] = []
    for d, span in enumerate(grid.spans):
        for n in span:
            index = names.get(-1 - n)
            if index is None:
                continue
            if index >= 0:
                fixed.append(f"dim {d}: block {index} of {grid.leaves[n].axis.size}")
            elif index in owner:
                shards[owner[index]] = f"Shard({d})"
    here = prover.instances[i]
    for axis, at in here.fixed:
        fixed.append(f"{axis}={at}")
    text = ", ".join(
        f"{axis}: {'Partial()' if axis in partial else shards.get(axis, 'Replicate()')}" for axis in here.folded if prover.mesh_vars[axis]
    )
    return "{" + text + "}" + (f" on {', '.join(fixed)}" if fixed else "")
