"""A program of a campaign, what a real run says about it, and what our verdict says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

STEPS: Final = 3
MORE: Final = 6  # steps after these, for programs that go wrong later
PATIENCE: Final = 300.0  # seconds of a run before it counts as a hang
TOLERANCE: Final = 1e-9


class Program(Protocol):
    """A file with both sides of a step."""

    @property
    def seed(self) -> int: ...

    @property
    def family(self) -> str: ...

    @property
    def names(self) -> tuple[str, ...]: ...  # of its pieces

    @property
    def mistake(self) -> str: ...  # that is planted in it, or nothing

    @property
    def source(self) -> str: ...


@dataclass(frozen=True)
class Truth:
    """`step` is the first one after which something differs, and `what` differs; `error` says why there was no run.

    Gradients that a step leaves behind are no result of it: `gradients` says whether these differ where nothing else does."""

    step: int | None = None
    what: str = ""
    gradients: bool = False
    error: str = ""

    @property
    def right(self) -> bool:
        return not self.error and self.step is None

    @property
    def later(self) -> bool:
        return self.step is not None and self.step > STEPS


@dataclass(frozen=True)
class Verdict:
    """`name` is a verdict, or CRASH or TIMEOUT; `later`: the report says what it assumes of later steps."""

    name: str
    reason: str
    later: bool
    seconds: float


@dataclass(frozen=True)
class Outcome:
    program: Program
    truth: Truth
    verdict: Verdict

    @property
    def kind(self) -> str:
        if self.truth.error:
            return "does not run"
        if self.truth.right:
            return "right but gradients" if self.truth.gradients else "right"
        return "later" if self.truth.later else "wrong"

    @property
    def bad(self) -> str:
        """Why this program is judged wrongly, or nothing."""
        if self.kind == "wrong" and self.verdict.name == "PROVED":
            return "wrong PROVED"
        if self.kind == "right" and self.verdict.name in ("REFUTED", "INVALID"):
            return f"right {self.verdict.name}"
        if self.kind == "later" and self.verdict.name == "PROVED" and not self.verdict.later:
            return "later PROVED without its line"
        return "CRASH" if self.verdict.name == "CRASH" else ""

    @property
    def line(self) -> str:
        program, verdict = self.program, self.verdict
        chosen = f"{program.family}: {', '.join(program.names)}; {program.mistake or 'no mistake'}"
        truth = self.truth.error or (f"step {self.truth.step}, {self.truth.what}" if self.truth.step else "right")
        return f"seed {program.seed} ({chosen}): {verdict.name} {verdict.reason[:160]}; truth: {truth}"
