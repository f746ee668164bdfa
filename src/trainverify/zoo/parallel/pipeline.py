"""The order of forward and backward passes on a pipeline stage, with what it sends and receives.

Sends and receives block until both sides are there, as in NCCL; the two directions of a steady 1F1B step start together.
"""

from __future__ import annotations

from collections.abc import Callable

from trainverify.build.plan import RankBuilder
from trainverify.build.tape import BuildError, Tensor
from trainverify.zoo.parallel.degrees import Degrees


class Pipeline:
    """`forward(m, x)` is micro-batch m's pass through the stage, from what the stage before sent (None on the first one).

    `done` is called after every backward pass.
    """

    def __init__(
        self,
        r: RankBuilder,
        how: Degrees,
        stage: int,
        shape: tuple[int, ...],
        forward: Callable[[int, Tensor | None], Tensor],
        done: Callable[[], None],
    ):
        self.r = r
        self.how = how
        self.stage = stage
        self.shape = shape
        self.forward_pass = forward
        self.done = done
        self.received: dict[int, Tensor] = {}
        self.made: dict[int, Tensor] = {}
        self.gradient: dict[int, Tensor] = {}  # of what was made
        self.passed: dict[int, Tensor] = {}  # gradient of what was received

    def run(self) -> None:
        if self.how.schedule == "interleaved":
            raise BuildError("plans have no interleaved schedule")
        (self.gpipe if self.how.schedule == "gpipe" else self.one_forward_one_backward)()

    def gpipe(self) -> None:
        """All forward passes, then all backward passes."""
        for m in range(self.how.microbatches):
            self.take(m)
            self.forward(m)
            self.give(m)
        for m in range(self.how.microbatches):
            self.take_gradient(m)
            self.backward(m)
            self.give_gradient(m)

    def one_forward_one_backward(self) -> None:
        """A stage runs ahead by as many forward passes as there are stages after it, then alternates."""
        count = self.how.microbatches
        ahead = min(self.how.pp - 1 - self.stage, count)
        for m in range(ahead):
            self.take(m)
            self.forward(m)
            self.give(m)
        if ahead < count:
            self.take(ahead)
        for m in range(ahead, count):
            back = m - ahead
            self.forward(m)
            self.give(m, f"steady.{m}.forward")
            self.take_gradient(back, f"steady.{m}.forward")
            self.backward(back)
            if m + 1 == count:
                self.give_gradient(back)
            else:
                self.give_gradient(back, f"steady.{m}.backward")
                self.take(m + 1, f"steady.{m}.backward")
        for m in range(count - ahead, count):
            self.take_gradient(m)
            self.backward(m)
            self.give_gradient(m)

    # -- one pass -----------------------------------------------------------------------------------------------------

    def forward(self, m: int) -> None:
        self.made[m] = self.forward_pass(m, self.received.get(m))

    def backward(self, m: int) -> None:
        seeds = [self.gradient[m]] if m in self.gradient else None
        received = [self.received[m]] if m in self.received else []
        for g in self.r.backward(self.made[m], seeds=seeds, wrt=received):
            self.passed[m] = g
        self.done()

    # -- between stages -----------------------------------------------------------------------------------------------

    def take(self, m: int, batch: str | None = None) -> None:
        if self.stage > 0:
            self.received[m] = self.r.recv(self.shape, self.r.peer(pp=self.stage - 1), batch=batch, name=f"mb{m}/received")

    def give(self, m: int, batch: str | None = None) -> None:
        if self.stage < self.how.pp - 1:
            self.r.send(self.made[m], self.r.peer(pp=self.stage + 1), batch=batch)

    def take_gradient(self, m: int, batch: str | None = None) -> None:
        if self.stage < self.how.pp - 1:
            self.r.phase = "backward"
            name = f"{self.made[m].name}.grad"
            self.gradient[m] = self.r.recv(self.shape, self.r.peer(pp=self.stage + 1), batch=batch, name=name)
            self.r.phase = "forward"

    def give_gradient(self, m: int, batch: str | None = None) -> None:
        if self.stage > 0:
            self.r.phase = "backward"
            self.r.send(self.passed[m], self.r.peer(pp=self.stage - 1), batch=batch)
            self.r.phase = "forward"
