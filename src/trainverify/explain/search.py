"""Finding the mistake: the one small repair after which the whole plan agrees with the logical program.

Candidates are tensors that every failed output depends on. A repair is tried at one random point, outputs in the order
in which they are computed, so that most are rejected early; what survives is confirmed on all outputs and a second point.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property

import numpy as np

from trainverify.domains.arrays import Array
from trainverify.evaluate.compare import DIFFERENT, EQUAL, Suspect, distance, held
from trainverify.evaluate.run import NotComputed, PlanValues
from trainverify.evaluate.small import Small
from trainverify.explain.attributes import Attributes
from trainverify.explain.by_line import ByLine
from trainverify.explain.cause import COLLECTIVES, OPTIMIZERS, SUMS, Cause
from trainverify.explain.communication import Communication
from trainverify.explain.factors import Factors
from trainverify.explain.fingerprints import Fingerprints
from trainverify.explain.likes import Likes
from trainverify.explain.positions import Positions, pairs
from trainverify.explain.repair import Repair, Site
from trainverify.explain.repairs import Repairs
from trainverify.explain.replay import Circular, Graph, Node, Replay
from trainverify.explain.rewrites import Rewrites, after_backward, averaging, copy, literal, named
from trainverify.explain.siblings import Siblings, first_number
from trainverify.explain.statements import Fits, Statements
from trainverify.explain.watch import NO_LIMIT, Watch
from trainverify.graph.mesh import Mesh
from trainverify.graph.obligations import Obligation
from trainverify.graph.program import Op
from trainverify.ops.table import OpTable

MOST_RUNS, MOST_OF_A_KIND = 25_000, 6_000  # ops run again, over all repairs
MOST_BY_LINE, MOST_OF_LINES = 240_000, 60_000  # the same for repairs of whole lines, and for one kind of them
NOISE = 1e-12  # of values that are zero but for rounding, which differs from processor to processor
MOST_PAIRS = 12  # of micro-batches, and of programs, that are compared
AT_ONCE = 500  # tensors that are looked up in logical ones together
NEAREST = 6  # tensors that are right already, looked at first
LINEAR = frozenset(
    {"identity", "add", "all_reduce", "reduce_scatter", "all_gather", "reshape", "transpose", "send", "recv", "slice", "concat"}
)
SHOWN = 2  # of several differences, in a message
SCALING = frozenset({"mul", "div"})
REDUCING = frozenset({"sum", "mean"})
CONTRACTIONS = ("sum", "mean", "linear", "matmul", "einsum")


@dataclass(frozen=True)
class Point:
    """Both programs on one random input."""

    logical: Mapping[str, Array]
    plan: PlanValues


@dataclass(frozen=True)
class Found:
    node: Node
    repair: Repair
    row: int  # the first rank of the class that holds something wrong
    got: float
    want: float


@dataclass(frozen=True)
class Kind:
    """A kind of mistake. Of several repairs of a kind that work, the first or the last tensor on the way is named."""

    repairs: Callable[[Site], Iterator[Repair]]
    last: bool = False
    suspicious: bool = True  # only for tensors that are no recognisable part of the logical program
    share: bool = False  # a sum over ranks that is missing, which may be so all the way
    padding: bool = False  # may change tensors that are right: what pads them is nobody's


class Search:
    def __init__(
        self,
        small: Small,
        mesh: Mesh,
        wanted: Sequence[Obligation],
        wrong: Sequence[Suspect],
        points: Sequence[Point],
        table: OpTable,
        watch: Watch = NO_LIMIT,
        fresh: Callable[[], Sequence[Point]] = tuple,
    ):
        self.small = small
        self.points = points
        self.fresh = cache(fresh)
        self.watch = watch
        self.graph = Graph(small, watch)
        self.wanted = [Suspect(o, h.layout, r, 0.0) for o in wanted for h in o.holdings for r in h.ranks if r in small.places]
        at = small.places
        self.doubtful = {self._node(s) for s in wrong}
        self.wrong = sorted(
            (s for s in wrong if s.distance > DIFFERENT), key=lambda s: self.graph.position.get((at[s.rank][0], s.layout.local), 0)
        )
        self.siblings = Siblings(self.graph)
        self.likes = Likes(self.graph, self.siblings, mesh)
        self.communication = Communication(self.graph, self.siblings, self.likes, mesh, points[0].plan)
        self.attributes = Attributes(self.graph, table)
        self.lines = ByLine(self.graph, self.likes)
        self.repairs = Repairs(self.graph, self.siblings, self.likes, mesh, points[0].plan, table)
        self.rewrites = Rewrites(self.graph, self.likes, self.communication, points[0].plan)
        self.places = Positions(self.graph, self.likes, self.communication, mesh, table)
        self.numbers = Factors(self.graph, mesh, self.wrong[0], points[0].logical, points[0].plan)
        # what agrees although it is made from what does not, agrees by chance: the difference is too small to be seen in it
        self.passed = {self._node(s) for s in self.wanted} - self.graph.after(list(self.doubtful))
        self.healthy = self._healthy() - self.doubtful
        self.runs = 0

    @cached_property
    def statements(self) -> Statements:
        return Statements(self.graph)

    def find(self) -> Found | None:
        """The best explanation, if a single change is one."""
        failed = {self._node(s) for s in self.wrong}
        if not all(n in self.graph.position and n[1] in self.points[0].plan.values[n[0]] for n in failed):
            return None  # a plan that never gets there
        bits = {n: 1 << i for i, n in enumerate(sorted(failed))}
        every = (1 << len(bits)) - 1
        reached = self.graph.marks(bits)
        good = self.graph.marks(dict.fromkeys(self.passed, 1))
        if found := self._level_by_level(self._unlike(), reached, every, good) or self._together(reached) or self._unscaled(reached):
            return self._literal_instead(found, reached, every) or found
        self.runs = 0  # other kinds still have all their time
        if self.lines.known and (found := self._by_line(reached, every)):
            return found
        if not self.lines.known and (found := self._by_statement(reached, every, good) or self._shifted(reached)):
            return found
        if found := self._level_by_level(self._kinds(), reached, every, good):
            return self._refined(found)
        some = [s for level in self.siblings.levels for s in level if self._bits(s, reached)]
        kind = Kind(self.repairs.exchanged_pieces, suspicious=False)  # two tensors, neither of which is behind all
        return self._first(kind, some, total=self.runs + MOST_OF_A_KIND)

    def find_view(self) -> Found | None:
        """A reshape of shards in another order: tried where values say nothing else."""
        failed = {self._node(s): 1 for s in self.wrong}
        reached = self.graph.marks(failed)
        sites = [s for s in self.statements.of(named("reshape")) if self._bits(s, reached)]
        return self._first(Kind(self.places.viewed_shard, suspicious=False), sites, total=self.runs + MOST_OF_A_KIND)

    def _level_by_level(self, kinds: Sequence[Kind], reached: Mapping[Node, int], every: int, good: Mapping[Node, int]) -> Found | None:
        """One change of one tensor, then of more; first what no output that is right depends on."""
        for clean in (True, False):
            if not clean and self._excluded({self._node(s) for s in self.wrong}):
                break
            for level in self.siblings.levels:
                behind = [s for s in level if self._bits(s, reached) == every]
                sites = [s for s in behind if clean == (not self._bits(s, good))]
                for kind in kinds:
                    found = self._first(kind, behind if kind.padding else sites)  # padding is part of what is right
                    if found is not None:
                        return (self._origin(found, kind) or found) if kind.share else found
        return None

    def _by_line(self, reached: Mapping[Node, int], every: int) -> Found | None:
        """One change of all that a line of the user's makes: its collectives first, since these explain factors that literals do too."""
        start, talk, r, a = self.runs, self.communication, self.repairs, self.attributes
        behind = [s for s in self.lines.collectives if self._bits(s, reached) == every]
        others = [s for s in self.lines.sites if self._bits(s, reached) == every]
        scaling = self._by_literals(others)
        tried: list[tuple[Kind, list[Site]]] = [
            (Kind(r.dropped, suspicious=False), [s for s in scaling if self.lines.only_here(s)]),
            (Kind(r.dropped, suspicious=False), behind),
            (Kind(lambda site: talk.other_collective(site, False), suspicious=False), behind),
            (Kind(lambda site: talk.other_collective(site, True), suspicious=False), behind),
            (Kind(self.places.other_rows, suspicious=False), self.places.lookups),
            (Kind(self.places.reordered, suspicious=False), self.lines.cuts),
            (Kind(r.dropped, suspicious=False), scaling),
            (Kind(lambda site: r.scaled(site, self.numbers.common), suspicious=False), scaling),
            (Kind(r.dropped), others),
            (Kind(r.other_slice, suspicious=False), others),
            (Kind(r.turned, suspicious=False), others),
            (Kind(r.dropped), [s for s in self.lines.rows if self._bits(s, reached) == every]),
            (Kind(talk.missing_sum, last=True, share=True), others),
            (Kind(a.as_logical, suspicious=False), others),
            (Kind(lambda site: r.scaled(site, self.numbers.literals), suspicious=False), self._scalars(others)),
            (Kind(lambda site: r.scaled(site, self.numbers.common), last=True), others),
        ]
        found = None
        for some in self.lines.unlike_other_ranks():
            kind = Kind(self.likes.twin, suspicious=False)
            if self.runs - start < MOST_BY_LINE and all(self._bits(s, reached) for s in some) and self._works(_joined(some), kind):
                return self._found(next(iter(some)), _joined(some))
        for kind, sites in tried:
            if self.runs - start > MOST_BY_LINE:
                break
            if found := self._first(kind, sites, MOST_OF_LINES, start + MOST_BY_LINE):
                found = (self._origin(found, kind) or found) if kind.share else found
                break
        self.runs = start  # other kinds still have all their time
        return found

    def _by_literals(self, sites: Sequence[Site]) -> list[Site]:
        """Those of products with a literal; with 1, which changes nothing, last."""
        ops = {s: self.graph.ops[s[0]] for s in sites}
        found = [s for s in sites if ops[s].name in SCALING and len(ops[s].inputs) == 1]
        return sorted(found, key=lambda s: ops[s].get("value") == 1)

    def _literal_instead(self, found: Found, reached: Mapping[Node, int], every: int) -> Found | None:
        """A product with a literal that explains what a missing sum over ranks does: of equal values, where both are a factor."""
        if found.repair.cause is not Cause.MISSING_REDUCTION or not self.lines.known:
            return None
        start, r = self.runs, self.repairs
        sites = self._by_literals([s for s in self.lines.sites if self._bits(s, reached) == every])
        for repairs in (r.dropped, lambda site: r.scaled(site, self.numbers.common)):
            if better := self._first(Kind(repairs, suspicious=False), sites, total=start + MOST_OF_A_KIND):
                break
        self.runs = start
        return better

    def _by_statement(self, reached: Mapping[Node, int], every: int, good: Mapping[Node, int]) -> Found | None:
        """One change of all that a statement makes, forward and backward; what is likely first."""
        start = self.runs
        for repairs, fits, last in self._statement_kinds():
            sites = self._failing(self.statements.of(fits, last), good)
            sites = [s for s in sites if self._bits(s, reached) == every]
            sites.sort(key=lambda s: bool(self._bits(s, good)))
            if found := self._first(Kind(repairs, suspicious=False), sites, total=start + MOST_RUNS):
                return self._refined(found)
        self.runs = start  # other kinds still have all their time
        return None

    def _statement_kinds(self) -> list[tuple[Callable[[Site], Iterator[Repair]], Fits, bool]]:
        w, talk, r = self.rewrites, self.communication, self.repairs
        any_op: Fits = lambda op: True  # noqa: E731
        return [
            (lambda s: w.scaled(s, self.numbers.common) if self._one_loss(s) else iter(()), literal, True),
            (w.extra_reduction, named(*SUMS), False),
            (lambda s: r.dropped(s) if len(s) > 1 else iter(()), named(*SUMS), False),
            (self.places.other_slot, named("eq"), False),
            (lambda s: self.places.permuted_slots(s, self.points[0].logical), named("eq"), False),
            (self.attributes.one_count, any_op, False),
            (self.attributes.other_attribute, named(*OPTIMIZERS), False),
            (w.stale_input, any_op, False),
            (talk.missing_sum, copy, False),
            (w.summed_input, named("slice"), False),
            (w.distributed, literal, False),
            (lambda s: w.dropped_scale(s, self.numbers.common), self._after_backward, True),
            (lambda s: talk.in_place(s, ("sum",)), averaging, False),
            (lambda s: talk.other_collective(s, False, True), named(*COLLECTIVES), False),
            (lambda s: talk.other_collective(s, True, True), named(*COLLECTIVES), False),
            (self.places.other_block, named("slice"), False),
            (r.other_slice, named("slice"), False),
            (self.places.other_dimension, named("reshape"), False),
            (self.places.after_the_cut, named("roll", "flip"), False),
            (w.moved_reduction, any_op, False),
            (r.dropped, lambda op: op.name == "add" and op.phase != "backward", False),
            (lambda s: w.scaled_term(s, self.numbers.common), named("add", "linear"), True),
            (lambda s: w.scaled(s, self.numbers.common), copy, True),
            (w.product_with_number, copy, True),
            (lambda s: w.scaled(s, self.numbers.sizes), literal, True),
            (w.other_reduction, named("mean"), False),
            (w.other_reduction, named("sum"), False),
            (lambda s: w.other_input(s, True), any_op, False),
            (lambda s: w.other_input(s, False), any_op, True),
            (lambda s: talk.in_place(s, ("avg", "max", "sum")), named(*SUMS), False),
            (lambda s: talk.missing_sum(s) if len(s) > 1 else iter(()), lambda op: op.name in CONTRACTIONS, False),
        ]

    @staticmethod
    def _failing(sites: Sequence[Site], good: Mapping[Node, int]) -> list[Site]:
        """Sites without the tensors that an output depends on which is right, if some are left, before the whole ones."""
        found: dict[Site, None] = {}
        for site in sites:
            left = tuple(n for n in site if n not in good)
            found |= dict.fromkeys((left, site) if 1 < len(left) < len(site) else (site,))
        return list(found)

    def _one_loss(self, site: Site) -> bool:
        """Whether a plan has several losses and a site belongs to one of them."""
        return len(self._losses) > 1 and sum(any(n in after for n in site) for after in self._losses) == 1

    @cached_property
    def _losses(self) -> list[set[Node]]:
        """What depends on each of the gradients that backward starts with, of the first class of ranks."""
        starts = [n for n, op in self.graph.ops.items() if n[0] == 0 and op.name == "full" and op.phase == "backward"]
        return [self.graph.after([n]) for n in starts if self.small.local_shapes[0][n[1]] == ()]

    def _refined(self, found: Found) -> Found:
        """A missing sum over ranks, by what the plan does in its place: a sum that nothing uses, or an average further on."""
        over = found.repair.over
        if over is None:
            return found
        sums = [n for n, op in self.graph.ops.items() if op.name in SUMS and self.communication.over(n) == over]
        behind, after = self.graph.marks({found.node: 1}), self.graph.after([found.node])
        for n in sums:
            op, given = self.graph.ops[n], (n[0], str(self.graph.ops[n].inputs[0]))
            if n in after and op.get("op", "sum") != "sum":
                text = f"{op.name} with {op.get('op')} over {over} of {given[1]}, where {found.node[1]} must be summed over {over} before"
                return replace(found, node=n, repair=replace(found.repair, text=text, cause=Cause.WRONG_REDUCTION))
        for n in self.rewrites.unused_nodes:
            given = (n[0], str(self.graph.ops[n].inputs[0])) if n in sums else n
            users = [m for i in self.graph.users.get(found.node, ()) for m in self.graph.tasks[i].makes]
            if n in sums and users and (given in behind or given in after):
                text = f"takes {found.node[1]}, a share, while the sum over {over} is in {n[1]}, which nothing uses"
                return replace(found, node=users[0], repair=replace(found.repair, text=text, cause=Cause.STALE_INPUT))
        return found

    def _after_backward(self, op: Op) -> bool:
        """A product with a literal of which no gradient is taken."""
        return after_backward(op) and op.inputs[0] not in self._differentiated

    @cached_property
    def _differentiated(self) -> set[str | None]:
        return {op.inputs[0] for op in self.graph.ops.values() if op.name.endswith(".grad") and op.inputs}

    def _shifted(self, reached: Mapping[Node, int]) -> Found | None:
        """A buffer that is written and read at other positions than it should be."""
        pads = [s for s in self.statements.of(named("pad")) if self._bits(s, reached)]
        slices = [s for s in self.statements.of(named("slice")) if self._bits(s, reached)]
        start, kind = self.runs, Kind(lambda site: iter(()), suspicious=False)
        for some, others in pairs(pads, slices, MOST_OF_A_KIND // 10):
            for repair in self.places.shifted_buffer(some, others):
                if self.runs - start < MOST_OF_A_KIND and self._works(repair, kind):
                    return self._found(some, repair)
        self.runs = start
        return None

    def _scalars(self, sites: Sequence[Site]) -> list[Site]:
        """Those of single constants: the gradient that backward starts with, say."""
        return [s for s in sites if all(self.graph.ops[n].name == "full" and self.small.local_shapes[n[0]][n[1]] == () for n in s)]

    def _origin(self, found: Found, kind: Kind) -> Found | None:
        """Where a share that goes through ops as if it were whole should have been added up: before them, not after."""
        op = self.graph.ops.get(found.node)
        if op is not None and op.name == "identity":  # what is left of a collective
            return None
        behind = self.graph.marks({found.node: 1})
        later = self._moved({found.node})
        sites = [s for level in self.siblings.levels[:2] for s in level if all(n in behind and n not in later for n in s)]
        best: tuple[Site, Repair] | None = None
        start = self.runs
        for site in sorted(sites, key=lambda s: max(self.graph.position[n] for n in s)):
            if all(n in self.healthy for n in site) or (best is not None and not self._moved(set(site)).issuperset(best[0])):
                continue
            for repair in kind.repairs(site):
                if self.runs - start < MOST_OF_A_KIND and repair.text == found.repair.text and self._works(repair, kind):
                    best = site, repair
        return None if best is None else self._found(*best)

    def _moved(self, nodes: set[Node]) -> set[Node]:
        """What tensors are made from by moving, adding and scaling alone, and they themselves."""
        found, todo = set(nodes), list(nodes)
        while todo:
            for i in self.graph.makers.get(todo.pop(), ()):
                task = self.graph.tasks[i]
                if task.what.op.name in LINEAR | SCALING | REDUCING:
                    new = [n for n in task.reads if n not in found]
                    found.update(new)
                    todo += new
        return found

    def _together(self, reached: Mapping[Node, int]) -> Found | None:
        """Several ops unlike those of another micro-batch or stage: all of them made as they are there, then as few as it takes."""
        kind = Kind(self.likes.twin, suspicious=False)
        start = self.runs
        for some in self._unlike_another(reached):
            if self.runs - start > MOST_OF_A_KIND:
                break
            if len(some) > 1 and self._works(_joined(some), kind):
                some = self._fewer(some, kind)
                return self._found(next(iter(some)), _joined(some))
        self.runs = start  # other kinds still have all their time
        return None

    def _unscaled(self, reached: Mapping[Node, int]) -> Found | None:
        """Identities where products with one number are needed, as where nothing is clipped, or the other way round: all of them, those
        whose names end alike, or those of one name; then as few as it takes."""
        groups: dict[tuple[str, str, tuple[str, str]], dict[Site, Repair]] = {}
        for node in (n for n in dict.fromkeys(self.graph.nodes) if n in reached):
            for what, repair in self.repairs.other_factor(node).items():
                for ending, name in (("", ""), (node[1].rpartition(".")[2], ""), ("", node[1])):
                    groups.setdefault((name, ending, what), {})[(node,)] = repair
        start, kind = self.runs, Kind(lambda site: iter(()), suspicious=False)
        for _, some in sorted(groups.items(), key=lambda g: [bool(x) for x in g[0]]):
            if self.runs - start < MOST_OF_A_KIND and self._works(_joined(some), kind):
                some = self._fewer(some, kind)
                whole, others = _joined(some), len({n for site in some for _, n in site}) - 1
                text = f"{whole.text}, as in {others} other{'s' if others > 1 else ''}" if others else whole.text
                return self._found(next(iter(some)), replace(whole, text=text))
        self.runs = start
        return None

    def _unlike_another(self, reached: Mapping[Node, int]) -> Iterator[dict[Site, Repair]]:
        """All that differs between two micro-batches, between all and one, between the ranks of one program and those of another."""
        sites = [tuple((c, o) for o in op.outputs) for c, k in enumerate(self.small.classes) for op in k.program.ops if op.outputs]
        sites = [s for s in sites if self._bits(s, reached)]
        unlike: dict[tuple[str, str], dict[Site, Repair]] = {}
        for site in sites:
            self.watch.look()
            for (_, other), repair in self.likes.unlike(site, self.siblings.twins(site[0])):
                unlike.setdefault((first_number(site[0][1]), first_number(other)), {}).setdefault(site, repair)
        yield from list(unlike.values())[:MOST_PAIRS]
        from_one: dict[str, dict[Site, Repair]] = {}
        for (_, other), some in unlike.items():
            from_one.setdefault(other, {}).update(some)
        yield from list(from_one.values())[:MOST_PAIRS]
        for c, d in itertools.islice(itertools.permutations(range(len(self.small.classes)), 2), MOST_PAIRS):
            some = {}
            for site in sites:
                like = next((n for n in self.siblings.of(site[0]) if n[0] == d), None) if site[0][0] == c else None
                for _, repair in self.likes.unlike(site, [like] if like is not None else []):
                    some.setdefault(site, repair)
            yield some

    def _fewer(self, some: dict[Site, Repair], kind: Kind) -> dict[Site, Repair]:
        """As few of some changes as do, by leaving out half of them, a quarter, and so on; as far as there is time."""
        start, size = self.runs, len(some) // 2
        while size:
            sites = sorted(some, key=lambda s: -self.graph.position[s[0]])
            for i in range(0, len(sites), size):
                less = {s: r for s, r in some.items() if s not in sites[i : i + size]}
                if less and self.runs - start < MOST_OF_A_KIND and self._works(_joined(less), kind):
                    some = less
            size //= 2
        return some

    @staticmethod
    def _bits(site: Site, marks: Mapping[Node, int]) -> int:
        found = 0
        for n in site:
            found |= marks.get(n, 0)
        return found

    def _excluded(self, failed: set[Node]) -> bool:
        """Whether one op makes all that is wrong from what is right: then nothing before it is to blame."""
        makers = {i for n in failed for i in self.graph.makers.get(n, ())}
        reads = {n for i in makers for n in self.graph.tasks[i].reads}
        return len({t for _, t in failed} - {o for i in makers for o in self.graph.tasks[i].what.op.outputs}) == 0 and all(
            n in self.healthy or n not in self.graph.makers for n in reads
        )

    def _unlike(self) -> list[Kind]:
        """An op that differs from those that play its part elsewhere: what is wrong most likely."""
        kinds = (self.likes.twin, self.likes.sibling, self.communication.like_cousin)
        return [Kind(kind, suspicious=False) for kind in kinds]

    def _kinds(self) -> list[Kind]:
        r, a, talk = self.repairs, self.attributes, self.communication
        return [
            Kind(r.other_number, suspicious=False, padding=True),
            Kind(r.exchanged_pieces, suspicious=False),
            Kind(r.other_slice, suspicious=False),
            Kind(a.as_logical, suspicious=False),
            Kind(a.missing_input, suspicious=False),
            Kind(talk.other_partner, suspicious=False),
            Kind(a.other_attribute, suspicious=False),
            Kind(r.dropped),
            Kind(r.other_input),
            Kind(lambda site: talk.other_collective(site, False)),
            Kind(talk.missing_sum, last=True, share=True),
            Kind(lambda site: talk.other_collective(site, True)),
            Kind(r.missing_term, last=True),
            Kind(r.left_out_term, suspicious=False),
            Kind(r.extra_term),
            Kind(lambda site: r.exchanged(site, False), suspicious=False),
            Kind(lambda site: r.exchanged(site, True), suspicious=False),
            Kind(lambda site: r.scaled(site, self.numbers.common)),
            Kind(lambda site: talk.other_collective(site, False), suspicious=False),
            Kind(r.other_input, suspicious=False),
        ]

    def _first(self, kind: Kind, sites: Sequence[Site], most: int = MOST_OF_A_KIND, total: int = MOST_RUNS) -> Found | None:
        second: tuple[Site, Repair] | None = None  # on a tensor that is scaled on the way; the one before that is better
        start = self.runs
        for site in reversed(sites) if kind.last else sites:
            self.watch.look()
            if self.runs - start > most or self.runs > total:
                break
            if kind.suspicious and all(n in self.healthy for n in site):
                continue
            for repair in kind.repairs(site):
                self.watch.look()
                if self.runs - start > most or self.runs > total:
                    break
                if self._works(repair, kind):
                    op = self.graph.ops.get(site[0])
                    if not kind.last or op is None or op.name not in SCALING:
                        return self._found(site, repair)
                    second = second or (site, repair)
                    break
        return None if second is None else self._found(*second)

    # -- trying ------------------------------------------------------------------------------------------------------

    def _works(self, repair: Repair, kind: Kind) -> bool:
        return self._available(repair) and self._agree(repair, kind) and self._confirmed(repair)

    def _available(self, repair: Repair) -> bool:
        """Whether every op gets only what its rank has made before."""
        return all(
            self._line(n) <= self._line(node) or n == node
            for node, edit in repair.edits.items()
            for n in edit.reads
            if n[0] == node[0] and n not in edit.raw
        )

    def _confirmed(self, repair: Repair) -> bool:
        """Whether all outputs agree at points that no repair was chosen by, but for those that differ by what may be rounding."""
        unclear = self.doubtful - {self._node(s) for s in self.wrong}
        wanted = [s for s in self.wanted if self._node(s) not in unclear]
        for point in self.fresh():
            replay = Replay(self.graph, point.plan, repair.edits)
            try:
                good = all(self._agrees(s, point, replay, DIFFERENT) or self._untouched(s, point, replay) for s in wanted)
            except (Circular, NotComputed, ArithmeticError, LookupError, ValueError):
                good = False
            self.runs += replay.runs
            if not good:
                return False
        return True

    def _agree(self, repair: Repair, kind: Kind) -> bool:
        for i, point in enumerate(self.points):
            replay = Replay(self.graph, point.plan, repair.edits)
            if any(self._node(s) not in replay.changed for s in self.wrong):
                return False  # it stays wrong
            try:
                spoils = i == 0 and not kind.padding and self._spoils(repair, replay, kind.suspicious)
                good = not spoils and all(self._agrees(s, point, replay) for s in self.wrong)
                if good and i == len(self.points) - 1:
                    good = all(self._agrees(s, point, replay, DIFFERENT) or self._untouched(s, point, replay) for s in self.wanted)
            except (Circular, NotComputed, ArithmeticError, LookupError, ValueError):  # a change that cannot be run
                good = False
            self.runs += replay.runs
            if not good:
                return False
        return True

    def _spoils(self, repair: Repair, replay: Replay, suspicious: bool) -> bool:
        """Whether a tensor that was right, one of the nearest, is no longer what it was."""
        right = self.passed | self.healthy if suspicious else self.passed
        found, seen, todo = 0, set(repair.edits), list(repair.edits)
        while todo and found < NEAREST:
            for i in self.graph.users.get(todo.pop(0), ()):
                for n in self.graph.tasks[i].makes:
                    if n in seen:
                        continue
                    seen.add(n)
                    if n not in right:
                        todo.append(n)
                        continue
                    found += 1
                    now, before = np.asarray(replay.value(n)), np.asarray(replay.values[n[0]][n[1]])
                    if now.shape != before.shape or distance(now, before) > EQUAL:
                        return True
        return False

    def _agrees(self, s: Suspect, point: Point, plan: PlanValues, most: float = EQUAL) -> bool:
        whole = point.logical[s.obligation.output.tensor]
        if plan.get(*self.small.places[s.rank], s.layout.local) is None:
            return False
        pairs = held(self.small, s.obligation, s.layout, s.rank, whole, plan)
        return all(
            got.shape == want.shape and (distance(got, want) <= most or bool(np.max(np.abs(got - want), initial=0) < NOISE))
            for got, want, _ in pairs
        )

    def _untouched(self, s: Suspect, point: Point, plan: PlanValues) -> bool:
        """Whether an output that is right at the first point is at this one what it was: noise where the logical value is zero."""
        at = self.small.places[s.rank]
        return self._node(s) not in self.doubtful and np.array_equal(
            np.asarray(plan.get(*at, s.layout.local)), np.asarray(point.plan.get(*at, s.layout.local)), equal_nan=True
        )

    def _node(self, s: Suspect) -> Node:
        return self.small.places[s.rank][0], s.layout.local

    def _found(self, site: Site, repair: Repair) -> Found:
        """The tensor to name, and one of its elements before and after."""
        if repair.named is not None:
            return Found(repair.named, repair, 0, math.nan, math.nan)
        base = self.points[0].plan
        replay = Replay(self.graph, base, repair.edits)
        first = min(repair.edits, key=lambda n: self.graph.position[n])[0]
        for c, t in sorted(repair.edits, key=lambda n: (n[0] != first, self._line(n), self.graph.position[n])):
            old, new = np.asarray(base.values[c][t]), np.asarray(replay.value((c, t)))
            for row in range(len(old)):
                a, b = old[row, ...].reshape(-1), new[row, ...].reshape(-1)
                with np.errstate(all="ignore"):
                    off = np.flatnonzero(~np.isclose(a, b, rtol=1e-9, atol=0))
                if off.size:
                    return Found((c, t), repair, row, float(a[off[0]]), float(b[off[0]]))
        return Found(site[0], repair, 0, math.nan, math.nan)

    def _line(self, node: Node) -> int:
        """Where in its program a tensor is made."""
        return self._lines.get(node, -1)

    @cached_property
    def _lines(self) -> dict[Node, int]:
        return {(c, o): i for c, k in enumerate(self.small.classes) for i, op in enumerate(k.program.ops) for o in op.outputs}

    # -- what is beyond suspicion ------------------------------------------------------------------------------------

    def _healthy(self) -> set[Node]:
        """Tensors that are a part of a logical one, and what adds up to such by moving and summing only."""
        prints = Fingerprints([p.logical for p in self.points])
        nodes = list(dict.fromkeys(self.graph.nodes))
        found: set[Node] = set()
        for i in range(0, len(nodes), AT_ONCE):
            self.watch.look()
            some = nodes[i : i + AT_ONCE]
            known = prints.known([[p.plan.values[c].get(t) for p in self.points] for c, t in some])
            found.update(n for n, yes in zip(some, known, strict=True) if yes)
        for i in reversed(self.graph.order):
            task = self.graph.tasks[i]
            if task.what.op.name in LINEAR and any(n in found for n in task.makes):
                found.update(n for n in task.reads if task.what.op.name != "slice" or self._used_well(n, found))
        return found

    def _used_well(self, node: Node, healthy: set[Node]) -> bool:
        """Whether all that is made from a tensor is healthy: of a flat buffer, one slice may be right and another wrong."""
        return all(any(n in healthy for n in self.graph.tasks[i].makes) for i in self.graph.users.get(node, ()))


def _joined(some: Mapping[Site, Repair]) -> Repair:
    texts = list(dict.fromkeys(r.text for r in some.values()))
    more = f"; and {len(texts) - SHOWN} more" if len(texts) > SHOWN else ""
    return Repair(
        "; ".join(texts[:SHOWN]) + more,
        {n: e for r in some.values() for n, e in r.edits.items()},
        next((r.cause for r in some.values()), None),
    )
