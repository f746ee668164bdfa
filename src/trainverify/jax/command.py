"""`trainverify jax`: what the command line does."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from trainverify import files
from trainverify.graph.mesh import Mesh
from trainverify.jax.devices import answered, questions, unanswered
from trainverify.jax.judge import Pair, judge, pair
from trainverify.jax.mappings import MAPPINGS
from trainverify.jax.replay import replay
from trainverify.ops.table import OpTable
from trainverify.prove.attempt import Engine
from trainverify.report import Report
from trainverify.translate.emit import Unmapped
from trainverify.translate.targets import CaptureError, module_of, resolve

Progress = Callable[[str], None]
MOST_DEVICES: Final = 64


@dataclass(frozen=True)
class Subject:
    """What was traced, and from what."""

    reference: Callable[..., Any]
    distributed: Callable[..., Any]
    args: tuple[Any, ...]
    made: Pair


def mesh_of(text: str | None) -> Mesh | None:
    """`dp=8,tp=4`."""
    if text is None:
        return None
    try:
        return Mesh({n.strip(): int(k) for n, _, k in (part.partition("=") for part in text.split(","))})
    except ValueError as error:
        raise CaptureError(f"--mesh {text!r}: expected axes and sizes such as dp=8,tp=4") from error


def host_devices(mesh: str | None) -> None:
    """As many host devices as the mesh has ranks, unless the user says otherwise. JAX reads this when it first looks for devices."""
    named = mesh_of(mesh)
    flag = "--xla_force_host_platform_device_count"
    if named is not None and flag not in os.environ.get("XLA_FLAGS", ""):
        if named.size > MOST_DEVICES:
            raise CaptureError(f"{named} has {named.size} ranks: compiling and running need host devices, at most {MOST_DEVICES}")
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}={named.size}".strip()


def subject(reference: str, distributed: str, mesh: str | None, table: OpTable, tell: Progress, hlo: bool = False) -> Subject:
    """Two functions of files; the file of the second says what the arguments are (`args`), and may say `mesh`, `roles` and `meanings`."""
    tell("reading the files")
    with questions() as asked:
        one = resolve(reference)
        space = vars(module_of(distributed))
    many = space[distributed.rpartition(":")[2]]
    if "args" not in space:
        raise CaptureError(
            f"{distributed.rpartition(':')[0]} has no `args`: what the step takes, as a tuple (jax.ShapeDtypeStruct, tvj.Ids)"
        )
    given = space["args"]() if callable(space["args"]) else space["args"]
    named = mesh_of(mesh) or space.get("mesh")
    made = pair(one, many, given, named, space.get("roles"), table, space.get("meanings"), tell, "hlo" if hlo else "jaxpr")
    findings, assumed = unanswered(asked, made.plan.mesh), answered(asked)
    made = replace(made, findings=(*made.findings, *findings), assumed=(*made.assumed, *assumed))
    return Subject(one, many, tuple(given), made)


def verdict(
    s: Subject, table: OpTable, points: int, seed: int, engine: Engine, replayed: bool, folder: Path | None, tell: Progress
) -> Report:
    """The report, after writing the programs and replaying them if that is asked for."""
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        files.write(folder / "reference.logical.json.gz", s.made.logical)
        files.write(folder / "ranks.plan.json.gz", s.made.plan)
    report = judge(s.made, table, points, seed, engine, tell)
    if not replayed or report.verdict in ("UNKNOWN", "INVALID"):
        return report
    tell("running JAX")
    found = replay(s.reference, s.distributed, s.args, s.made, table, seed)
    if found.agrees:
        return replace(report, notes=(*report.notes, str(found)))
    return replace(report, verdict="UNKNOWN", reason=f"the translation is not what runs: {found}")


def operations(s: Subject) -> list[tuple[str, int, str]]:
    """Every primitive of both programs: its name, how often it runs, and `mapped` or why it has no meaning here."""
    counts: Counter[str] = Counter()
    why: dict[str, str] = {}
    for part in s.made.parts:
        counts.update(part.calls)
        for name, m in part.missing.items():
            why.setdefault(name, f"{m.reason} ({m.source})")
    return [(n, k, why.get(n, "mapped")) for n, k in sorted(counts.items(), key=lambda x: (x[0] not in why, x[0]))]


def mapped() -> list[str]:
    """All primitives with a row."""
    return sorted(MAPPINGS)


__all__ = ["CaptureError", "Subject", "Unmapped", "host_devices", "mapped", "mesh_of", "operations", "subject", "verdict"]
