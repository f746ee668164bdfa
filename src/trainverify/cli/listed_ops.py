"""`--list-ops`: the ops of captured code, with how often they run and whether they have a meaning here."""

from __future__ import annotations

from collections.abc import Sequence

from trainverify.terminal import emit, out


def listed_ops(command: str, found: Sequence[tuple[str, int, str]], as_json: bool) -> int:
    """Print them; the exit code, 3 if one has no meaning."""
    code = 3 if any(status != "mapped" for _, _, status in found) else 0
    if as_json:
        return emit(command, code, ops=[{"op": n, "count": k, "status": status} for n, k, status in found])
    for n, k, status in found:
        out.print(f"{k:6} {n:50} {status}", markup=False)
    return code
