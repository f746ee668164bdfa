"""A plan made ready for engines and evaluation: its axes, the claims of its lineage as obligations, its assumptions."""

from __future__ import annotations

from collections.abc import Sequence

from trainverify.axes.system import System
from trainverify.check.findings import names
from trainverify.graph.communication import Communication, schedule
from trainverify.graph.lineage import Layout, Parts, Placements
from trainverify.graph.mesh import Mesh
from trainverify.graph.obligations import Holding, Obligation
from trainverify.graph.plan import Plan, Template
from trainverify.graph.program import Output, Program
from trainverify.ops.table import OpTable
from trainverify.prove.algebra.folding import fold


def single(program: Program) -> Plan:
    """A program as a plan on one device: every source lives there whole."""
    lineage = tuple(Layout(n, n, Placements(())) for n in program.sources)
    return Plan(program.name, Mesh(one=1), (Template(program, (0,)),), {}, lineage)


def related(logical: Program, plan: Plan, ops: OpTable, parts: Sequence[Template], wanted: Sequence[Obligation]) -> System:
    """The axes of both programs together."""
    talk = Communication(plan, parts, ops)
    order = schedule(talk)
    system = best = System(logical, plan, ops, talk, order).collect(wanted)
    flat = [False, True] if any(isinstance(lay.form, Parts) for lay, _ in system.holdings()) else [False]
    shifts = [False, True] if system.inference.overlaps else [False]
    for how in [(f, s) for s in shifts for f in flat][1:]:
        if best.inference.axes.clashes:
            other = System(logical, plan, ops, talk, order, flat=how[0], shifts=how[1]).collect(wanted)
            best = min(best, other, key=lambda x: len(x.inference.axes.clashes))
    return best


def folded(system: System) -> tuple[int, int]:
    """Into how many programs ranks fold, and the ops of these together."""
    instances = fold(system)
    units_of = [system.schedule.classes[i.class_index].unit for i in instances]
    return len(instances), sum(len(system.unit_programs[u].ops) for u in units_of)


def declared(logical: Program, plan: Plan, parts: Sequence[Template], wanted: Sequence[Obligation]) -> list[Obligation]:
    """Lineage of intermediate tensors is a claim: it becomes an obligation of its own."""
    demanded: dict[Layout, set[int]] = {}  # where a claim is an obligation already
    for h in (h for o in wanted for h in o.holdings):
        demanded.setdefault(h.layout, set()).update(h.ranks)
    sources = frozenset(logical.sources)
    given = [frozenset(u.program.sources) for u in parts]
    claims: dict[str, list[Holding]] = {}
    for lay in dict.fromkeys(plan.lineage):
        if lay.logical in sources:  # ranks that compute it, as those that gather a parameter, only say that they have it
            made = [u for u, here in zip(parts, given, strict=True) if lay.local in u.program.tensors and lay.local not in here]
            own = {r for u in made for r in u.ranks}
            ranks = tuple(r for r in lay.holders(plan.mesh) if r in own) if own else ()
        else:
            ranks = lay.holders(plan.mesh)
        if lay in demanded:
            ranks = tuple(r for r in ranks if r not in demanded[lay])
        if ranks:
            claims.setdefault(lay.logical, []).append(Holding(lay, ranks))
    return [Obligation(Output(name, "declared"), tuple(holdings)) for name, holdings in claims.items()]


def assumptions(logical: Program, plan: Plan) -> tuple[str, ...]:
    """What no plan can show: printed with every verdict."""
    found = ["arithmetic is that of real numbers: rounding, kernels and the network are out of scope"]
    replicas = sorted({lay.logical for lay in plan.lineage if lay.logical in (*logical.parameters, *logical.state)})
    if replicas and plan.mesh.size > 1:
        found.append("before the step all copies of a parameter or state element are equal on the ranks that hold it")
    for lay in plan.lineage:
        if lay.logical in logical.inputs and isinstance(plan, Plan) and plan.mesh.size > 1:
            found.append(f"the batch arrives as {lay}")
    padded = sorted(
        {lay.local for lay in plan.lineage if isinstance(lay.form, Parts) and any(p.padding for _, ps in lay.form.by_rank for p in ps)}
    )
    if padded:
        found.append(f"before the step the padding of {names(padded)} is zero")
    found += [f"input {n} holds {d}" for n, d in logical.domains.items()]
    found.append(f"the loss is the logical program's, as {logical.name!r} writes it")
    return tuple(found)
