"""The order of forward and backward passes on a pipeline stage, with what it sends and receives.

Sends and receives block until both sides are there, as in NCCL; the two directions of a steady step start together.
"""

from __future__ import annotations

from collections.abc import Callable

from trainverify.build.plan import RankBuilder
from trainverify.build.tape import Tensor
from trainverify.zoo.parallel.degrees import Degrees

Pass = tuple[int, int]  # a micro-batch, and which of the stage's chunks of layers it goes through


class Pipeline:
    """`forward(m, chunk, x)` is micro-batch m's pass through a chunk, from what was sent (None where the model begins).

    The chunk after the last stage's is the first stage's next one. `done` is called after every backward pass.
    """

    def __init__(
        self,
        r: RankBuilder,
        how: Degrees,
        stage: int,
        shape: tuple[int, ...],
        dtype: str,
        forward: Callable[[int, int, Tensor | None], Tensor],
        done: Callable[[], None],
    ):
        self.r = r
        self.how = how
        self.stage = stage
        self.shape = shape
        self.dtype = dtype  # of activations between stages
        self.forward_pass = forward
        self.done = done
        self.received: dict[Pass, Tensor] = {}
        self.made: dict[Pass, Tensor] = {}
        self.gradient: dict[Pass, Tensor] = {}  # of what was made
        self.passed: dict[Pass, Tensor] = {}  # gradient of what was received

    def run(self) -> None:
        {"gpipe": self.gpipe, "1f1b": self.one_forward_one_backward, "interleaved": self.interleaved}[self.how.schedule]()

    def gpipe(self) -> None:
        """All forward passes, then all backward passes."""
        for m in range(self.how.microbatches):
            self.take((m, 0))
            self.forward((m, 0))
            self.give((m, 0))
        for m in range(self.how.microbatches):
            self.take_gradient((m, 0))
            self.backward((m, 0))
            self.give_gradient((m, 0))

    def one_forward_one_backward(self) -> None:
        """A stage runs ahead by as many forward passes as there are stages after it, then alternates."""
        count = self.how.microbatches
        ahead = min(self.how.pp - 1 - self.stage, count)
        for m in range(ahead):
            self.take((m, 0))
            self.forward((m, 0))
            self.give((m, 0))
        if ahead < count:
            self.take((ahead, 0))
        for m in range(ahead, count):
            back = m - ahead
            self.forward((m, 0))
            self.give((m, 0), f"steady.{m}.forward")
            self.take_gradient((back, 0), f"steady.{m}.forward")
            self.backward((back, 0))
            if m + 1 == count:
                self.give_gradient((back, 0))
            else:
                self.give_gradient((back, 0), f"steady.{m}.backward")
                self.take((m + 1, 0), f"steady.{m}.backward")
        for m in range(count - ahead, count):
            self.take_gradient((m, 0))
            self.backward((m, 0))
            self.give_gradient((m, 0))

    def interleaved(self) -> None:
        """Megatron's order: as many micro-batches as there are stages go through a chunk, then through the next chunk.

        Step k of all forward passes is `ahead(k)`, of all backward passes `back(k)`. After every step one batch of sends and
        receives; what arrives from the last stage on the first one (and the other way round) left it some steps before.
        """
        pp, chunks = self.how.pp, self.how.chunks
        total = self.how.microbatches * chunks
        warm = total if self.how.microbatches == pp else min(total, 2 * (pp - 1 - self.stage) + (chunks - 1) * pp)

        def ahead(k: int) -> Pass:
            group, place = divmod(k, pp * chunks)
            return group * pp + place % pp, place // pp

        def back(k: int) -> Pass:
            m, chunk = ahead(k)
            return m, chunks - 1 - chunk

        def coming(k: int) -> Pass:
            """What the stage before has sent when forward step k is over here."""
            if self.stage > 0:
                return ahead(k + 1)
            m, chunk = ahead(k - (pp - 1))
            return m, chunk + 1

        def returning(k: int) -> Pass:
            """Of what the stage after has sent the gradient when backward step k is over here."""
            if self.stage < pp - 1:
                return back(k + 1)
            m, chunk = back(k - (pp - 1))
            return m, chunk - 1

        self.take(ahead(0))
        for k in range(warm):
            self.forward(ahead(k))
            batch = f"warm.{k}"
            self.give(ahead(k), batch)
            if k + 1 < total:
                self.take(ahead(k + 1), batch)
            if k + 1 == warm < total:
                self.take_gradient(back(0), batch)
        for k in range(total - warm):
            self.forward(ahead(warm + k))
            self.backward(back(k))
            batch = f"steady.{k}"
            self.give(ahead(warm + k), batch)
            self.give_gradient(back(k), batch)
            if k + 1 < total - warm:
                self.take(coming(warm + k), batch)
            self.take_gradient(returning(k), batch)
        if warm == total:
            self.take_gradient(back(0))
        for k in range(total - warm, total):
            self.backward(back(k))
            batch = f"cool.{k}"
            self.give_gradient(back(k), batch)
            if k + 1 < total:
                self.take_gradient(back(k + 1), batch)

    # -- one pass -----------------------------------------------------------------------------------------------------

    def forward(self, at: Pass) -> None:
        self.made[at] = self.forward_pass(*at, self.received.get(at))

    def backward(self, at: Pass) -> None:
        seeds = [self.gradient[at]] if at in self.gradient else None
        received = [self.received[at]] if at in self.received else []
        for g in self.r.backward(self.made[at], seeds=seeds, wrt=received):
            self.passed[at] = g if g.type.dtype == self.dtype else self.r.to(g, dtype=self.dtype, name=g.name)
        self.done()

    # -- between stages -----------------------------------------------------------------------------------------------

    def begins(self, at: Pass) -> bool:
        """Whether this pass starts from the model's input."""
        return self.stage == 0 and not 0 < at[1] < self.how.chunks

    def ends(self, at: Pass) -> bool:
        """Whether this pass ends with the loss."""
        return self.stage == self.how.pp - 1 and not 0 <= at[1] < self.how.chunks - 1

    def take(self, at: Pass, batch: str | None = None) -> None:
        if not self.begins(at):
            name = f"mb{at[0]}/received" if self.how.chunks == 1 else f"mb{at[0]}/chunk{at[1]}.received"
            self.received[at] = self.r.recv(self.shape, self.r.peer(pp=(self.stage - 1) % self.how.pp), self.dtype, batch=batch, name=name)

    def give(self, at: Pass, batch: str | None = None) -> None:
        if not self.ends(at):
            self.r.send(self.made[at], self.r.peer(pp=(self.stage + 1) % self.how.pp), batch=batch)

    def take_gradient(self, at: Pass, batch: str | None = None) -> None:
        if not self.ends(at):
            self.r.phase = "backward"
            peer = self.r.peer(pp=(self.stage + 1) % self.how.pp)
            self.gradient[at] = self.r.recv(self.shape, peer, self.dtype, self._tag, batch, f"{self.made[at].name}.grad")
            self.r.phase = "forward"

    def give_gradient(self, at: Pass, batch: str | None = None) -> None:
        if not self.begins(at):
            self.r.phase = "backward"
            self.r.send(self.passed[at], self.r.peer(pp=(self.stage - 1) % self.how.pp), tag=self._tag, batch=batch)
            self.r.phase = "forward"

    @property
    def _tag(self) -> int:
        """Round a ring of two stages, activations and gradients go between the same ranks."""
        return 1 if self.how.schedule == "interleaved" else 0
