"""The verdict: validate, try to prove, and evaluate beside it, obligation by obligation."""

from trainverify.verdicts.budgets import FULL, MAX_ELEMENTS
from trainverify.verdicts.case import Progress, compare_at
from trainverify.verdicts.decision import Disagreement
from trainverify.verdicts.inspection import lineage, reduction
from trainverify.verdicts.judge import refuted_at, verify
from trainverify.verdicts.prepared import assumptions, declared, related, single

__all__ = [
    "FULL",
    "MAX_ELEMENTS",
    "Disagreement",
    "Progress",
    "assumptions",
    "compare_at",
    "declared",
    "lineage",
    "reduction",
    "refuted_at",
    "related",
    "single",
    "verify",
]
