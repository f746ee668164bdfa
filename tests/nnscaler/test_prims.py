"""Every prim: a stage boundary made with it is proved, and refuted with one thing wrong in it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from nnscaler.plans import Tree, cells, judged, logical_of, messages, tree
from trainverify.explain.place import Place
from trainverify.files.errors import FileError
from trainverify.nnscaler import parse, plan, program
from trainverify.ops import OPS
from trainverify.verdicts import verify


@dataclass(frozen=True)
class Site:
    """A stage boundary: devices 0 and 1 have an activation, devices 2 and 3 need it. Its last two dimensions are rows and columns."""

    plan: str
    adapter: int
    tid: int
    parent: int
    shape: tuple[int, ...]

    def tensor(self, tid: int, rows: tuple[int, int] = (0, 2), columns: tuple[int, int] = (0, 2), part: tuple[int, int] = (0, 1)) -> Tree:
        """Halves 0 to 2 of rows and columns."""
        *rest, height, width = self.shape
        region = [[0, n] for n in rest] + [[a * n // 2, b * n // 2] for n, (a, b) in ((height, rows), (width, columns))]
        shape = [b - a for a, b in region]
        return {"tid": tid, "parent": self.parent, "indmap": region, "valmap": list(part), "shape": shape, "grad": None}

    @property
    def row(self) -> int:
        return len(self.shape) - 2

    @property
    def column(self) -> int:
        return len(self.shape) - 1

    @property
    def whole(self) -> Tree:
        return self.tensor(self.tid)

    @property
    def made(self) -> Tree:
        return self.tensor(9005)

    @property
    def columns(self) -> tuple[Tree, Tree]:
        return self.tensor(9000, columns=(0, 1)), self.tensor(9001, columns=(1, 2))

    @property
    def rows(self) -> tuple[Tree, Tree]:
        return self.tensor(9002, rows=(0, 1)), self.tensor(9003, rows=(1, 2))

    @property
    def parts(self) -> tuple[Tree, Tree, Tree]:
        first, second, third = (self.tensor(9006 + i, part=(i, 3)) for i in range(3))
        return first, second, third

    def share(self, target: Tree, n: int) -> Does:
        """The whole tensor divided by n."""
        return does("SelectPrim", self.whole, target, indmap=[span(0, n) for n in self.shape], valmap=n)

    def broadcast(self, source: int, *ranks: int, own: bool = False, takes: bool = False) -> Does:
        return does("BroadcastPrim", self.whole if takes else (), self.whole if own else (), src=source, ranks=list(ranks))


MLP = Site("mlp2l_v03_dp2pp2tp2nm2", 54, 25, 8, (32, 128))
LLAMA = Site("llama1l_v03_dp2pp2tp2nm2", 245, 279, 4, (4, 128, 128))  # what follows depends on the order of columns


@dataclass(frozen=True)
class Does:
    """A prim: what it is called, takes, makes, and with what."""

    kind: str
    inputs: tuple[Tree, ...]
    outputs: tuple[Tree, ...]
    kwargs: Mapping[str, Any]

    def tree(self) -> Tree:
        tensors = [[copy.deepcopy(t) for t in ts] for ts in (self.inputs, self.outputs)]
        return {"kind": self.kind, "inputs": tensors[0], "outputs": tensors[1], "kwargs": dict(self.kwargs)}


def does(kind: str, takes: Tree | tuple[Tree, ...] = (), makes: Tree | tuple[Tree, ...] = (), **kwargs: Any) -> Does:
    lists = [ts if isinstance(ts, tuple) else (ts,) for ts in (takes, makes)]
    return Does(kind, lists[0], lists[1], kwargs)


def span(a: int, b: int) -> Tree:
    """A slice of Python."""
    return {"slice": [a, b, None]}


def send(t: Tree, source: int, target: int) -> Does:
    return does("MovePrim", t, src=source, dst=target)


def get(t: Tree, source: int, target: int) -> Does:
    return does("MovePrim", (), t, src=source, dst=target)


Boundary = dict[int, list[Does]]


def broadcasting(s: Site, wrong: bool) -> Boundary:
    """One half of it, if wrong."""
    part = s.parts[0]
    first = [s.share(part, 2), does("BroadcastPrim", part, src=0, ranks=[0, 2, 3])] if wrong else [s.broadcast(0, 0, 2, 3, takes=True)]
    return {0: first, 1: [], 2: [s.broadcast(0, 0, 2, 3, own=True)], 3: [s.broadcast(0, 0, 2, 3, own=True)]}


def rd_scatter(s: Site, wrong: bool) -> Boundary:
    """Pieces go to the other receiver, if wrong."""
    how = {"dim": s.column, "src": 0, "dsts": [3, 2] if wrong else [2, 3]}
    found: Boundary = {0: [does("RDScatterPrim", s.whole, **how)], 1: []}
    for d, piece in zip((2, 3), s.columns, strict=True):
        found[d] = [does("RDScatterPrim", (), piece, **how), does("AllGatherPrim", piece, s.whole, dim=s.column, ranks=[2, 3])]
    return found


def rd_gather(s: Site, wrong: bool) -> Boundary:
    """Pieces are joined in the other order, if wrong."""
    how = {"dim": s.column, "srcs": [1, 0] if wrong else [0, 1], "dst": 2}
    found: Boundary = {}
    for d, piece in zip((0, 1), s.columns, strict=True):
        found[d] = [does("ChunkPrim", s.whole, piece, dim=s.column, ranks=[0, 1]), does("RDGatherPrim", piece, **how)]
    found[2] = [does("RDGatherPrim", (), s.whole, **how), s.broadcast(2, 2, 3, takes=True)]
    return {**found, 3: [s.broadcast(2, 2, 3, own=True)]}


def rv_scatter(s: Site, wrong: bool) -> Boundary:
    """Shares that nobody adds up, if wrong."""
    how = {"src": 0, "dst": [2, 3]}  # nnScaler's own name for the receivers
    found: Boundary = {0: [does("RVScatterPrim", s.whole, **how)], 1: []}
    for d, part in zip((2, 3), s.parts[:2], strict=True):
        added = [does("RVScatterPrim", (), part, **how), does("AllReducePrim", part, s.whole, ranks=[2, 3])]
        found[d] = [does("RVScatterPrim", (), s.whole, **how)] if wrong else added
    return found


def rv_gather(s: Site, wrong: bool) -> Boundary:
    """Of the two shares one is not sent, if wrong."""
    how = {"srcs": [0] if wrong else [0, 1], "dst": 2}
    found: Boundary = {1: []}
    for d, part in list(zip((0, 1), s.parts[:2], strict=True))[: 1 if wrong else 2]:
        found[d] = [s.share(part, 2), does("RVGatherPrim", part, **how)]
    found[2] = [does("RVGatherPrim", (), s.whole, **how), s.broadcast(2, 2, 3, takes=True)]
    return {**found, 3: [s.broadcast(2, 2, 3, own=True)]}


def reducing(s: Site, wrong: bool) -> Boundary:
    """Whole tensors are added up, if wrong."""
    how = {"ranks": [0, 1], "dst": 0}
    found: Boundary = {}
    for d, part in zip((0, 1), s.parts[:2], strict=True):
        result = (s.made,) if d == 0 else ()
        found[d] = [does("ReducePrim", s.whole, result, **how)] if wrong else [s.share(part, 2), does("ReducePrim", part, result, **how)]
    found[0].append(does("BroadcastPrim", s.made, src=0, ranks=[0, 2, 3]))
    return {**found, 2: [s.broadcast(0, 0, 2, 3, own=True)], 3: [s.broadcast(0, 0, 2, 3, own=True)]}


def merging(s: Site, wrong: bool) -> Boundary:
    """Halves are joined in the other order, if wrong."""
    width = s.shape[-1]
    bounds = [span(0, n) for n in s.shape[:-1]]
    halves = [span(0, width // 2), span(width // 2, width)]
    cut = [does("SelectPrim", s.whole, t, indmap=[*bounds, h], valmap=1) for t, h in zip(s.columns, halves, strict=True)]
    order = s.columns[::-1] if wrong else s.columns
    first = [*cut, does("MergeDimPrim", order, s.made, dim=s.column), send(s.made, 0, 2), send(s.made, 0, 3)]
    return {0: first, 1: [], 2: [get(s.whole, 0, 2)], 3: [get(s.whole, 0, 3)]}


def adding(s: Site, wrong: bool) -> Boundary:
    """Two thirds, if wrong."""
    summands = s.parts[:2] if wrong else s.parts
    shares = [s.share(t, 3) for t in s.parts]
    total = [does("SumPrim", summands, s.made), does("IdentityPrim", s.made, s.made)]
    return {0: [*shares, *total, send(s.made, 0, 2), send(s.made, 0, 3)], 1: [], 2: [get(s.whole, 0, 2)], 3: [get(s.whole, 0, 3)]}


def reduce_scatter(s: Site, wrong: bool) -> Boundary:
    """Whole tensors are added up, if wrong."""
    found: Boundary = {}
    for d, part, piece in zip((0, 1), s.parts[:2], s.columns, strict=True):
        found[d] = [send(s.whole, d, d + 2)] if wrong else [s.share(part, 2), send(part, d, d + 2)]
        found[d + 2] = [
            get(part, d, d + 2),
            does("ReduceScatterPrim", part, piece, dim=s.column, ranks=[2, 3]),
            does("AllGatherPrim", piece, s.whole, dim=s.column, ranks=[2, 3]),
        ]
    return found


def all_to_all(s: Site, wrong: bool) -> Boundary:
    """The two receivers get each other's columns, if wrong."""
    found: Boundary = {}
    for d, columns, rows in zip((0, 1), s.columns, s.rows, strict=True):
        found[d] = [does("ChunkPrim", s.whole, columns, dim=s.column, ranks=[0, 1]), send(columns, d, 3 - d if wrong else d + 2)]
        found[d + 2] = [
            get(columns, 1 - d if wrong else d, d + 2),
            does("AllToAllPrim", columns, rows, idim=s.column, odim=s.row, ranks=[2, 3]),
            does("AllGatherPrim", rows, s.whole, dim=s.row, ranks=[2, 3]),
        ]
    return found


WAYS = [broadcasting, rd_scatter, rd_gather, rv_scatter, rv_gather, reducing, merging, adding, reduce_scatter, all_to_all]
PERMUTED = (rd_scatter, rd_gather, merging, all_to_all)


def with_boundary(s: Site, boundary: Boundary) -> Tree:
    made = tree(s.plan)
    for d in range(4):
        (cell,) = (c for c in cells(made, d) if c["cid"] == s.adapter)
        cell["prims"] = [p.tree() for p in boundary[d]]
    return made


@pytest.mark.parametrize("way", WAYS, ids=[w.__name__ for w in WAYS])
def test_proved(way: Any) -> None:
    assert judged(MLP.plan, with_boundary(MLP, way(MLP, False))).verdict == "PROVED"


@pytest.mark.parametrize("way", WAYS, ids=[w.__name__ for w in WAYS])
def test_refuted(way: Any) -> None:
    site = LLAMA if way in PERMUTED else MLP
    local = plan(parse(with_boundary(site, way(site, True)), "plan"), OPS).plan
    nowhere = Place("", None, 0, "", None, "")
    report = verify(program(parse(tree(logical_of(site.plan)), "one"), OPS), local, locator=lambda *_: nowhere)
    assert report.verdict == "REFUTED"
    assert report.difference is not None
    assert str(report.difference.obligation) == "loss"


def test_what_does_not_matter() -> None:
    """The loss of this model is a sum over all columns: it does not matter in which order they come."""
    assert judged(MLP.plan, with_boundary(MLP, rd_scatter(MLP, True))).verdict == "PROVED"


INVALID = [
    (
        "VChunkPrim",
        does("VChunkPrim", MLP.whole, MLP.parts[0], ranks=[0, 1]),
        "TV104 error",
        "nnScaler has no function for VChunkPrim at run time",
    ),
    ("itself", does("RDScatterPrim", MLP.whole, dim=1, src=0, dsts=[0, 2]), "TV204 error", "RDScatterPrim between 0 and [0, 2]"),
    (
        "uneven",
        does("RDScatterPrim", MLP.whole, dim=1, src=0, dsts=[1, 2, 3]),
        "TV105 error",
        "dimension 1 of [32, 128] does not divide among 3",
    ),
    (
        "bystander",
        does("RDGatherPrim", MLP.whole, dim=1, srcs=[1, 2], dst=3),
        "TV204 error",
        "RDGatherPrim between 3 and [1, 2] on device 0",
    ),
    ("two tensors", does("RVScatterPrim", (MLP.whole, MLP.whole), src=0, dsts=[2, 3]), "TV101 error", "RVScatterPrim with 2 inputs"),
    ("outsider", does("ReducePrim", MLP.whole, ranks=[0, 1], dst=2), "TV202 error", "ReducePrim to 2 in the group [0, 1]"),
    (
        "step",
        does("SelectPrim", MLP.whole, MLP.columns[0], indmap=[{"slice": [0, 32, 2]}, span(0, 64)], valmap=1),
        "TV105 error",
        "SelectPrim of",
    ),
]


@pytest.mark.parametrize(("prim", "code", "said"), [case[1:] for case in INVALID], ids=[case[0] for case in INVALID])
def test_what_cannot_run(prim: Does, code: str, said: str) -> None:
    """The boundary as nnScaler made it, with one more prim on device 0."""
    made = tree(MLP.plan)
    next(c for c in cells(made, 0) if c["cid"] == MLP.adapter)["prims"].insert(0, prim.tree())
    report = judged(MLP.plan, made)
    assert report.verdict == "INVALID"
    (message,) = messages(report)
    assert message.startswith(f"{code}: forward adapter {MLP.adapter} (")
    assert said in message
    assert (report.at_fault[-1].ids, report.at_fault[-1].devices) == ((MLP.adapter,), (0,))


@pytest.mark.parametrize(
    ("kwargs", "where"),
    [
        ({"src": 0, "dsts": [2]}, "kwargs.dim: missing"),
        ({"dim": 1, "src": 0}, "kwargs.dsts: missing"),
        ({"dim": 1, "src": 0, "dsts": []}, "dsts: expected at least one device"),
        ({"dim": 1, "src": "0", "dsts": [2]}, "src: expected an integer"),
        ({"dim": 1, "src": 0, "dsts": 2}, "dsts: expected a list"),
    ],
)
def test_fields_of_a_prim(kwargs: Tree, where: str) -> None:
    made = tree(MLP.plan)
    next(c for c in cells(made, 0) if c["cid"] == MLP.adapter)["prims"].insert(0, does("RDScatterPrim", MLP.whole, **kwargs).tree())
    with pytest.raises(FileError) as found:
        parse(made, "plan")
    assert str(found.value).startswith(f'plan: execplan["0"].cells["{MLP.adapter}"].prims[0].')
    assert where in str(found.value)
