"""What larger sizes and models of the solver show where random points at reduced sizes agree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction

import numpy as np

from trainverify.axes.reduction import NotABoundary
from trainverify.domains.arrays import Array
from trainverify.domains.numeric import NUMERIC
from trainverify.evaluate.compare import DIFFERENT, Difference, decide, suspects
from trainverify.evaluate.run import NotComputed, elements, random_inputs, run_logical, run_plan
from trainverify.evaluate.small import Small, shrink_system
from trainverify.explain.place import Place
from trainverify.prove.staged.reduce import reduced
from trainverify.report import Report
from trainverify.verdicts import budgets
from trainverify.verdicts.case import Case, compare_at
from trainverify.verdicts.decision import CLASSES, refuted, settled, sliced


def at_other_sizes(case: Case) -> Report | None:
    """A proof at reduced sizes must not rest on them: one evaluation at the original ones, else at larger ones, which may refute."""
    small = None if case.kept else case.full_size(budgets.LOCATED)
    if small is None:
        try:
            small = shrink_system(case.system, base=3, kept=case.kept)
        except NotABoundary:
            return None
    if elements(small) > budgets.MAX_ELEMENTS:
        return None
    case.progress("evaluating at other sizes")
    try:
        wrong, _ = compare_at(small, case.plan, case.wanted, case.seed)
    except NotComputed as error:
        return case.open(f"proved at reduced sizes only, and at others {error}", "not compared")
    return settled(case, small, wrong, case.seed) if wrong else None


def at_full_size(case: Case) -> Report | None:
    """A difference at full size that reduced sizes do not show, of a plan that is not proved."""
    if case.whole:
        return None
    small = case.full_size(budgets.LOCATED)
    if small is not None:
        case.progress("evaluating at full size")
        try:
            wrong, _ = compare_at(small, case.plan, case.wanted, case.seed)
        except NotComputed:
            return None
        wrong = [s for s in wrong if s.distance > DIFFERENT]
        if not wrong:
            return None
        found = settled(replace(case, whole=True), small, wrong, case.seed)
        return found if found is not None and found.verdict == "REFUTED" else None
    failed = [o for o in case.wanted if o in case.proof.failed]
    if case.by_classes is not None:
        case.progress("evaluating at full size, on classes")
        seen = case.by_classes.seen(failed, everywhere=True)
        difference = case.by_classes.decide(seen)[1] if seen.differs else None
        if difference is not None:
            return unlocated(case, difference)
    return sliced(case, failed, case.seed)[0]


def unlocated(case: Case, difference: Difference) -> Report:
    """REFUTED by a difference on classes only."""
    o = difference.obligation
    case.stop_if_contested([o])
    place = Place(o.output.tensor, None, difference.rank, difference.layout.local, None, "seen at full size only: not searched")
    reason = f"{o} differs on rank {difference.rank}; first wrong tensor: {place.named} on rank {place.rank}"
    note = f"counterexample: random inputs of seed {difference.seed}, {CLASSES}"
    return Report("REFUTED", reason, case.subject, case.findings, case.shown("agreed", {o: "different"}), difference, place, notes=(note,))


def confirmed(case: Case) -> Report | None:
    """PROVED, of a plan too large to evaluate otherwise, where classes say the same of every obligation."""
    if case.proof.failed or case.proof.reduced or case.by_classes is None:
        return None
    seen = case.by_classes.seen(case.wanted)
    if not all(seen.says(o) == "agrees" for o in case.wanted):
        return None
    reason = f"{len(case.wanted)} obligations at full size; evaluation on classes of positions agrees"
    notes = (*case.proof.lint, *case.proof.notes)
    return Report("PROVED", reason, case.subject, case.findings, case.shown("agreed"), assumptions=case.proof.preconditions, notes=notes)


def replayed(case: Case) -> Report | None:
    """Inputs for which the solver says that an obligation fails, tried at full size: where something shrank for the solver, repeated."""
    for o, model in case.proof.models.items():
        small = reduced(case.system) if model else None
        if small is None:
            continue
        inputs = _inputs(small, model)
        if any((inputs[n] > d.most).any() for n, d in small.domains.items() if n in inputs):
            continue
        if case.less(small):
            small = case.full_size(budgets.LOCATED)
            if small is None:
                continue
            inputs = {n: _repeated(v, small.shapes[n]) for n, v in inputs.items()}
        try:
            logical, local = run_logical(small, inputs, NUMERIC), run_plan(small, case.plan.lineage, inputs, NUMERIC)
            wrong, _ = suspects(small, [o], logical, local)
        except NotComputed:
            continue
        for suspect in wrong:
            decision, difference = decide(small, case.plan.lineage, suspect, inputs, -1)
            if decision == "different" and difference is not None:
                return refuted(case, small, wrong, difference, inputs)
    return None


def _repeated(values: Array, shape: Sequence[int]) -> Array:
    return values[np.ix_(*(np.arange(n) % m for n, m in zip(shape, values.shape, strict=True)))]


def _inputs(small: Small, values: Mapping[str, Mapping[int, Fraction]]) -> dict[str, Array]:
    """Random inputs with some elements replaced."""
    inputs = random_inputs(small, 0)
    for name, cells in values.items():
        flat = inputs[name].reshape(-1).copy()
        for at, v in cells.items():
            flat[at] = v
        inputs[name] = flat.reshape(inputs[name].shape)
    return inputs
