"""Communication as ops of our program: groups by their members, reductions as the call names them, results at `wait`."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from trainverify.check.findings import Finding
from trainverify.graph.program import Source
from trainverify.graph.types import TensorType
from trainverify.torch.agreement import Ledger, Said, call_of, lying
from trainverify.torch.buffers import Group, buffered, gathered_apart, in_order, pieces_of, reduced_to_owners
from trainverify.torch.handlers import handled
from trainverify.torch.integers import NARROW
from trainverify.torch.mappings.table import NoValue
from trainverify.torch.private import _disable_current_modes, unset_fake_temporarily
from trainverify.torch.rewrites import reduced_apart, uncut
from trainverify.torch.translate import Translator, type_of, view_of
from trainverify.torch.values import Unknown, Unmapped, Value
from trainverify.torch.views import is_dense, memory_order

REDUCTIONS: Final = {"SUM": "sum", "AVG": "avg", "MAX": "max", "MIN": "min", "PRODUCT": "prod"}
FUNCTIONAL: Final = {"sum": "sum", "avg": "avg", "max": "max", "min": "min", "product": "prod"}


REDUCED: Final = "what ranks were reduced to before the step"
_ANY_ORDER: Final = ("all_reduce", "broadcast", "reduce ")  # element by element: dense memory of any order, the same on all ranks


def _way(op: Any) -> str:
    kind = str(getattr(op, "op", op)).rpartition(".")[2]
    return f"{kind} {getattr(op, 'factor', None)}" if kind == "PREMUL_SUM" else kind


def _lying(tensors: Sequence[torch.Tensor]) -> str:
    return " and ".join(map(lying, tensors))


def _dense(tensors: Sequence[torch.Tensor], contiguous: bool) -> None:
    """Backends move memory, not elements: gaps, and orders other than that of rows, change what arrives where."""
    for t in tensors:
        if not t.is_contiguous() and (contiguous or not is_dense(view_of(t))):
            raise Unmapped(f"a tensor {list(t.shape)} with strides {list(t.stride())}, which is not contiguous")


def group_name(members: tuple[int, ...], number: int) -> str:
    """The name of the group of these members that was made as the `number`-th on a rank."""
    few = len(members) <= 16
    text = ",".join(map(str, members)) if few else f"{members[0]}..{members[-1]}x{len(members)}.{zlib.crc32(repr(members).encode()):08x}"
    return f"ranks {text}" + (f" #{number}" if number else "")


def group_number(name: str) -> int:
    return int(name.rpartition("#")[2]) if "#" in name else 0


TAGS: Final = 1000  # of one group


def tag_of(name: str, tag: int) -> int:
    """A tag that messages of other groups do not have."""
    return (1 + zlib.crc32(name.encode()) % 100_000) * TAGS + tag


@dataclass
class Flight:
    """Communication that is under way: what it will write, and what must not change meanwhile."""

    number: int
    results: list[tuple[torch.Tensor, Value]]
    inputs: list[tuple[int, int]]  # (storage, version)
    source: Source | None
    landed: bool = False
    over: bool = False  # its step has ended before it was waited for
    batch: int | None = None  # of a message: which ones were started together with it


@dataclass
class Talk:
    """All communication of one rank."""

    translator: Translator
    rank: int
    groups: dict[str, Group] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    flights: list[Flight] = field(default_factory=list)
    batch: int = 0
    ledger: Ledger = field(default_factory=Ledger)
    assumed: list[str] = field(default_factory=list)
    unused: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)  # group and parameters that this rank has not used
    received: set[str] = field(default_factory=set)  # tensors before the first step that another rank gives this one
    late: set[Source | None] = field(default_factory=set)  # where communication starts that a later step waits for
    in_batch: bool = False  # between the first and the last message of a batch that the user names
    _seen: dict[tuple[int, ...], int] = field(default_factory=dict)
    _messages: list[Flight] = field(default_factory=list)  # that are under way
    _collectives: list[tuple[Flight, str]] = field(default_factory=list)  # likewise, and their groups

    def counted_group(self, members: Sequence[int]) -> int:
        """How many groups of these members there were when one more is made. All ranks make groups in one order; they may use them in
        another."""
        key = tuple(members)
        number = self._seen[key] = self._seen.get(key, -1) + 1
        return number

    def group(self, members: Sequence[int], number: int) -> Group:
        """A group that is used for the first time."""
        key = tuple(members)
        name = group_name(key, number)
        made = self.groups[name] = Group(name, key)
        return made

    # -- results that are under way -------------------------------------------------------------------------------------

    def start(self, inputs: Sequence[torch.Tensor], results: Sequence[tuple[torch.Tensor, Value]]) -> Flight:
        """Results exist from `land` on."""
        t = self.translator
        place = t.emitter.place
        written = {t.keep(tensor) for tensor, _ in results}
        versions = [(k, t.memory.storage(k).version) for k in map(t.keep, inputs) if k not in written]
        flight = Flight(len(self.flights), list(results), versions, place.source)
        self.flights.append(flight)
        for tensor, _ in results:
            t.followed.take(tensor)
            t.write(tensor, Unknown(f"the result of communication that was not waited for ({place.source})", place.source, flight.number))
        return flight

    def land(self, flight: Flight) -> None:
        """`wait`: from now on the results are there."""
        if flight.over:
            self.late.add(flight.source)
        if flight.landed:
            return
        flight.landed = True
        t = self.translator
        self.batch += not self.in_batch
        for key, version in flight.inputs:
            if t.memory.storage(key).version != version:
                self.find("TV502", "memory that is being sent is written before the communication is waited for", flight.source)
        for tensor, value in flight.results:
            now = t.read(tensor)
            if tensor.numel() and not (isinstance(now, Unknown) and now.pending == flight.number):
                self.find("TV502", "memory that is being received is written before the communication is waited for", flight.source)
            t.write(tensor, value)

    def renew(self) -> None:
        """The next step begins: what this one started and did not wait for has no value there."""
        for flight in self.flights:
            flight.over = flight.over or not flight.landed
            flight.landed = True
        self.flights, self.findings, self.unused = [], [], []
        self.ledger = Ledger(created=list(self.ledger.created), settled=self.ledger.settled)

    def _overlapping(self, group: Group) -> bool:
        """Whether messages are under way that were started before others, which have been waited for since; or collectives of another
        group."""
        self._messages = [f for f in self._messages if not f.landed]
        self._collectives = [(f, name) for f, name in self._collectives if not f.landed]
        return any(f.batch != self.batch for f in self._messages) or any(name != group.name for _, name in self._collectives)

    def _message(self, flight: Flight) -> Flight:
        flight.batch = self.batch
        self._messages.append(flight)
        return flight

    def assume(self, text: str) -> None:
        if text not in self.assumed:
            self.assumed.append(text)

    def find(self, code: str, message: str, source: Source | None) -> None:
        found = Finding(code, message, self.rank, None, source)
        if found not in self.findings:
            self.findings.append(found)

    def lost(self) -> None:
        """At the end: what was started and never waited for."""
        for flight in self.flights:
            if not flight.landed and flight.results:
                self.find("TV503", "communication that is never waited for", flight.source)

    # -- one kind after the other ---------------------------------------------------------------------------------------

    def _begin(self) -> bool:
        """Whether the step has begun: what is said before it is no part of it."""
        self.translator.emitter.place = self.translator._place()
        return self.translator.step is not None

    def in_memory(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The same memory as contiguous tensors: ranks exchange memory, whatever the order of dimensions is."""
        made = []
        for t in tensors:
            view = view_of(t)
            order = memory_order(view)
            plain = t.is_contiguous() or not is_dense(view)
            made.append(t if plain else t.detach().permute(order))
        return made

    def contiguous(self, *tensors: torch.Tensor) -> None:
        """Refuse tensors of which memory is not what their elements are in order."""
        for t in tensors:
            if not t.is_contiguous():
                shown = f"{list(t.shape)} with strides {list(t.stride())}"
                raise Unmapped(f"a tensor {shown} that is not contiguous: ranks exchange memory, not elements")

    def guarded(
        self,
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        make: Callable[[], Sequence[Value]],
        kind: str,
        group: Group,
        said: str | None = None,
        alike: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]] | None = None,
    ) -> Flight:
        """Emit communication; outside the step, and where an input has no value, results have none either.

        `said` is a collective as all members of its group have to call it, `alike` what it gives where they give the same numbers."""
        t = self.translator
        if not self._begin():
            numbers = t.followed.numbers(inputs) if alike is not None else None
            reduced = kind.startswith(("all_reduce", "reduce"))
            before = Unknown(REDUCED if reduced else "a value that was communicated before the step", t.emitter.place.source)
            for o in outputs:
                t.followed.take(o)
                t.write(o, before)
            if numbers is not None and alike is not None:
                settled = Said(f"{kind} before the step of {[v.tolist() for v in numbers]}", t.emitter.place.source)
                with _disable_current_modes():
                    t.followed.made(outputs, alike(numbers), lambda: self.ledger.settled.setdefault(group.name, []).append(settled))
            return Flight(-1, [], [], None, True)
        self.ledger.calls.append(call_of(kind, group.members, inputs or outputs))
        if said is not None:
            self.ledger.message(group.name, said, t.emitter.place.source)
        self.ledger.overlapping = self.ledger.overlapping or self._overlapping(group)
        try:
            _dense((*inputs, *outputs), said is None or not said.startswith(_ANY_ORDER))
            values: Sequence[Value] = make()
        except NoValue as error:
            values = [error.why] * len(outputs)
            t.missing_communication(error.why)
        except Unmapped as error:
            values = [Unknown(f"communication: {error}", t.emitter.place.source)] * len(outputs)
            t.missing_communication(values[0] if values and isinstance(values[0], Unknown) else Unknown(str(error), t.emitter.place.source))
        flight = self.start(inputs, list(zip(outputs, values, strict=True)))
        if said is not None:
            self._collectives.append((flight, group.name))
        return flight

    def emit(self, name: str, x: str, group: Group, kind: TensorType, **attrs: Any) -> str:
        e = self.translator.emitter
        if len(group.members) == 1 and name != "all_to_all":
            return e.reshape(x, kind.shape)
        self.whole_numbers(x, attrs.get("op"))
        items = reduced_apart(e, x) if name == "all_reduce" else None
        if items is not None:
            single = TensorType((), kind.dtype)
            return e.op("stack", [self.emit(name, e.cast(i, kind.dtype), group, single, **attrs) for i in items], {"dim": 0})
        if name == "all_reduce" and e.apart and (pieces := buffered(e, x)) is not None:
            made = [e.reshape(self.emit(name, p, group, e.tensors[p], **attrs), (size,)) for p, size in pieces]
            return e.op("concat", made, {"dim": 0})
        found = self.translator.emitter.communicate(name, (x,), {"group": group.name, **attrs}, kind)
        assert found is not None
        return found

    def reduction(self, op: Any) -> tuple[str, float | None]:
        """Our reduction, and the factor that every summand is multiplied by first."""
        kind = str(getattr(op, "op", op)).rpartition(".")[2]
        if kind == "PREMUL_SUM":
            factor = getattr(op, "factor", None)
            if not isinstance(factor, int | float):
                raise Unmapped(f"PREMUL_SUM with the factor {factor!r}")
            if handled(RuntimeError, ValueError):
                self.translator.boundary.note(
                    "a real run may raise an error at PREMUL_SUM, which gloo has not, and the code has a handler for it"
                )
            return "sum", float(factor)
        if kind not in REDUCTIONS:
            raise Unmapped(f"reduction {kind}")
        return REDUCTIONS[kind], None

    def whole_numbers(self, x: str, op: str | None) -> None:
        """Refuse reductions in which a backend's integers are not those of mathematics."""
        kind = self.translator.emitter.tensors[x]
        if op in (None, "max", "min") or kind.kind == "real":
            return
        if op == "avg" or kind.kind == "bool" or kind.dtype in NARROW:
            raise Unmapped(f"{op} of {kind.dtype}: backends round it, or it wraps around")

    def premultiplied(self, x: str, factor: float | None) -> str:
        t = self.translator
        return x if factor is None else t.emitter.op("mul", (x,), {"value": t.literals(factor)})

    def all_reduce(self, group: Group, tensors: Sequence[torch.Tensor], op: Any) -> Flight:
        tensors = self.in_memory(tensors)

        def make() -> list[Value]:
            self.contiguous(*tensors)
            ours, factor = self.reduction(op)
            made: list[Value] = []
            for x in tensors:
                name = self.premultiplied(self.translator.named(x), factor)
                made.append(self.emit("all_reduce", name, group, type_of(x), op=ours))
            return made

        way, n = _way(op), len(group.members)

        def alike(numbers: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
            return [v * n if way == "SUM" else v**n if way == "PRODUCT" else v for v in numbers]

        said = f"all_reduce {way} of {_lying(tensors)}"
        return self.guarded(tensors, tensors, make, "all_reduce", group, said, alike if way in REDUCTIONS else None)

    def used(self, group: Group, tensor: torch.Tensor, op: Any) -> Flight:
        """DDP's reducer adds up which parameters ranks have used; it reads the sum where this rank has not used one."""
        t = self.translator
        own = t.followed.take(tensor)
        flight = self.all_reduce(group, [tensor], op)
        if own is not None:
            t.followed.put(tensor, own)
            with unset_fake_temporarily():
                self.unused.append((group.name, tuple(i for i, n in enumerate(own.tolist()) if not n)))
        return flight

    def broadcast(self, group: Group, tensor: torch.Tensor, root: int) -> Flight:
        (tensor,) = self.in_memory([tensor])
        if not self._begin() and isinstance(value := self.translator.read(tensor), str):
            self._settled(group, f"broadcast before the step of {lying(tensor)}", value)
            if self.rank != root:
                self.received.add(value)
            return Flight(-1, [], [], None, True)
        if (counted := self.counted(tensor)) is not None:
            self.ledger.calls.append(call_of("broadcast", group.members, [tensor]))
            self.ledger.message(group.name, f"broadcast from {root} of {lying(tensor)}", self.translator.emitter.place.source)
            self.ledger.exchanged("broadcast of integers", counted, self.translator.emitter.place.source)
            return Flight(-1, [], [], None, True)

        def make() -> list[Value]:
            self.contiguous(tensor)
            return [self._sent(group, tensor, root)]

        return self.guarded([tensor], [tensor], make, "broadcast", group, f"broadcast from {root} of {lying(tensor)}")

    def same_constant(self, group: Group, tensor: torch.Tensor) -> None:
        """What a broadcast before the step would make equal is compared, where it follows from constants."""
        if isinstance(value := self.translator.read(tensor), str) and self.translator.emitter.is_constant(value):
            self._settled(group, f"broadcast before the step of {lying(tensor)}", value)

    def receives(self, tensors: Iterable[torch.Tensor]) -> None:
        """A broadcast before the step gives this rank what another one has made."""
        self.received.update(v for v in map(self.translator.read, tensors) if isinstance(v, str))

    def _settled(self, group: Group, what: str, value: str) -> None:
        e = self.translator.emitter
        self.ledger.settled.setdefault(group.name, []).append(Said(f"{what}, {e.fingerprint(value)}", e.place.source))

    def _sent(self, group: Group, tensor: torch.Tensor, root: int) -> str:
        """What a broadcast gives. Tables that the model has computed from constants stay what they are: those of all ranks are compared."""
        t, e = self.translator, self.translator.emitter
        whole = t.read(tensor)
        assert t.step is not None
        pieces = (buffered(e, whole) if isinstance(whole, str) else None) or [(str(whole), tensor.numel())]
        if not any(in_order(e, piece) in t.step.tables for piece, _ in pieces):
            return self.from_root("broadcast", group, tensor, root, type_of(tensor))
        made: list[str] = []
        for piece, size in pieces:
            found = piece
            if in_order(e, piece) in t.step.tables:
                self._settled(group, f"broadcast of {size} constants", piece)
            elif len(group.members) > 1:
                given = (piece,) if root == self.rank else ()
                found = str(e.communicate("broadcast", given, {"group": group.name, "root": root}, e.tensors[piece]))
            made.append(e.reshape(found, (size,)))
        return e.reshape(made[0] if len(made) == 1 else e.op("concat", made, {"dim": 0}), tuple(tensor.shape))

    def counted(self, tensor: torch.Tensor) -> list[int] | None:
        """The integers of a tensor that constants lead to (steps that a buffer counts): compared between ranks, they stay known."""
        if tensor.is_floating_point() or (found := self.translator.known(tensor)) is None:
            return None
        with unset_fake_temporarily():
            return [int(v) for v in found.reshape(-1).tolist()]

    def from_root(self, name: str, group: Group, x: torch.Tensor | None, root: int, kind: TensorType, **attrs: Any) -> str:
        """Communication in which only the root passes a tensor."""
        e = self.translator.emitter
        mine = root == self.rank
        assert x is not None or not mine
        if len(group.members) == 1 and x is not None:
            return e.reshape(self.translator.named(x), kind.shape)
        flat = TensorType((math.prod(kind.shape),), kind.dtype)
        given = (e.reshape(self.translator.named(x), flat.shape),) if mine and x is not None else ()
        made = e.communicate(name, given, {"group": group.name, "root": root, **attrs}, flat)
        assert made is not None
        return e.reshape(made, kind.shape)

    def reduce(self, group: Group, tensor: torch.Tensor, root: int, op: Any) -> Flight:
        (tensor,) = self.in_memory([tensor])

        def make() -> list[Value]:
            self.contiguous(tensor)
            ours, factor = self.reduction(op)
            e = self.translator.emitter
            name = self.premultiplied(self.translator.named(tensor), factor)
            self.whole_numbers(name, ours)
            kind = type_of(tensor)
            flat = TensorType((tensor.numel(),), kind.dtype)
            given = {"group": group.name, "root": root, "op": ours}
            made = e.communicate("reduce", (e.reshape(name, flat.shape),), given, flat if root == self.rank else None)
            return [
                e.reshape(made, kind.shape)
                if made is not None
                else Unknown("what a reduce leaves on ranks that are not its root", e.place.source)
            ]

        return self.guarded([tensor], [tensor], make, "reduce", group, f"reduce {_way(op)} to {root} of {lying(tensor)}")

    def all_gather(self, group: Group, outputs: Sequence[torch.Tensor], x: torch.Tensor) -> Flight:
        """The members' tensors as a list."""

        def make() -> list[Value]:
            self.contiguous(x, *outputs)
            self.same_shapes(x, *outputs)
            e, kind = self.translator.emitter, type_of(x)
            n = len(group.members)
            row = e.reshape(self.translator.named(x), (1, *kind.shape))
            whole = self.emit("all_gather", row, group, TensorType((n, *kind.shape), kind.dtype), dim=0)
            return [self.row(whole, i, kind.shape) for i in range(n)]

        return self.guarded([x], outputs, make, "all_gather", group, f"gathering all of {lying(x)}", lambda v: [v[0]] * len(outputs))

    def fits(self, group: Group, whole: torch.Tensor, part: torch.Tensor) -> None:
        """Refuse shapes of a tensor that has a part for every member, unless it is their concatenation or their stack."""
        n, shape = len(group.members), tuple(part.shape)
        if shape and tuple(whole.shape) == (n * shape[0], *shape[1:]):
            return
        if tuple(whole.shape) != (n, *shape):
            raise Unmapped(f"a tensor {list(whole.shape)} for {n} parts {list(shape)}: it is neither their concatenation nor their stack")
        self.assume("the backend takes a stack of the members' tensors for their concatenation: NCCL does, gloo raises an error")

    def same_shapes(self, *tensors: torch.Tensor) -> None:
        shapes = sorted({str(list(t.shape)) for t in tensors})
        if len(shapes) > 1:
            raise Unmapped(f"tensors of different shapes, {' and '.join(shapes[:2])}, for the members of a group")

    def row(self, whole: str, i: int, shape: tuple[int, ...]) -> str:
        e = self.translator.emitter
        return e.reshape(e.op("slice", (whole,), {"dim": 0, "start": i, "stop": i + 1}), shape)

    def gathered(self, group: Group, x: torch.Tensor, shape: tuple[int, ...]) -> str:
        """The members' tensors one after the other in memory, in this shape."""
        e, kind, n = self.translator.emitter, type_of(x), len(group.members)
        name = self.translator.named(x)
        if shape == (n, *kind.shape):
            name = e.reshape(name, (1, *kind.shape))
        local = e.shape(name)
        whole = self.emit("all_gather", name, group, TensorType((n * local[0], *local[1:]), kind.dtype), dim=0)
        return e.reshape(whole, shape)

    def all_gather_single(self, group: Group, output: torch.Tensor, x: torch.Tensor) -> Flight:
        def make() -> list[Value]:
            self.contiguous(x, output)
            self.fits(group, output, x)
            if (places := self.places(output, len(group.members))) is not None:
                return [gathered_apart(self.translator.emitter, group, self.rank, self.translator.named(x), places)]
            return [self.gathered(group, x, type_of(output).shape)]

        def alike(numbers: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
            return [numbers[0].reshape(-1).repeat(len(group.members))]

        return self.guarded([x], [output], make, "all_gather", group, f"gathering all of {lying(x)}", alike)

    def places(self, output: torch.Tensor, n: int) -> list[int] | None:
        """Where parameters begin and end in a flat buffer of several; None for any other tensor."""
        step, view = self.translator.step, view_of(output)
        bounds = step.bounds.get(self.translator.keep(output), set()) if step is not None else set()
        inside = sorted(b - view.offset for b in bounds if view.offset <= b <= view.stop)
        return inside if n > 1 and output.ndim == 1 and len(inside) > 2 else None

    def scattered(self, group: Group, name: str, shape: tuple[int, ...], op: str) -> str:
        """The sum over members, cut in memory order: the own block in this shape."""
        e, n = self.translator.emitter, len(group.members)
        whole = e.tensors[name]
        if (cut := uncut(e, name, n)) is not None and shape == (whole.shape[0] // n, *whole.shape[1:]):
            return self.emit("reduce_scatter", cut[0], group, TensorType(shape, whole.dtype), dim=cut[1], op=op)
        if not whole.shape or not shape or whole.shape != (n * shape[0], *shape[1:]):
            name = e.reshape(name, (n, math.prod(whole.shape) // n))
        local = (e.shape(name)[0] // n, *e.shape(name)[1:])
        made = self.emit("reduce_scatter", name, group, TensorType(local, whole.dtype), dim=0, op=op)
        return e.reshape(made, shape)

    def reduce_scatter_single(self, group: Group, output: torch.Tensor, x: torch.Tensor, op: Any) -> Flight:
        def make() -> list[Value]:
            self.contiguous(x, output)
            self.fits(group, x, output)
            ours, factor = self.reduction(op)
            name = self.premultiplied(self.translator.named(x), factor)
            e, kept = self.translator.emitter, self.translator.step is not None and self.translator.keep(x) in self.translator.step.before
            if (kept or e.apart) and len(group.members) > 1 and (places := pieces_of(e, name)) is not None:
                return [reduced_to_owners(e, group, self.rank, name, places, ours)]
            return [self.scattered(group, name, type_of(output).shape, ours)]

        return self.guarded([x], [output], make, "reduce_scatter", group, f"reducing {_way(op)} parts of {lying(output)}")

    def reduce_scatter(self, group: Group, output: torch.Tensor, xs: Sequence[torch.Tensor], op: Any) -> Flight:
        def make() -> list[Value]:
            self.contiguous(*xs, output)
            self.same_shapes(*xs, output)
            ours, factor = self.reduction(op)
            names = [self.premultiplied(self.translator.named(x), factor) for x in xs]
            stacked = self.translator.emitter.op("stack", names, {"dim": 0})
            return [self.scattered(group, stacked, type_of(output).shape, ours)]

        return self.guarded(xs, [output], make, "reduce_scatter", group, f"reducing {_way(op)} parts of {lying(output)}")

    def exchanged(self, group: Group, name: str, shape: tuple[int, ...]) -> str:
        e = self.translator.emitter
        attrs = {"split_dim": 0, "concat_dim": 0}
        made = e.communicate("all_to_all", (name,), {"group": group.name, **attrs}, e.tensors[name])
        assert made is not None
        return e.reshape(made, shape)

    def all_to_all_single(
        self, group: Group, output: torch.Tensor, x: torch.Tensor, output_sizes: Sequence[int], input_sizes: Sequence[int]
    ) -> Flight:
        def make() -> list[Value]:
            self.contiguous(x, output)
            if len(set(output_sizes)) > 1 or len(set(input_sizes)) > 1:
                raise Unmapped("an all-to-all with blocks of different sizes")
            return [self.exchanged(group, self.translator.named(x), type_of(output).shape)]

        return self.guarded([x], [output], make, "all_to_all", group, f"all-to-all of {str(x.dtype).removeprefix('torch.')}")

    def all_to_all(self, group: Group, outputs: Sequence[torch.Tensor], xs: Sequence[torch.Tensor]) -> Flight:
        def make() -> list[Value]:
            self.contiguous(*xs, *outputs)
            if len({type_of(x) for x in (*xs, *outputs)}) > 1:
                raise Unmapped("an all-to-all with blocks of different sizes")
            stacked = self.translator.emitter.op("stack", [self.translator.named(x) for x in xs], {"dim": 0})
            whole = self.exchanged(group, stacked, self.translator.emitter.shape(stacked))
            return [self.row(whole, i, type_of(o).shape) for i, o in enumerate(outputs)]

        return self.guarded(xs, outputs, make, "all_to_all", group, f"all-to-all of {str(xs[0].dtype).removeprefix('torch.')}")

    def scatter(self, group: Group, output: torch.Tensor, xs: Sequence[torch.Tensor], root: int) -> Flight:
        def make() -> list[Value]:
            self.contiguous(*xs, output)
            self.same_shapes(*xs, output)
            e, kind = self.translator.emitter, type_of(output)
            attrs = {"group": group.name, "root": root, "dim": 0}
            given = (e.op("stack", [self.translator.named(x) for x in xs], {"dim": 0}),) if root == self.rank else ()
            made = e.communicate("scatter", given, attrs, TensorType((1, *kind.shape), kind.dtype))
            assert made is not None
            return [e.reshape(made, kind.shape)]

        return self.guarded(xs, [output], make, "scatter", group, f"scatter from {root} of {lying(output)}")

    def gather(self, group: Group, outputs: Sequence[torch.Tensor], x: torch.Tensor, root: int) -> Flight:
        def make() -> list[Value]:
            self.contiguous(x, *outputs)
            self.same_shapes(x, *outputs)
            e, kind, n = self.translator.emitter, type_of(x), len(group.members)
            row = e.reshape(self.translator.named(x), (1, *kind.shape))
            whole = TensorType((n, *kind.shape), kind.dtype) if root == self.rank else None
            made = e.communicate("gather", (row,), {"group": group.name, "root": root, "dim": 0}, whole)
            return [] if made is None else [self.row(made, i, kind.shape) for i in range(n)]

        return self.guarded([x], outputs, make, "gather", group, f"gather to {root} of {lying(x)}")

    def barrier(self, group: Group) -> None:
        if self._begin():
            self.ledger.message(group.name, "barrier", self.translator.emitter.place.source)

    def tag(self, group: Group, tag: int) -> int:
        """Messages of different groups never meet."""
        whole = group.members == tuple(range(len(group.members))) and group.name.count("#") == 0
        return tag if whole else tag_of(group.name, tag)

    def send(self, group: Group, x: torch.Tensor, to: int, tag: int) -> Flight:
        (x,) = self.in_memory([x])

        def make() -> list[Value]:
            self.contiguous(x)
            attrs = {"peer": group.members[to], "tag": self.tag(group, tag), "batch": f"batch.{self.batch}"}
            e = self.translator.emitter  # a message is memory: it has a size and no shape
            e.communicate("send", (e.reshape(self.translator.named(x), (x.numel(),)),), attrs, None)
            return []

        return self._message(self.guarded([x], [], make, f"send to {group.members[to]}", group))

    def recv(self, group: Group, x: torch.Tensor, origin: int, tag: int) -> Flight:
        (x,) = self.in_memory([x])

        def make() -> list[Value]:
            self.contiguous(x)
            kind = type_of(x)
            attrs = {"peer": group.members[origin], "tag": self.tag(group, tag), "batch": f"batch.{self.batch}"}
            flat = TensorType((x.numel(),), kind.dtype)
            made = self.translator.emitter.communicate("recv", (), {**attrs, "shape": flat.shape, "dtype": flat.dtype}, flat)
            assert made is not None
            return [self.translator.emitter.reshape(made, kind.shape)]

        return self._message(self.guarded([], [x], make, f"recv from {group.members[origin]}", group))
