"""How ranks share the batch, from what their loaders gave them: equal contents are replicas, other rows are joined in the order of ranks.

Nothing is guessed: rows that some ranks have in common, or shapes that do not join, are refused with what to say instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, Final

from trainverify.graph.mesh import Mesh
from trainverify.graph.program import Program
from trainverify.torch.found_step import MARK, Loads
from trainverify.torch.inputs import Ids, Input
from trainverify.translate.targets import CaptureError

TWICE: Final = "ranks {} and {} load the same rows ({}): give the loader a DistributedSampler{}"
ALL: Final = ", or say which ranks are to have the same ones: --mesh tp={}"
SOME: Final = "ranks {} and {} load some of the same rows, and not all ({}): {}"
UNKNOWN: Final = "whether ranks {} and {} load the same rows cannot be seen ({}: rows without numbers and without values): {}"
# Ops that pass ids on as they are, and the input with rows for them of ops that look up.
_PASSING: Final = frozenset({"identity", "to", "reshape", "permute", "transpose", "slice", "concat", "stack", "expand", "chunk", "split"})


@dataclass(frozen=True)
class Declared:
    """What the command line says of a step that is found; None: nothing."""

    mesh: Mapping[str, int] | None = None
    below: Mapping[str, int] | None = None  # by tensor; "" for all others
    ignore: Mapping[str, int] | None = None
    loss: str | Mapping[str, str] | None = None

    def of(self, table: Mapping[str, int] | None, name: str) -> int | None:
        known = table or {}
        return known.get(name, known.get(name.partition(".micro")[0], known.get("")))


@dataclass(frozen=True)
class Shared:
    """How the batch lies on the mesh."""

    mesh: Mesh
    axes: tuple[str, ...]  # along which rows differ
    cuts: Mapping[str, str | None]  # by tensor
    shapes: list[list[dict[str, list[int]]]]  # of the whole batch
    assumed: tuple[str, ...]


def share(said: Sequence[Mapping[str, Any]], declared: Declared) -> Shared:
    """What all ranks loaded, as parts of one batch."""
    loads: list[Loads] = [s["loads"] for s in said]
    line, world = said[0]["line"], len(said)
    _alike(loads, line)
    first: dict[int, int] = {}  # rank → the first rank that loads the same
    for r in range(world):
        first[r] = next((a for a in range(r) if first[a] == a and _same(loads, a, r, line)), r)
    leaders = sorted(set(first.values()))
    mesh, axes = _mesh(world, first, leaders, declared, line)
    parts = len(leaders)
    cuts: dict[str, str | None] = {}
    shapes: list[list[dict[str, list[int]]]] = []
    for s, step in enumerate(loads[0]):
        shapes.append([])
        for k, batch in enumerate(step):
            shapes[-1].append({})
            rows = _rows(batch)
            for name, t in batch["tensors"].items():
                joins = bool(t["shape"]) and t["shape"][0] == rows and parts > 1
                if not joins and not _equal([x[s][k]["tensors"][name] for x in loads]):
                    raise CaptureError(
                        f"{line}: {name} of {t['shape']} has no row for each of the batch's {rows}, and ranks differ: {MARK}"
                    )
                names = " ".join(f"d{i}" for i in range(1, len(t["shape"])))
                cuts[name] = f"({' '.join(axes)} b) {names}".strip() if joins else None
                shapes[-1][-1][name] = [t["shape"][0] * parts, *t["shape"][1:]] if joins else t["shape"]
    return Shared(mesh, axes, cuts, shapes, tuple(_told(loads, first, leaders, mesh, axes, line)))


def _alike(loads: Sequence[Loads], line: str) -> None:
    """Refuse what cannot be joined: other numbers of batches, other names, other shapes."""
    for rank, other in enumerate(loads):
        for i, (a, b) in enumerate(zip(loads[0], other, strict=True)):
            if len(a) != len(b):
                raise CaptureError(f"{line}: in step {i + 1} rank 0 takes {len(a)} batches and rank {rank} takes {len(b)}: {MARK}")
            for one, two in zip(a, b, strict=True):
                shapes = [{n: t["shape"] for n, t in x["tensors"].items()} for x in (one, two)]
                if shapes[0] != shapes[1]:
                    found = next(n for n in (*shapes[0], *shapes[1]) if shapes[0].get(n) != shapes[1].get(n))
                    text = f"rank 0 loads {found} of {shapes[0].get(found)} and rank {rank} of {shapes[1].get(found)}"
                    raise CaptureError(f"{line}: {text}, which do not join: pad them alike, or {MARK}")


def _rows(batch: Mapping[str, Any]) -> int:
    """Of a batch: as many as its sampler drew, or as its first tensor with dimensions has."""
    if batch["rows"] is not None:
        return len(batch["rows"])
    return int(next((t["shape"][0] for t in batch["tensors"].values() if t["shape"]), 0))


def _equal(tensors: Sequence[Mapping[str, Any]]) -> bool:
    """Whether tensors are known to hold the same on all ranks."""
    return all(t["rows"] is not None and t["rows"] == tensors[0]["rows"] for t in tensors)


def _same(loads: Sequence[Loads], a: int, b: int, line: str) -> bool:
    """Whether two ranks load equal batches; refused unless they do, or have no row in common."""
    pairs = list(zip(loads[a], loads[b], strict=True))
    verdicts = {_compared(one, other) for ones, others in pairs for one, other in zip(ones, others, strict=True)}
    drawn = [[{r for x in step for r in x["rows"] or ()} for step in pair] for pair in pairs]
    if verdicts == {"apart"} and not any(ones & others for ones, others in drawn):
        return False
    if verdicts == {"same"}:
        return True
    if "unknown" in verdicts:
        raise CaptureError(UNKNOWN.format(a, b, f"the loader at {line}", MARK))
    raise CaptureError(SOME.format(a, b, f"the loader at {line}", MARK))


def _compared(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Of two batches: `same`, `apart` (no row in common), `some` or `unknown`."""
    numbered = one["rows"] is not None and other["rows"] is not None
    keys = [_keys(x) for x in (one, other)]
    if numbered:
        if one["rows"] == other["rows"] and keys[0] == keys[1]:
            return "same"
        return "some" if set(one["rows"]) & set(other["rows"]) else "apart"
    if keys[0] is None or keys[1] is None:
        return "unknown"
    if keys[0] == keys[1]:
        return "same"
    return "some" if set(keys[0]) & set(keys[1]) else "apart"


def _keys(batch: Mapping[str, Any]) -> list[tuple[str, ...]] | None:
    """What tells rows apart by their values; None if a tensor has none."""
    rows = _rows(batch)
    tensors = [t for t in batch["tensors"].values() if t["shape"]]
    if any(t["rows"] is None for t in tensors):
        return None
    return [tuple(t["rows"][i] for t in tensors if len(t["rows"]) == rows) for i in range(rows)]


def _mesh(world: int, first: Mapping[int, int], leaders: Sequence[int], declared: Declared, line: str) -> tuple[Mesh, tuple[str, ...]]:
    """A mesh on which ranks with the same rows are those with the same places along some axes; and these axes."""
    if declared.mesh is not None:
        mesh = Mesh(dict(declared.mesh))
        if mesh.size != world:
            raise CaptureError(f"--mesh has {mesh.size} ranks, --world-size says {world}")
        return mesh, _along(mesh, first, line)
    parts = len(leaders)
    if world > 1 and parts == 1:
        raise CaptureError(TWICE.format(0, 1, f"the loader at {line}", ALL.format(world)))
    if parts == world:
        return Mesh(dp=world), ("dp",)
    copies = world // parts
    for mesh in (Mesh(dp=parts, mp=copies), Mesh(mp=copies, dp=parts)) if parts * copies == world else ():
        if all(first[r] == first[s] for r, s in combinations(range(world), 2) if mesh.coordinates(r)["dp"] == mesh.coordinates(s)["dp"]):
            return mesh, ("dp",)
    same = {a: [r for r in first if first[r] == a] for a in leaders}
    raise CaptureError(f"{line}: ranks {list(same.values())} load the same rows, which are no axis of a mesh: {MARK}")


def _along(mesh: Mesh, first: Mapping[int, int], line: str) -> tuple[str, ...]:
    """The axes along which rows differ; one along which all ranks have the same rows is not `dp`."""
    axes = tuple(a for a in mesh.names if any(first[mesh.group(r, (a,))[0]] != first[r] for r in first))
    places = {r: tuple(mesh.coordinates(r)[a] for a in axes) for r in first}
    for r, s in combinations(first, 2):
        if (places[r] == places[s]) != (first[r] == first[s]):
            raise CaptureError(f"{line}: on {mesh} ranks {r} and {s} {'differ' if first[r] != first[s] else 'load the same rows'}: {MARK}")
    if "dp" in mesh.names and mesh.length("dp") > 1 and "dp" not in axes:
        one, other = mesh.group(0, ("dp",))[:2]
        raise CaptureError(TWICE.format(one, other, f"the loader at {line}", ""))
    return axes


def _told(
    loads: Sequence[Loads], first: Mapping[int, int], leaders: Sequence[int], mesh: Mesh, axes: Sequence[str], line: str
) -> Iterator[str]:
    batches = len(loads[0][0])
    many = f", {batches} batches in a step" if batches > 1 else ""
    yield f"inferred: a step goes from a batch of the loader at {line} to the next one, an optimizer's step between them{many}"
    if len(leaders) > 1:
        shown = [f"rank {r} {_numbers(loads[r][0][0])}" for r in leaders[:2]]
        told = f" ({', '.join(shown)}{', …' if len(leaders) > 2 else ''})" if loads[0][0][0]["rows"] is not None else ""
        yield f"inferred: ranks along {' and '.join(axes)} load different rows{told}; the reference is given all, in the order of ranks"
    yield "inferred: in the reference a data loader has as many batches as on a rank"
    if len(leaders) < len(first):
        same = [[r for r in first if first[r] == a] for a in leaders]
        yield f"inferred: ranks {same[0]} load the same batches{', and so on' if len(same) > 1 else ''}"


def _numbers(batch: Mapping[str, Any]) -> str:
    rows = batch["rows"] or []
    return ", ".join(map(str, rows[:3])) + (", …" if len(rows) > 3 else "")


# -- ranges of ids -----------------------------------------------------------------------------------------------------------


def left_out(said: Sequence[Mapping[str, Any]], declared: Declared) -> tuple[dict[str, int], bool]:
    """By tensor the label that stands for none: declared, or the only number below 0; and whether every batch was taken to have it."""
    below: dict[str, set[int]] = {}
    for name, t in _tensors(said):
        below.setdefault(name, set()).update(t["below_zero"])
    chosen = {n: (declared.of(declared.ignore, n), values) for n, values in below.items()}
    found = {n: min(values) if mine is None else mine for n, (mine, values) in chosen.items() if mine is not None or len(values) == 1}
    return found, all(t["below_zero"] == [found[name]] for name, t in _tensors(said) if name in found and t["low"] is not None)


def _tensors(said: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for s in said:
        for step in s["loads"]:
            for batch in step:
                yield from batch["tensors"].items()


def ranged(
    specs: Mapping[str, Input], shared: Shared, program: Program, said: Sequence[Mapping[str, Any]], declared: Declared
) -> tuple[dict[str, Input], list[str]]:
    """The batch with its cuts, and with the range of its ids: declared, or the rows of the tables that the reference looks them up in."""
    made: dict[str, Input] = {}
    told = []
    ignored, _ = left_out(said, declared)
    for name, spec in specs.items():
        if not isinstance(spec, Ids):
            made[name] = replace(spec, cut=shared.cuts[name])
            continue
        known = [t for n, t in _tensors(said) if n == name]
        lows, highs = [[t[k] for t in known if t[k] is not None] for k in ("low", "high")]
        ignore, below = ignored.get(name), declared.of(declared.below, name)
        if ignore is not None and declared.of(declared.ignore, name) is None:
            told.append(f"inferred: {name} holds {ignore} where there is no label")
        if lows and min(lows) < 0 and min(lows) != ignore:
            raise CaptureError(f"{name} holds {min(lows)}: say that it is ignored, --ignore {name}={min(lows)}; or {MARK}")
        if below is None:
            tables = looked_up(program, name)
            if not tables and lows and (min(lows), max(highs)) in ((0, 0), (0, 1), (1, 1)):
                tables = {"a mask, as in all batches that were loaded": 2}
            if not tables:
                raise CaptureError(f"{name} holds integers that nothing in the step looks up: say their range, --below {name}=N")
            below = min(tables.values())
            table = next(t for t, n in tables.items() if n == below)
            told.append(f"inferred: {name} holds ids below {below}, {'' if table.startswith('a mask') else 'the size of '}{table}")
        if highs and max(highs) >= below:
            raise CaptureError(
                f"{name} holds {max(highs)}, and its ids are below {below}: --below {name}={max(highs) + 1} if that is meant"
            )
        made[name] = replace(spec, cut=shared.cuts[name], below=below, ignore=ignore)
    return made, told


def looked_up(program: Program, name: str) -> dict[str, int]:
    """The tables that ids are looked up in, as they are, and how many rows these have."""
    ids, found = {name}, dict[str, int]()
    for op in program.ops:
        if op.name in _PASSING and any(i in ids for i in op.inputs):
            ids.update(op.outputs)
        elif op.name == "embedding" and op.inputs[0] in ids and op.inputs[1] is not None:
            found[op.inputs[1]] = program.tensors[op.inputs[1]].shape[0]
        elif op.name in ("nll_loss", "cross_entropy") and op.inputs[1] in ids and op.inputs[0] is not None:
            found[f"the classes at {op.source}"] = program.tensors[op.inputs[0]].shape[-1]
    return found


__all__ = ["Declared", "Shared", "looked_up", "ranged", "share"]
