"""What an adapter replaces in a framework so that it runs without its accelerator: data, listed with every verdict."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from trainverify.report import Report

PLACED: Final = "it changes where tensors are, no value"
PLACE: Final = "the step is that of the processor: branches on the device are taken as there, and the order of streams is not covered"


@dataclass(frozen=True)
class Shim:
    """One replacement: where it is, what takes its place, and why. `apply` puts it there, for the rest of the process, given the
    configuration of the job. `stays` says why a real run cannot do without it either: such a run shows nothing about it. `harmless` says
    why it changes no value, only where tensors are or when work is done: then nothing need be shown."""

    name: str
    replaces: str
    why: str
    apply: Callable[[Any], None] = field(compare=False, repr=False)
    stays: str = ""
    harmless: str = ""

    def __str__(self) -> str:
        return f"shim {self.name}: {self.replaces}: {self.why}"


@dataclass(frozen=True)
class Checked:
    """A real run without shims, next to a capture with them: whether both agree, and on what, or where they differ. Without `ran` there
    was no such run."""

    agrees: bool
    text: str
    ran: bool = True


def listed(
    report: Report,
    shims: Sequence[Shim],
    framework: str,
    more: Sequence[str] = (),
    accepted: bool = True,
    checked: Checked | None = None,
) -> Report:
    """The report with the number of shims in its verdict line, and each of them among the assumptions.

    A proof that rests on shims that are neither accepted nor checked is none."""
    seen = checked is not None and checked.agrees
    open_ones = [s for s in shims if not s.harmless and (s.stays or not seen)]
    shown = sum(not s.stays for s in shims) if seen else 0
    counted = f"{len(shims)} shims" + ("" if checked is None else f", {shown} of them checked by a real run")
    told = "".join(f"; {m}" for m in more)
    reason = f"{report.reason}; {framework}, {counted}{told}"
    verdict = report.verdict
    if report.verdict.startswith("PROVED") and open_ones and not accepted:
        names = ", ".join(s.name for s in open_ones)
        why = "" if checked is None or seen else f" ({checked.text})"
        reason = f"{report.verdict} if shims change nothing, and not all are checked{why}: {names} (--accept-shims accepts them); {reason}"
        verdict = "UNKNOWN"
    if report.verdict == "REFUTED" and checked is not None and checked.ran and not checked.agrees:
        reason = f"a real run contradicts what was captured ({checked.text}): {reason}"
        verdict = "UNKNOWN"
    return replace(
        report,
        verdict=verdict,
        reason=reason,
        assumptions=(
            *report.assumptions,
            *([PLACE] if any(s.harmless for s in shims) else []),
            *(f"{s} ({_status(s, checked, accepted)})" for s in shims),
        ),
        notes=report.notes if checked is None else (*report.notes, f"shims: {checked.text}"),
    )


def _status(shim: Shim, checked: Checked | None, accepted: bool) -> str:
    if checked is not None and checked.agrees and not shim.stays:
        return "checked: a real run without it agrees"
    if shim.harmless:
        return shim.harmless
    why = f": {shim.stays}" if shim.stays else ""
    return f"{'accepted, ' if accepted else ''}not checked{why}"


def stays_on_cpu(config: Any) -> None:
    """A module that is on the processor and is asked to move there stays as it is."""
    import torch

    original = torch.nn.Module.to

    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        there = torch._C._nn._parse_to(*args, **kwargs)[0]
        if there is not None and all(p.device.type == there.type == "cpu" for p in self.parameters()):
            return self
        return original(self, *args, **kwargs)

    torch.nn.Module.to = to


PLACEMENT: Final = Shim(
    "placement", "Module.to leaves a model that is on the processor as it is", "fake parameters cannot be swapped in place", stays_on_cpu
)
