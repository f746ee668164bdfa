"""How two polynomials are shown equal."""

from __future__ import annotations

from trainverify.domains.polynomials import Poly, Scalars
from trainverify.prove.staged.check import equal
from trainverify.prove.staged.solver import Z3


def shown(s: Scalars, a: Poly, b: Poly, ask: bool = False) -> str | None:
    return equal(s, a, b, s.needs, Z3(5) if ask else None).how
