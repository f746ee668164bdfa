"""What runs outside of shard_map sees whole arrays. How XLA cuts that is its own choice; the values are these.

Elementwise functions of arrays that are cut alike, and sums, are computed on the shares; for anything else every rank has the whole arrays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from trainverify.graph.program import EMPTY, Source
from trainverify.graph.types import TensorType
from trainverify.jax.control import CONTROL
from trainverify.jax.interpret import Interpreter, Item, type_of
from trainverify.jax.lines import function_line, where
from trainverify.jax.mappings.communication import groups
from trainverify.jax.places import Free, Sharded, Spec, as_sharded, layout, local_shape, spec_of, whole
from trainverify.jax.replicas import remember
from trainverify.jax.values import Key, Number, Opaque, Value, lost
from trainverify.translate.emit import Unmapped

ELEMENTWISE: Final = frozenset(
    (
        *(
            "add",
            "add_any",
            "sub",
            "mul",
            "div",
            "neg",
            "max",
            "min",
            "pow",
            "integer_pow",
            "square",
            "sqrt",
            "rsqrt",
            "exp",
            "log",
            "tanh",
        ),
        *("logistic", "abs", "sign", "lt", "le", "gt", "ge", "eq", "ne", "and", "or", "not", "select_n", "convert_element_type", "copy"),
        *("stop_gradient", "sharding_constraint", "reshard", "log1p", "expm1", "erf", "sin", "cos", "is_finite"),
    )
)


class WholeInterpreter(Interpreter):
    """A jaxpr on whole arrays, with shard_map in it."""

    def __init__(self, *args: Any, hints: Mapping[str, Spec] = EMPTY, **options: Any):
        super().__init__(*args, **options)
        self.hinted = dict(hints)  # how arguments lie that no shard_map takes first
        self.hints: dict[str, Spec] = {}  # the same, from where results lie
        self.mapped: set[str] = set()  # arguments that a shard_map takes first
        self.handlers = {**self.handlers, "shard_map": shard_map}
        self.lies: dict[str, Spec] = {}  # how arguments lie
        self.maps: list[Source | None] = []  # the lines of all shard_maps
        self.cuts: set[str] = set()  # primitives that run on whole arrays between shard_maps

    def place(self, item: Free, spec: Spec) -> str:
        """An argument with its first use."""
        if item.name not in self.e.tensors:
            spec = self.hinted.get(item.name, spec)
            self.lies[item.name] = spec
            self.e.declare(item.name, TensorType(local_shape(item.type.shape, spec, self.e.mesh), item.type.dtype))
        return item.name

    def placed(self, item: Item) -> Value | Sharded:
        """A value whose place is known; an argument that nobody has used lies whole on every rank."""
        if not isinstance(item, Free):
            return item
        self.place(item, ((),) * len(item.type.shape))
        return Sharded(item.name, self.lies[item.name], item.type.shape)

    def settled(self, item: Item) -> Item:
        """An argument that another use has placed already, or of which it is known where it lies."""
        return self.placed(item) if isinstance(item, Free) and (item.name in self.lies or item.name in self.hinted) else item

    def everywhere(self, item: Sharded | Free) -> Value:
        found = self.placed(item)
        return whole(self.e, self.agreed(found)) if isinstance(found, Sharded) else found

    def agreed(self, x: Sharded) -> Sharded:
        """A value of which ranks that hold the same share are compared: another output says that they hold the same."""
        if x.checked:
            return x
        axes = tuple(n for n, size in self.e.mesh.axes if size > 1 and not any(n in names for names in x.spec))
        if axes and isinstance(x.local, str):
            remember(self.e, x.local, axes)
        elif not isinstance(x.local, Number):
            raise Unmapped("replicas that nothing compares are taken for one array: results of a shard_map with check_vma=False")
        return replace(x, checked=True)

    def primitive(self, eqn: Any, given: list[Item]) -> Sequence[Item]:
        given = [self.settled(v) for v in given]
        if not any(isinstance(v, Sharded | Free) for v in given):
            return super().primitive(eqn, given)
        self.cuts.add(eqn.primitive.name)
        if eqn.primitive.name in ELEMENTWISE:
            specs = {v.spec for v in given if isinstance(v, Sharded) and any(v.spec)}
            shape = tuple(eqn.outvars[0].aval.shape)
            if len(specs) <= 1:
                return self.elementwise(eqn, given, specs.pop() if specs else ((),) * len(shape), shape)
        given = [self.agreed(v) if isinstance(v, Sharded) else v for v in given]
        if eqn.primitive.name == "reduce_sum" and isinstance(x := self.placed(given[0]), Sharded):
            return [self.total(eqn, x)]
        values = [whole(self.e, v) if isinstance(v := self.placed(item), Sharded) else v for item in given]
        found = super().primitive(eqn, list(values))
        return [_everywhere(self, v) for v in found]

    def elementwise(self, eqn: Any, given: list[Item], spec: Spec, shape: tuple[int, ...]) -> Sequence[Item]:
        """On shares that are cut alike; what all ranks have is cut as the others are."""
        values: list[Value] = []
        for v in given:
            rank = len(_shape(self, v))
            cut = spec if rank else ()
            if isinstance(v, Free):
                values.append(self.place(v, cut))
            else:
                values.append(as_sharded(self.e, v, cut))
        types = [
            TensorType(local_shape(v.aval.shape, spec, self.e.mesh) if v.aval.shape else (), type_of(v.aval).dtype) for v in eqn.invars
        ]
        local = local_shape(shape, spec, self.e.mesh)
        avals = [v.aval.update(shape=local) for v in eqn.outvars]
        checked = all(v.checked for v in given if isinstance(v, Sharded))
        return [Sharded(v, spec, shape, checked) for v in self.apply(eqn.primitive.name, values, eqn.params, types, avals)]

    def total(self, eqn: Any, x: Sharded) -> Item:
        """A sum of shares is added up over the axes that cut what is summed over."""
        gone = tuple(eqn.params["axes"])
        spec = tuple(axes for d, axes in enumerate(x.spec) if d not in gone)
        shape = tuple(eqn.outvars[0].aval.shape)
        axes = tuple(a for d, names in enumerate(x.spec) if d in gone for a in names)
        if not isinstance(x.local, str):
            return self.primitive_of_whole(eqn, x)
        kind = TensorType(tuple(n for d, n in enumerate(self.e.shape(x.local)) if d not in gone), type_of(eqn.outvars[0].aval).dtype)
        made = self.fitting(self.e.op("sum", (x.local,), {"dim": gone}), kind) if gone else x.local
        if axes:
            names, _ = groups(self.e, axes)
            total = self.e.communicate("all_reduce", (made,), {"group": names}, self.e.tensors[made])
            made = self.fitting(total or made, kind)
        return Sharded(made, spec, shape)

    def primitive_of_whole(self, eqn: Any, x: Sharded) -> Item:
        (found,) = super().primitive(eqn, [whole(self.e, x)])
        return _everywhere(self, found)


def _everywhere(i: WholeInterpreter, value: Item) -> Item:
    """A tensor that every rank has whole."""
    return Sharded(value, ((),) * len(i.e.shape(value)), i.e.shape(value)) if isinstance(value, str) else value


def _shape(i: WholeInterpreter, item: Item) -> tuple[int, ...]:
    match item:
        case Free():
            return item.type.shape
        case Opaque():
            raise Unmapped(item.reason)
        case str():
            return i.e.shape(item)
        case _:
            return item.shape


_READ: Final = frozenset(("mesh", "in_specs", "out_specs", "jaxpr", "check_vma", "newly_manual_axes"))


def shard_map(i: Interpreter, eqn: Any, given: list[Item]) -> Sequence[Item]:
    """Every rank takes its shares of the arguments and runs the body; the results are shares as the out_specs say."""
    p, e = eqn.params, i.e
    if any(n not in e.mesh.names or e.mesh.length(n) != size for n, size in p["mesh"].shape.items()):
        raise Unmapped(f"a shard_map on {p['mesh']}, not on {e.mesh}")
    if list(p["mesh"].shape) != [n for n in e.mesh.names if n in p["mesh"].shape]:
        raise Unmapped(f"a shard_map on {p['mesh']}, which has its axes in another order than {e.mesh}")
    if unread := sorted(set(p) - _READ):
        raise Unmapped(f"parameter {unread[0]}={p[unread[0]]!r}")
    if left := sorted(n for n, size in e.mesh.axes if size > 1 and n not in p["newly_manual_axes"]):
        raise Unmapped(f"a shard_map that leaves axis {left[0]} to XLA: what its devices run is read with --hlo")
    values: list[Value] = []
    for item, partition, var in zip(given, p["in_specs"], eqn.invars, strict=True):
        spec = spec_of(partition, len(var.aval.shape), e.mesh)
        if isinstance(item, Key) and any(spec):
            item = Opaque("keys that are cut over ranks")
        if isinstance(i, WholeInterpreter):
            item = i.settled(item)
            if isinstance(item, Sharded) and item.spec != spec:
                item = i.agreed(item)
            if isinstance(item, Free):
                i.mapped.add(item.name)
            values.append(i.place(item, spec) if isinstance(item, Free) else as_sharded(e, item, spec))
        else:
            assert not isinstance(item, Free)
            values.append(as_sharded(e, item, spec))
    body = Interpreter(e, i.literal, {**CONTROL, "shard_map": shard_map}, i.rows, i.meanings)
    body.phase, body.missing, body.calls, body.used = i.phase, i.missing, i.calls, i.used
    found = body.run(p["jaxpr"], (), values)
    specs = [spec_of(q, len(v.aval.shape), e.mesh) for q, v in zip(p["out_specs"], eqn.outvars, strict=True)]
    if isinstance(i, WholeInterpreter):
        i.maps.append(where(eqn.source_info)[0] or function_line(p["jaxpr"]))
    results: list[Item] = []
    for v, spec, var in zip(found, specs, eqn.outvars, strict=True):
        assert not isinstance(v, Sharded | Free)
        everywhere = {a for names in spec for a in names} == {n for n, size in e.mesh.axes if size > 1}
        if isinstance(v, Key) and not any(spec) and (p["check_vma"] or e.shared):
            results.append(v)
            continue
        results.append(lost(v) if isinstance(v, Opaque) else Sharded(v, spec, tuple(var.aval.shape), p["check_vma"] or everywhere))
    return results if isinstance(i, WholeInterpreter) else [whole(e, v) if isinstance(v, Sharded) else v for v in results]


__all__ = ["WholeInterpreter", "layout"]
