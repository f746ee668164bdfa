"""`trainverify lineage`: which logical tensor every tensor of a plan is."""

from __future__ import annotations

from pathlib import Path

from trainverify.check import Finding
from trainverify.cli.findings import show_findings
from trainverify.cli.user_ops import OpsFile, table_with
from trainverify.cli.verify import both
from trainverify.prove.algebra.discover import Found
from trainverify.terminal import AsJson, emit, guarded, out, progress
from trainverify.verdicts import lineage


@guarded
def command(logical: Path, plan: Path, as_json: AsJson = False, ops: OpsFile = None) -> int:
    """Which logical tensor every tensor of PLAN is, and how it lies on the mesh: discovered, not declared."""
    table = table_with(ops)
    program, other = both(logical, plan)
    with progress(as_json) as tell:
        found = lineage(program, other, table, tell)
    wrong = [f for f in found if isinstance(f, Finding)]
    if wrong:
        return show_findings(wrong, as_json, plan.name)
    rows = [f for f in found if isinstance(f, Found)]
    if as_json:
        shown = [{**vars(f), "factor": str(f.factor)} for f in rows]
        return emit("lineage", 0, subject=plan.name, tensors=shown)
    for f in rows:
        out.print(str(f), markup=False, highlight=False)
    return 0
