"""Comparing forms with numbers: every tensor of a program or plan, element by element, at random inputs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from prove.evaluate_forms import Balls, Evaluator, Floats, place
from trainverify.axes.structure import Axis
from trainverify.axes.system import System
from trainverify.domains.ball import Ball, balls, precision
from trainverify.domains.numeric import NUMERIC
from trainverify.evaluate.run import run_plan, sample
from trainverify.evaluate.small import shrink_system
from trainverify.graph.communication import Communication, schedule
from trainverify.graph.obligations import obligations
from trainverify.graph.plan import Plan, units
from trainverify.graph.program import Program, inline
from trainverify.ops import OPS
from trainverify.primitives.scalars import Undecided
from trainverify.prove.algebra.engine import Prover
from trainverify.prove.algebra.grids import mixed_radix
from trainverify.prove.listed.engine import ListedProver
from trainverify.prove.propose.pieces import pieces
from trainverify.verdicts import declared, single

TOLERANCE = 1e-8
FULL = 10**9  # no size is reduced


@dataclass
class Compared:
    tensors: int = 0
    elements: int = 0
    without: list[str] = field(default_factory=list)  # tensors that have no form, and why
    wrong: list[str] = field(default_factory=list)


def system_of(logical: Program, plan: Plan) -> tuple[System, Any]:
    parts = units(plan)
    wanted, _ = obligations(logical, plan, parts)
    wanted += declared(logical, plan, parts, wanted)
    talk = Communication(plan, parts, OPS)
    return System(logical, plan, OPS, talk, schedule(talk)).collect(wanted), wanted


def inputs_of(program: Program, seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {n: sample(rng, program.tensors[n].kind, program.tensors[n].shape, program.domains.get(n)) for n in program.sources}


def numbers_of(program: Program, inputs: Mapping[str, Any], exact: bool = False) -> dict[str, Any]:
    """Every tensor of a logical program, op by op, at its real size."""
    flat = inline(program)
    values = {n: balls(v) if exact else v for n, v in inputs.items()}
    domain = Ball() if exact else NUMERIC
    for op in flat.ops:
        lowered = OPS.lower(op.name, op.attributes, tuple(None if i is None else flat.tensors[i] for i in op.inputs))
        args = [None if i is None else values[i] for i in op.inputs]
        values.update(zip(op.outputs, domain.run(lowered.outputs, args), strict=True))
    return values


def positions(shape: Sequence[int]) -> Iterator[tuple[int, ...]]:
    return itertools.product(*map(range, shape))


class Point:
    """A prover's forms evaluated at one point."""

    def __init__(self, prover: Prover, inputs: Mapping[str, Any]):
        self.prover = prover
        system = prover.system
        self.axes = system.inference.axes
        self.inputs = inputs
        self.place = listed_place if isinstance(prover, ListedProver) else place
        self.radix: dict[str, list[int]] = {}
        for n in system.logical.domains:
            line = system.scope.lines.get(n)
            root = None if line is None else line.root()
            if root is not None and root.axis is not None:
                self.radix[n] = [a.size for a in self.axes.leaves([root.axis])]
        self.floats = self.evaluator(Floats())

    def evaluator(self, arithmetic: Any) -> Evaluator:
        elements: dict[tuple[str, tuple[int, ...]], Any] = {}
        radix = dict(self.radix)
        system = self.prover.system
        for n, array in self.inputs.items():
            dims = system.scope.dims[n]
            for p in positions(array.shape):
                tags, at = self.place(self.axes, dims, p)
                block = n if not tags else f"{n}#{','.join(map(str, tags))}"
                if n in radix:
                    radix[block] = radix[n]
                elements[block, tuple(at[v] for v in sorted(at, reverse=True))] = arithmetic.of(array[p].item())
        return Evaluator(self.prover.kernel.atoms, elements, radix, arithmetic)

    def compare(self, name: str, value: Any, dims: Sequence[Axis], array: Any, mesh: Mapping[int, int], out: Compared, exact: Any) -> None:
        """`exact` gives the numbers as balls, for what floats do not settle."""
        for p in positions(array.shape):
            want = float(array[p])
            if not np.isfinite(want):
                continue
            tags, at = self.place(self.axes, dims, p)
            try:
                got = self.floats.value(value[tags], {**at, **mesh})
            except NotImplementedError as error:
                out.without.append(f"{name}: {error}")
                return
            out.elements += 1
            if abs(got - want) <= TOLERANCE * max(1.0, abs(want)):
                continue
            if exact is not None:
                try:
                    with precision(200):
                        ball = self.evaluator(Balls()).value(value[tags], {**at, **mesh})
                        if ball.overlaps(Balls().of(0) + exact()[p]):
                            continue
                except Undecided:  # a tie that enclosures do not settle either
                    out.without.append(f"{name}: undecided")
                    return
            out.wrong.append(f"{name}{list(p)} is {want}, its form {got}")
            return


def listed_place(axes: Any, dims: Sequence[Axis], position: tuple[int, ...]) -> Any:
    """Where an element of a tensor over listed axes is: (listed digits, variables)."""
    leaves = [(a, d) for x, i in zip(dims, position, strict=True) for a, d in zip(axes.leaves([x]), _digits(axes, x, i), strict=True)]
    tags = tuple(d for a, d in leaves if axes.listed(a))
    return tags, {-1 - n: d for n, (a, d) in enumerate(leaves) if not axes.listed(a)}


def _digits(axes: Any, axis: Axis, i: int) -> list[int]:
    return mixed_radix(i, [a.size for a in axes.leaves([axis])])


def check_program(
    program: Program, seed: int, inputs: Mapping[str, Any] | None = None, list_some: Callable[[System], None] | None = None
) -> Compared:
    """The forms of all tensors of a logical program mean their numbers; over listed axes if `list_some` says what to list besides."""
    system, _ = system_of(program, single(program))
    if list_some is not None:
        system = system.listed()
        system.inference.axes.sealed = False  # type: ignore[attr-defined]
        list_some(system)
    prover = Prover(system) if list_some is None else ListedProver(system, pieces)
    prover._run_logical()
    inputs = inputs_of(program, seed) if inputs is None else inputs
    numbers = numbers_of(program, inputs)
    point = Point(prover, inputs)
    out = Compared()
    cache: list[dict[str, Any]] = []

    def exact_numbers() -> dict[str, Any]:
        if not cache:
            cache.append(numbers_of(program, inputs, exact=True))
        return cache[0]

    for name, value in prover.logical.items():
        if isinstance(value, Exception):
            out.without.append(f"{name}: {value}")
            continue
        out.tensors += 1
        point.compare(name, value, prover.system.scope.dims[name], np.asarray(numbers[name]), {}, out, lambda n=name: exact_numbers()[n])
    return out


def check_plan(logical: Program, plan: Plan, seed: int, listed: bool = False) -> Compared:
    """The forms of all rank-local tensors mean what each rank computes."""
    system, wanted = system_of(logical, plan)
    prover = ListedProver(system.listed(), pieces) if listed else Prover(system)
    prover.prove(wanted)
    inputs = inputs_of(logical, seed)
    small = shrink_system(system.listed() if listed else system, FULL)
    system = prover.system
    assert not small.reduced
    values = run_plan(small, plan.lineage, inputs, NUMERIC)
    point = Point(prover, inputs)
    out = Compared()
    mesh = plan.mesh
    for i, instance in enumerate(prover.instances):
        k = system.schedule.classes[instance.class_index]
        dims = system.unit_scopes[k.unit].dims
        for rank in ranks_of(prover, i):
            at = mesh.coordinates(rank)
            variables = {}
            for axis, leaves in prover.ranks.mesh_vars.items():
                digits = mixed_radix(at[axis], [a.size for _, a in leaves])
                variables.update(zip((v for v, _ in leaves), digits, strict=True))
            for name, value in prover.local[i].items():
                array = values.get(instance.class_index, k.ranks.index(rank), name)
                if isinstance(value, Exception) or array is None:
                    out.without.append(f"{name} on {rank}: {value if isinstance(value, Exception) else 'not run'}")
                    continue
                out.tensors += 1
                point.compare(f"{name} on rank {rank}", value, dims[name], np.asarray(array), variables, out, None)
    return out


def ranks_of(prover: Prover, i: int) -> list[int]:
    """All ranks of an instance."""
    instance = prover.instances[i]
    mesh = prover.system.plan.mesh
    fixed = instance.at()
    return [r for r in range(mesh.size) if all(mesh.coordinates(r)[a] == c for a, c in fixed.items()) and r in _class(prover, i)]


def _class(prover: Prover, i: int) -> tuple[int, ...]:
    return prover.system.schedule.classes[prover.instances[i].class_index].ranks
