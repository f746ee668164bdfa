"""Whether a program and a plan are well-formed: default-deny, and apart from everything that proves something."""

from trainverify.check.findings import CODES, Finding
from trainverify.check.validate import ill_formed, validate

__all__ = ["CODES", "Finding", "ill_formed", "validate"]
