"""How many elements, ops and obligations each way of evaluating, deciding and searching is tried on."""

from __future__ import annotations

MAX_ELEMENTS = 100_000_000  # of all tensors of all ranks together, in one evaluation that keeps them
EVALUATED = 2_000_000_000  # in one that drops them when they are used
FULL = 1 << 60  # nothing larger than this shrinks
ENCLOSED = 40_000_000  # elements up to which enclosures decide rounding noise on what is proved
WALKED = 500_000  # ops of all folded programs of a plan whose ranks do not fold, up to which it is proved
LOCATED = 4_000_000  # elements up to which enclosures are run one by one
SEARCHED = 20_000_000  # elements up to which the first wrong tensor is searched for, for as long as a search may take
DECIDED = 40  # obligations that enclosures look at one by one before there is no verdict
CLEAR = 1e-3  # relative difference that needs no larger one
UNREACHED = 5  # conditions named that never fell the other way
FURTHER = 12  # points more than asked for, where there is no verdict and few elements
CLOSE_LOOK = 200_000  # elements up to which enclosures look at what float64 calls equal
