"""Tensors that a step keeps by hand, in variables, containers and attributes: which of them are compared, and what a difference means.

They are found by their path, which ranks and the reference may use for other things: a log, a part of something, a buffer that is cleared
first. So a tensor is compared only if a later step uses it, and one that differs gives no verdict instead of a wrong one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from trainverify.check.findings import Finding
from trainverify.graph.program import Op, Program
from trainverify.ops import OPS
from trainverify.report import Report
from trainverify.torch.captured import Captured
from trainverify.torch.way import Way

HINT = "keep it under the same name on both sides, or as a buffer of the model"


def settled(ways: Sequence[Way]) -> list[Way]:
    """All steps without tensors kept by hand that no step uses; of what one side has only, a finding says that there is no verdict."""
    captured = [c for w in ways for c in (w.reference, *w.ranks)]
    if not any(c.by_hand for c in captured):
        return list(ways)
    uses = {id(c): _uses(c) for c in captured}
    carried = {n for u in uses.values() for names in u.values() for n in names}
    needed = _needed(list(uses.values()))
    states = {n for c in captured for n in c.by_hand} - {n for c in captured for n in c.program.parameters}
    log = {n for c in captured for n in states if n not in carried or (n not in needed and _numbers(c.program, n) == 1)}
    return [_settled(w, log, carried) for w in ways]


def _settled(way: Way, log: set[str], carried: set[str]) -> Way:
    one, ranks = _without(way.reference, log), [_without(c, log) for c in way.ranks]
    there = {n for c in ranks for n in c.by_hand}
    text = "{}, a number that a step leaves and the next one uses, is compared with nothing: nothing that is compared depends on it"
    found = [Finding("TV505", text.format(n), None, n, severity="warning") for n in way.reference.by_hand if n in log & carried]
    text = "{}, which a step leaves and no step uses, is compared with nothing"
    unused = [n for n in sorted(log - carried) if any(_numbers(c.program, n) > 1 for c in (way.reference, *way.ranks))]
    found += [Finding("TV505", text.format(n), None, n, severity="warning") for n in unused]
    found += [_finding(n, "in the reference only") for n in one.by_hand if n not in there]
    found += [_finding(n, "on ranks only") for n in sorted(there.difference(one.by_hand))]
    return replace(way, reference=replace(one, findings=[*one.findings, *found]) if found else one, ranks=tuple(ranks))


def _finding(name: str, where: str) -> Finding:
    text = f"{name}, which a step leaves and the next one uses, is there {where}: it is compared with nothing"
    return Finding("TV505", text, None, name, None, HINT, "unsupported")


def _without(c: Captured, names: set[str]) -> Captured:
    """What was captured without some tensors kept by hand."""
    gone = names.intersection(c.by_hand)
    if not gone:
        return c
    p = c.program
    outputs = tuple(o for o in p.outputs if o.of not in gone)
    needed, ops = {o.tensor for o in outputs}, list[Op]()
    for op in reversed(p.ops):
        if _talks(op) or not needed.isdisjoint(op.outputs):
            ops.append(op)
            needed.update(i for i in op.inputs if i is not None)
    made = {o for op in ops for o in op.outputs}
    sources = [tuple(n for n in some if n not in gone or n in needed) for some in (p.parameters, p.state)]
    kept = {*p.inputs, *sources[0], *sources[1]}
    tensors = {n: t for n, t in p.tensors.items() if n in made or n in kept}
    domains = {n: d for n, d in p.domains.items() if n in tensors}
    program = replace(
        p, tensors=tensors, ops=tuple(reversed(ops)), outputs=outputs, parameters=sources[0], state=sources[1], domains=domains
    )
    return replace(c, program=program, by_hand=tuple(n for n in c.by_hand if n not in gone))


def _talks(op: Op) -> bool:
    definition = OPS.definitions.get(op.name)
    return definition is not None and (definition.collective or definition.point_to_point)


def _uses(c: Captured) -> Mapping[str, set[str]]:
    """By what the step makes (an output, or a message), the tensors kept by hand that it depends on."""
    p, hand = c.program, set(c.by_hand)
    of: dict[str, frozenset[str]] = {n: frozenset((n,)) for n in (*p.state, *p.parameters) if n in hand}
    found: dict[str, set[str]] = {"": set()}
    for op in p.ops:
        used = frozenset[str]().union(*(of.get(i, frozenset()) for i in op.inputs if i is not None))
        if used:
            of.update(dict.fromkeys(op.outputs, used))
            if _talks(op):
                found[""] |= used
    left = {op.outputs[0]: op.inputs[0] for op in p.ops if op.name == "identity"}
    for o in p.outputs:
        if o.of is None or (left.get(o.tensor) != o.of and o.tensor != o.of):  # what is left as it was is not used
            found.setdefault(str(o.of) if o.of in hand else "", set()).update(of.get(o.tensor, ()))
    return found


def _needed(uses: Sequence[Mapping[str, set[str]]]) -> set[str]:
    """What something else than tensors kept by hand depends on, if only steps later."""
    found = {n for u in uses for n in u.get("", ())}
    while more := {n for u in uses for name in found for n in u.get(name, ())} - found:
        found |= more
    return found


def _numbers(p: Program, name: str) -> int:
    kind = p.tensors.get(name)
    return 0 if kind is None else math.prod(kind.shape)


def weighed(reports: Sequence[tuple[Way, Report]]) -> list[tuple[Way, Report]]:
    """What differs in tensors kept by hand alone may be right: ranks may keep their part. No step that starts from it is refuted.

    The first step does not: it has the values that they are made with."""
    wrong = {n for w, r in reports for n in _differing(w, r)}
    return [(w, _weighed(w, r, wrong)) for w, r in reports]


def _differing(way: Way, report: Report) -> Iterator[str]:
    hand = _states(way)
    for o in report.obligations:
        kept = next((n for n in hand if o.name.endswith(f" state {n}")), None)
        if kept is not None and o.status != "proved":
            yield kept


def _states(way: Way) -> list[str]:
    """What is kept by hand but for parameters, which are ordinary ones: a rank's part of one is smaller."""
    return [n for n in way.reference.by_hand if n not in way.reference.program.parameters]


def _weighed(way: Way, report: Report, wrong: set[str]) -> Report:
    hand = _states(way)
    started = sorted(wrong.intersection(hand, *[{i for c in (way.reference, *way.ranks) for op in c.program.ops for i in op.inputs}]))
    alone = sorted(set(_differing(way, report)))
    others = [o for o in report.obligations if o.status == "different" and not any(o.name.endswith(f" state {n}") for n in hand)]
    if report.verdict not in ("REFUTED", "INVALID") or (others and not started) or not (started or alone):
        return report
    which = (alone or started)[0]
    reason = (
        f"{which}, which the step keeps by hand, is not shown to be the same on ranks (they may keep their part of it): {report.reason}"
    )
    return replace(report, verdict="UNKNOWN", reason=reason)


__all__ = ["settled", "weighed"]
