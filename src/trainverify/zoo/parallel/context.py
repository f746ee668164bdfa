"""Context parallelism for Llama where ranks run different programs: each has some positions of every sequence, attention sees them all.
(Ranks that all run the same one, Ulysses, are a matter of `Stage.attention`.)

- `zigzag`   the sequence is cut into 2·cp chunks, rank i has chunks i and 2·cp−1−i; keys and values are gathered;
- `ring`     the same chunks; keys and values go from rank to rank, each block's result is merged into a running
             maximum, sum and result; what no query sees is skipped; the backward pass goes round once more;
"""

# mypy: disable-error-code="no-any-return"
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from trainverify.build.plan import plan
from trainverify.build.tape import Tensor
from trainverify.completion.optimizers import Optimizer
from trainverify.graph.plan import Plan
from trainverify.zoo.llama import Config, forward
from trainverify.zoo.parallel.degrees import Degrees, axes_for, divided
from trainverify.zoo.parallel.llama_model import LlamaModel
from trainverify.zoo.parallel.model import gradients, run
from trainverify.zoo.parallel.stage import Stage


def context_plan(config: Config, how: Degrees, optimizer: Optimizer | None, clip: float | None, master: bool = False) -> Plan:
    """Llama's step on dp·cp·tp·pp ranks."""
    axes = axes_for(how, config.kv_heads)
    names = gradients(forward(config)) if how.zero else {}
    p = plan("llama", axes.mesh)
    kind = Ring if how.cp_kind == "ring" else ZigZag
    for index, layers in enumerate(how.layers(config.layers)):
        for rank in range(how.cp):
            with p.ranks(pp=index, cp=rank) as r:
                r.dtype = config.dtype
                run(kind(Stage(r, how, axes, index, names), config, layers, rank), optimizer, clip, master)
    return p.build()


class ZigZag(LlamaModel):
    def __init__(self, stage: Stage, config: Config, layers: list[range], rank: int):
        super().__init__(stage, config, layers)
        self.rank = rank
        self.chunk = divided(config.sequence, 2 * stage.how.cp, "positions", "blocks (two for each context-parallel rank)", "sequence")

    def chunks(self, rank: int) -> tuple[int, int]:
        """The chunks of the sequence that a rank has, in order."""
        return rank, 2 * self.stage.how.cp - 1 - rank

    def ids(self, name: str, m: int, ignore: int | None = None) -> Tensor:
        how, r = self.stage.how, self.stage.r
        parts = []
        for i, chunk in enumerate(self.chunks(self.rank)):
            fixed = {"mb": (m, how.microbatches), "chunk": (chunk, 2 * how.cp)}
            form, local = "(dp mb b) (chunk s)", f"mb{m}/{name}.{'early' if i == 0 else 'late'}"
            parts.append(r.input(local, (self.rows, self.chunk), form, name, "i64", ids=self.vocabulary, ignore=ignore, fixed=fixed))
        return r.concat(*parts, dim=1, name=name)

    def positions(self, table: Tensor) -> Tensor:
        r, n = self.stage.r, self.chunk
        rows = [r.slice(table, dim=0, start=c * n, stop=(c + 1) * n, name=f"{table.name}.rows.{c}") for c in self.chunks(self.rank)]
        return r.concat(*rows, dim=0, name=table.name + ".rows")

    def halves(self, x: Tensor, name: str, dim: int = 2) -> list[Tensor]:
        n = self.chunk
        return [self.stage.r.slice(x, dim=dim, start=i * n, stop=(i + 1) * n, name=f"{name}.{e}") for i, e in enumerate(("early", "late"))]

    def mixed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        r, n = self.stage.r, self.chunk
        k, v = self.gathered(k, "attention.k"), self.gathered(v, "attention.v")
        results = []
        for chunk, part in zip(self.chunks(self.rank), self.halves(q, "attention.q"), strict=True):
            names = [f"attention.mixed.{chunk}", f"attention.logsumexp.{chunk}"]
            results.append(r.attention(part, k, v, is_causal=True, query_offset=chunk * n, name=names)[0])
        return r.concat(*results, dim=2, name="attention.mixed")

    def gathered(self, x: Tensor, name: str) -> Tensor:
        """All positions in order."""
        r, n, cp = self.stage.r, self.chunk, self.stage.how.cp
        every = r.all_gather(x, group="cp", dim=2, backward="reduce_scatter", name=name + ".gathered")
        place = {chunk: (2 * rank + i) * n for rank in range(cp) for i, chunk in enumerate(self.chunks(rank))}
        parts = [r.slice(every, dim=2, start=place[c], stop=place[c] + n, name=f"{name}.chunk{c}") for c in range(2 * cp)]
        return r.concat(*parts, dim=2, name=name + ".all")


@dataclass
class Running:
    """The attention of one chunk of queries to the keys seen so far: maximum, sum and result, both scaled by exp(−maximum)."""

    peak: Tensor
    weight: Tensor
    result: Tensor


@dataclass
class Saved:
    """What the backward pass of ring attention needs."""

    result: list[Tensor] = field(default_factory=list)  # by chunk of queries
    logsumexp: list[Tensor] = field(default_factory=list)


class Ring(ZigZag):
    def mixed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        saved, layer = Saved(), self.stage.r.prefix

        def forward() -> Sequence[Tensor]:
            return [self.ring_forward(q, k, v, saved)]

        def backward(grad: Tensor) -> Sequence[Tensor]:
            r, before = self.stage.r, self.stage.r.prefix
            r.prefix = layer
            made = self.ring_backward(q, k, v, grad, saved)
            r.prefix = before
            return made

        return self.stage.r.by_hand((q, k, v), forward, backward)[0]

    def blocks(self, source: int) -> list[tuple[int, int, bool]]:
        """(chunk of queries, chunk of keys, whether the mask cuts it) of what this rank's queries see of a rank's keys; 0 early, 1 late."""
        mine, theirs = self.chunks(self.rank), self.chunks(source)
        pairs = [(i, j) for i in (0, 1) for j in (0, 1) if theirs[j] <= mine[i]]
        return [(i, j, theirs[j] == mine[i]) for i, j in pairs]

    def passed(self, tensors: Sequence[Tensor], names: Sequence[str]) -> list[Tensor]:
        """Hand tensors to the next rank, get those of the one before."""
        r, cp = self.stage.r, self.stage.how.cp
        after, before = r.peer(cp=(self.rank + 1) % cp), r.peer(cp=(self.rank - 1) % cp)
        label = r.prefix + names[0]
        for x in tensors:
            r.send(x, after, batch=label)
        return [r.recv(x.shape, before, batch=label, name=n) for x, n in zip(tensors, names, strict=True)]

    def ring_forward(self, q: Tensor, k: Tensor, v: Tensor, saved: Saved) -> Tensor:
        r, cp = self.stage.r, self.stage.how.cp
        queries = self.halves(q, "attention.q")
        running: dict[int, Running] = {}
        for step in range(cp):
            source = (self.rank - step) % cp
            at = f"attention.step{step}"
            if step:
                k, v = self.passed((k, v), (f"{at}.k", f"{at}.v"))
            keys, values = self.halves(k, f"{at}.k"), self.halves(v, f"{at}.v")
            for i, j, diagonal in self.blocks(source):
                name = f"{at}.{'early' if i == 0 else 'late'}.{j}"
                how = {"is_causal": True} if diagonal else {}
                result, weight = r.attention(queries[i], keys[j], values[j], **how, name=[f"{name}.mixed", f"{name}.logsumexp"])
                running[i] = self.merged(running.get(i), result, r.unsqueeze(weight, dim=3, name=f"{name}.weight"), name)
        for i, state in sorted(running.items()):
            name = f"attention.{'early' if i == 0 else 'late'}"
            saved.result.append(r.div(state.result, state.weight, name=f"{name}.mixed"))
            total = r.add(state.peak, r.log(state.weight, name=f"{name}.weight.log"), name=f"{name}.total")
            saved.logsumexp.append(r.squeeze(total, dim=3, name=f"{name}.logsumexp"))
        return r.concat(*saved.result, dim=2, name="attention.mixed")

    def merged(self, old: Running | None, result: Tensor, logsumexp: Tensor, name: str) -> Running:
        """Online softmax: what was there and what is new, rescaled to the larger maximum, added."""
        r = self.stage.r
        if old is None:
            return Running(logsumexp, r.full(shape=logsumexp.shape, value=1.0, name=f"{name}.sum"), result)
        peak = r.maximum(old.peak, logsumexp, name=f"{name}.peak")
        keep = r.exp(r.sub(old.peak, peak, name=f"{name}.down"), name=f"{name}.keep")
        take = r.exp(r.sub(logsumexp, peak, name=f"{name}.up"), name=f"{name}.take")
        weight = r.add(r.mul(old.weight, keep, name=f"{name}.kept"), take, name=f"{name}.sum")
        kept = r.mul(old.result, keep, name=f"{name}.mixed.kept")
        return Running(peak, weight, r.add(kept, r.mul(result, take, name=f"{name}.mixed.taken"), name=f"{name}.mixed.sum"))

    def ring_backward(self, q: Tensor, k: Tensor, v: Tensor, grad: Tensor, saved: Saved) -> list[Tensor]:
        """The gradients of keys and values travel with them, every rank adds its share; one more hop brings them home."""
        r, cp = self.stage.r, self.stage.how.cp
        queries, grads = self.halves(q, "attention.back.q"), self.halves(grad, "attention.back.grad")
        deltas = []
        for i, (g, y) in enumerate(zip(grads, saved.result, strict=True)):
            deltas.append(r.sum(r.mul(g, y, name=f"attention.back.product.{i}"), dim=3, name=f"attention.back.delta.{i}"))
        of_q: dict[int, Tensor] = {}
        of_k: dict[int, Tensor] = {}
        of_v: dict[int, Tensor] = {}

        def add(into: dict[int, Tensor], at: int, x: Tensor, name: str) -> None:
            into[at] = r.add(into[at], x, name=name) if at in into else x

        for step in range(cp):
            source = (self.rank - step) % cp
            at = f"attention.back.step{step}"
            if step:
                k, v = self.passed((k, v), (f"{at}.k", f"{at}.v"))
                of_k, of_v = self.travelled(of_k, of_v, at)
            keys, values = self.halves(k, f"{at}.k"), self.halves(v, f"{at}.v")
            for i, j, diagonal in self.blocks(source):
                name = f"{at}.{i}.{j}"
                how = {"is_causal": True} if diagonal else {}
                given = (grads[i], queries[i], keys[j], values[j], saved.logsumexp[i], deltas[i])
                dq, dk, dv = r.attention_backward(*given, **how, name=[f"{name}.dq", f"{name}.dk", f"{name}.dv"])
                add(of_q, i, dq, f"{name}.q.sum")
                add(of_k, j, dk, f"{name}.k.sum")
                add(of_v, j, dv, f"{name}.v.sum")
        of_k, of_v = self.travelled(of_k, of_v, "attention.back.home")
        return [r.concat(x[0], x[1], dim=2, name=f"attention.{n}.grad") for x, n in ((of_q, "q"), (of_k, "k"), (of_v, "v"))]

    def travelled(self, of_k: dict[int, Tensor], of_v: dict[int, Tensor], at: str) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
        r = self.stage.r
        joined = [r.concat(x[0], x[1], dim=2, name=f"{at}.{n}.out") for x, n in ((of_k, "dk"), (of_v, "dv"))]
        arrived = self.passed(joined, (f"{at}.dk", f"{at}.dv"))
        halves = [self.halves(x, f"{at}.{n}") for x, n in zip(arrived, ("dk", "dv"), strict=True)]
        return {0: halves[0][0], 1: halves[0][1]}, {0: halves[1][0], 1: halves[1][1]}
