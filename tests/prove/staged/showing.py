"""Whether the staged engine shows an equality."""

from __future__ import annotations

from tools.campaign.agree import staged
from trainverify.graph.program import Program
from trainverify.verdicts import single


def shown(logical: Program, plan: Program) -> set[str]:
    """What stages show of a plan on one device, without any evaluation beside them."""
    return {str(o) for o in staged(logical, single(plan)).proved}
