"""Programs: sources, outputs, preconditions, function bodies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from trainverify.check.bodies import Bodies
from trainverify.check.findings import Report
from trainverify.check.operators import malformed
from trainverify.graph.plan import Template
from trainverify.graph.program import Domain, Function, Program

_DOMAINS: Final = ("ids", "nonnegative", "positive", "indicator")


def check_program(program: Program, functions: Mapping[str, Function], bodies: Bodies, logical: bool, unit: Template | None = None) -> bool:
    """One program with the functions it may call. False where its calls cannot be followed."""
    known = {**functions, **program.functions}
    for name, function in known.items():
        if function.name != name:
            bodies.report.add("TV107", f"function {function.name} is stored under the name {name!r}")
    if bodies.cycles(known):
        return False
    for function in known.values():
        bodies.check(function, known)
    bodies.check(program, known)
    bodies.references(program, known, unit)
    _outputs(program, bodies.report, logical)
    _domains(program, bodies.report)
    return True


def _outputs(program: Program, report: Report, logical: bool) -> None:
    made = {*program.sources, *(o for op in program.ops for o in op.outputs)}
    wanted = {n for o in program.outputs for n in (o.tensor, o.of)}
    types = {n: t for n, t in program.tensors.items() if n in wanted and malformed(t) is None}
    parameters = frozenset(program.parameters)
    homes = {"gradient": parameters, "parameter": parameters, "state": frozenset(program.state)}
    seen: set[tuple[str, str | None]] = set()
    for output in program.outputs:

        def bad(message: str, tensor: str = output.tensor) -> None:
            report.add("TV108", f"{program.name}: {message}", tensor=tensor)

        if output.role not in ("loss", "metric", *homes):
            bad(f"{output.tensor!r} has the unknown role {output.role!r}")
            continue
        if (output.role, output.of) in seen:
            bad(f"there are two outputs for the {output}" if output.role == "loss" else f"there are two outputs for {output}")
        seen.add((output.role, output.of))
        if output.tensor not in made:
            bad(f"{output}: nothing defines {output.tensor!r}")
            continue
        kind = types.get(output.tensor)
        if kind is None:
            continue
        if output.role == "loss" and (output.of is not None or kind.kind != "real"):
            bad(f"the loss {output.tensor!r} is {kind}" if output.of is None else f"the loss is of nothing, not of {output.of!r}")
        elif output.role == "metric" and not output.of:
            bad(f"the metric {output.tensor!r} has no name")
        elif output.role in homes:
            home = "state" if output.role == "state" else "parameter"
            if output.of not in homes[output.role]:
                bad(f"{output}: there is no {home} {output.of!r}")
                continue
            old = types.get(str(output.of))
            if old is None:
                continue
            if (output.role != "gradient" and kind != old) or (
                output.role == "gradient" and (kind.kind != "real" or (logical and kind.shape != old.shape))
            ):
                bad(f"{output}: {output.tensor!r} is {kind}, {output.of!r} is {old}")


def _domains(program: Program, report: Report) -> None:
    for name in program.inputs:
        kind = program.tensors.get(name)
        if malformed(kind) is None and kind is not None and kind.kind == "int":
            domain = program.domains.get(name)
            if domain is None or domain.kind not in ("ids", "nonnegative"):
                hint = f"say what it indexes: Domain('ids', size) for {name!r}"
                report.add("TV109", f"{program.name}: input {name!r} is {kind}", tensor=name, hint=hint)
    sources = frozenset(program.sources)
    for name, domain in program.domains.items():
        if name not in sources:
            report.add("TV109", f"{program.name}: a range is declared for {name!r}, which is not a source", tensor=name)
        elif not isinstance(domain, Domain) or domain.kind not in _DOMAINS:
            report.add("TV109", f"{program.name}: {name!r}: {domain!r} is not a range", tensor=name)
        elif domain.kind == "ids":
            kind = program.tensors.get(name)
            if type(domain.size) is not int or domain.size < 1 or type(domain.ignore) not in (int, type(None)):
                report.add("TV109", f"{program.name}: {name!r}: {domain} has no size", tensor=name)
            elif malformed(kind) is None and kind is not None and kind.kind != "int":
                report.add("TV109", f"{program.name}: {name!r} is {kind} and cannot hold {domain}", tensor=name)
        elif domain.size is not None or domain.ignore is not None:
            report.add("TV109", f"{program.name}: {name!r}: {domain.kind} has no size", tensor=name)
