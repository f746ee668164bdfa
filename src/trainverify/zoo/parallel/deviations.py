"""Where a plan of the zoo deviates from the step on one device, on purpose."""

from __future__ import annotations

from dataclasses import dataclass, fields

from trainverify.build.tape import BuildError


@dataclass(frozen=True)
class Deviations:
    """Each is REFUTED unless the approximation of the same meaning is allowed."""

    local_batch_norm: bool = False  # every rank normalises by its own images
    node_limited: int | None = None  # the experts of a token lie on so many expert-parallel ranks
    rank_capacity: int | None = None  # an expert takes so many tokens of a rank's micro-batch, and drops the others
    no_auxiliary: bool = False  # the balance of experts is reported, but not differentiated

    def only(self, model: str, *built: str) -> None:
        """Refuse what plans of a model do not have."""
        for f in fields(self):
            if f.name not in built and getattr(self, f.name) != f.default:
                raise BuildError(f"plans of {model} have no --{f.name.replace('_', '-')}")
        for name in ("node_limited", "rank_capacity"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise BuildError(f"--{name.replace('_', '-')} must be 1 or more")


NONE = Deviations()
