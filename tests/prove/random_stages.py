"""Random plans whose ranks run different programs that meet again and again: nothing about them is meant to be right."""

from __future__ import annotations

import random

import trainverify as tv
from trainverify.build.plan import RankBuilder
from trainverify.build.tape import Tensor
from trainverify.graph.plan import Plan
from trainverify.graph.program import Program

SHAPE = (6, 12)  # of all tensors between ops
MESHES = ({"x": 3, "y": 2}, {"x": 2, "y": 3}, {"x": 2, "y": 2, "z": 2}, {"y": 2, "x": 3}, {"x": 4, "y": 2})
MEETINGS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "ring")
LOCAL = ("add", "mul", "scale", "neg", "exp", "sum", "iota", "slice", "slice", "slice")


def stages(seed: int) -> tuple[Program, Plan]:
    """A program per coordinate of one mesh axis; groups run along axes, or against them."""
    rng = random.Random(seed)
    b = tv.program("l")
    for n in range(3):
        last = b.input(f"x{n}", SHAPE)
    b.loss(b.sum(last, name="loss"))
    p = tv.plan("p", tv.Mesh(**rng.choice(MESHES)))
    mesh = p.mesh
    for axis in mesh.names:
        for rank in range(mesh.size):
            members = mesh.group(rank, (axis,))
            p.group(f"against.{axis}.{members[0]}", tuple(reversed(members)))
    across = rng.choice(mesh.names)
    meetings = [(rng.choice(MEETINGS), rng.choice(mesh.names), rng.random() < 0.3, rng.randint(0, 10**6)) for _ in range(rng.randint(2, 4))]
    for i in range(mesh.length(across)):
        with p.ranks(**{across: i}) as r:
            own = Stage(r, mesh, random.Random(rng.randint(0, 10**9)))
            own.local(3)
            for kind, axis, against, number in meetings:
                own.meet(kind, axis, against, number, axis == across, i)
                own.local(2)
            r.loss(r.all_reduce(r.sum(own.live[-1]), group=mesh.names, name="loss"))
    return b.build(), p.build()


class Stage:
    def __init__(self, r: RankBuilder, mesh: tv.Mesh, rng: random.Random):
        self.r, self.mesh, self.rng = r, mesh, rng
        self.live: list[Tensor] = [r.input(f"x{n}", SHAPE, "a b") for n in range(3)]

    def local(self, most: int) -> None:
        for _ in range(self.rng.randint(0, most)):
            self.live.append(self.made(self.rng.choice(LOCAL), self.rng.choice(self.live), self.rng.choice(self.live)))

    def made(self, kind: str, x: Tensor, y: Tensor) -> Tensor:
        r = self.r
        match kind:
            case "add" | "mul":
                return getattr(r, kind)(x, y)
            case "scale":
                return r.mul(x, value=self.rng.choice([0.5, 2.0, 3.0]))
            case "exp":
                return r.exp(r.mul(x, value=0.1))
            case "sum":
                return r.add(x, r.sum(x, dim=self.rng.randint(0, 1), keepdim=True))
            case "iota":
                return r.mul(x, r.to(r.arange(stop=SHAPE[1]), dtype="f32"))
            case "slice":
                return self.sliced(x, self.rng.randint(0, 1))
        return r.neg(x)

    def sliced(self, x: Tensor, dim: int) -> Tensor:
        """Some rows again and again; where they begin may follow from a coordinate, or from nothing."""
        size = SHAPE[dim]
        width = self.rng.choice([n for n in range(1, size) if size % n == 0])
        last, axis = size - width, self.rng.choice(self.mesh.names)
        step = self.rng.randint(0, last // max(self.mesh.length(axis) - 1, 1))
        table = [self.rng.randint(0, last) for _ in range(self.mesh.size)]
        start = {
            "everywhere": lambda rank: table[0],
            "linear": lambda rank: step * self.mesh.coordinates(rank)[axis],
            "by coordinate": lambda rank: table[self.mesh.coordinates(rank)[axis]],
            "by rank": lambda rank: table[rank],
        }[self.rng.choice(["everywhere", "linear", "by coordinate", "by rank"])]
        piece = self.r.slice(x, dim=dim, start=self.r.each_rank(start), stop=self.r.each_rank(lambda rank: start(rank) + width))
        return self.r.concat(*[piece] * (size // width), dim=dim)

    def meet(self, kind: str, axis: str, against: bool, number: int, between: bool, own: int) -> None:
        """All programs do the same here: it is drawn from the number."""
        r, x, rng, count = self.r, self.live[-1], random.Random(number), self.mesh.length(axis)
        dim = rng.randint(0, 1)
        reverse = r.each_rank(lambda rank: f"against.{axis}.{self.mesh.group(rank, (axis,))[0]}", f"against.{axis}") if against else None
        group = axis if reverse is None else reverse
        if kind == "all_gather":
            start = rng.randint(0, SHAPE[dim] * (count - 1))
            made = r.slice(r.all_gather(x, group=group, dim=dim), dim=dim, start=start, stop=start + SHAPE[dim])
        elif kind == "reduce_scatter" and SHAPE[dim] % count == 0:
            made = r.concat(*[r.reduce_scatter(x, group=group, dim=dim)] * count, dim=dim)
        elif kind == "all_to_all" and SHAPE[dim] % count == 0:
            made = r.all_to_all(x, group=group, split_dim=dim, concat_dim=dim)
        elif kind == "broadcast" and between:
            root = rng.randrange(count)
            made = r.broadcast(x if own == root else None, group=group, root=r.peer(**{axis: root}), shape=SHAPE)
        elif kind == "ring":
            r.send(x, self.next_to(axis, 1), batch=f"{number}")
            made = r.recv(SHAPE, self.next_to(axis, -1), batch=f"{number}")
        else:
            made = r.all_reduce(x, group=group, op=rng.choice(["sum", "avg", "max"]))
        self.live.append(made)

    def next_to(self, axis: str, step: int) -> object:
        return self.r.each(lambda at: self.mesh.rank({**at, axis: (at[axis] + step) % self.mesh.length(axis)}))
