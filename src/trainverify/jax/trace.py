"""Tracing a step: its jaxpr, the names of its arguments and results, and what each of them is for."""

from __future__ import annotations

import inspect
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from jax.extend.core import ClosedJaxpr

import jax
from trainverify.graph.program import Domain
from trainverify.jax.caught import none_caught
from trainverify.jax.inputs import domain_of, shape_of, starts_nonnegative
from trainverify.jax.steps import STEPS, fingerprint
from trainverify.jax.structures import matched
from trainverify.jax.whether_traced import none_asked
from trainverify.translate.emit import Unmapped

Kind = Literal["parameter", "state", "input"]
Role = Literal["loss", "metric", "parameter", "state", "gradient"]
RESULTS: Final = ("loss", "metric", "parameters", "state", "gradients")


class TraceError(Exception):
    """A step that cannot be traced, or whose results are not what is said about them."""


@dataclass(frozen=True)
class Argument:
    """One array of the arguments."""

    name: str
    shape: jax.ShapeDtypeStruct
    kind: Kind
    domain: Domain | None = None
    presumed: bool = False  # the domain is a guess, to be confirmed by what the step makes of it
    starts_nonnegative: bool | None = None  # whether its content has no negative elements, if it has content


@dataclass(frozen=True)
class Result:
    """One array of the results: its role, and the argument or metric it belongs to."""

    role: Role
    of: str | None


@dataclass(frozen=True)
class Traced:
    """A step on whole arrays."""

    jaxpr: ClosedJaxpr
    arguments: tuple[Argument, ...]
    results: tuple[Result, ...]
    donated: tuple[str, ...] = ()


def path_name(head: str, path: Sequence[Any]) -> str:
    rest = jax.tree_util.keystr(tuple(path), simple=True, separator=".")
    return f"{head}.{rest}" if rest else head


def argument_names(fn: Callable[..., Any], count: int) -> list[str]:
    try:
        found = [p.name for p in inspect.signature(fn).parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    except (TypeError, ValueError):
        found = []
    for i in range(len(found), count):  # those of *rest
        found.append(next(n for k in itertools.count(i) if (n := f"arg{k}") not in found))
    return found[:count]


def leaf_names(head: str, tree: Any) -> list[str]:
    """A name for every leaf. Paths that read alike ({"a": {"b": …}, "a.b": …}) are written with their brackets."""
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]
    found = Counter(path_name(head, path) for path in paths)
    return [n if found[n := path_name(head, path)] == 1 else head + jax.tree_util.keystr(tuple(path)) for path in paths]


def _children(tree: Any, shapes: Sequence[Any]) -> list[tuple[str, Any]]:
    """The parts of what a step returns, whatever holds them; one part if that is an argument's new value."""
    if any(matched(tree, s) is not None for s in shapes):
        return [("0", tree)]
    parts = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: x is not tree)[0]
    names = [path_name("", path).lstrip(".") or "0" for path, _ in parts]
    return [(jax.tree_util.keystr(path) if "." in n else n, part) for n, (path, part) in zip(names, parts, strict=True)]


def trace(fn: Callable[..., Any], args: Sequence[Any], roles: Sequence[str] | None = None, names: Sequence[str] | None = None) -> Traced:
    """The jaxpr of a step. Results that have the structure of an argument are its new value; a real scalar is the loss."""
    shapes = tuple(jax.tree_util.tree_map(shape_of, a) for a in args)
    heads = list(names or argument_names(fn, len(args)))
    jaxpr, out = _program(fn, shapes)
    results, updated = _results(out, shapes, heads, roles)
    arguments = []
    for i, (head, arg) in enumerate(zip(heads, args, strict=True)):
        leaves = jax.tree_util.tree_flatten_with_path(arg)[0]
        depth = min((d for path, _ in leaves if (d := _depth_of_params(path)) is not None), default=None)
        for name, (path, leaf) in zip(leaf_names(head, arg), leaves, strict=True):
            kind: Kind = "input"
            if i in updated:
                first = i == min(updated) if depth is None else _depth_of_params(path) == depth
                kind = "parameter" if first and is_real(shape_of(leaf).dtype) else "state"
            arguments.append(_argument(name, leaf, kind))
    kinds = {a.name: a.kind for a in arguments}
    fixed = [Result("parameter", r.of) if r.role == "state" and kinds.get(str(r.of)) == "parameter" else r for r in results]
    fixed = [Result("state", r.of) if r.role == "parameter" and kinds.get(str(r.of)) == "state" else r for r in fixed]
    return Traced(jaxpr, tuple(arguments), tuple(fixed), _donated(jaxpr, arguments))


def _program(fn: Callable[..., Any], shapes: Sequence[Any]) -> tuple[ClosedJaxpr, Any]:
    """What the first calls of a step compute, if all of them compute the same. Caches of other traces would hide what this one does."""
    jax.clear_caches()

    def traced(begin: Callable[[], None]) -> tuple[ClosedJaxpr, Any]:
        def step(*given: Any) -> Any:  # a function that JAX has not seen
            begin()
            return fn(*given)

        return jax.make_jaxpr(step, return_shape=True)(*shapes)  # type: ignore[no-any-return]

    with none_caught(), none_asked() as begin:
        found = [traced(begin) for _ in range(STEPS)]
    first = fingerprint(found[0][0])
    for n, (jaxpr, _) in enumerate(found[1:], 2):
        if fingerprint(jaxpr) != first:
            raise Unmapped(f"call {n} of the step computes something else than the first: it keeps something in Python")
    return found[0]


def _depth_of_params(path: Sequence[Any]) -> int | None:
    """Where the outermost `params` is in a path. What an optimizer keeps for each parameter has it too, deeper or in a tuple."""
    for depth, k in enumerate(path):
        if isinstance(k, jax.tree_util.SequenceKey):
            return None
        if str(getattr(k, "key", getattr(k, "name", ""))) == "params":
            return depth
    return None


def is_real(dtype: Any) -> bool:
    """Whether an array has real numbers; keys have a type of their own."""
    return getattr(dtype, "kind", "") in ("f", "V")


def _argument(name: str, leaf: Any, kind: Kind) -> Argument:
    """What is said about an argument. An integer that is state is taken for a number of steps, unless it starts below 0."""
    shape, said = shape_of(leaf), domain_of(leaf)
    sort, starts = getattr(shape.dtype, "kind", ""), starts_nonnegative(leaf)
    if said is None and kind == "state" and shape.shape == () and (sort == "u" or (sort == "i" and starts is not False)):
        return Argument(name, shape, kind, Domain("nonnegative"), sort == "i", starts)
    return Argument(name, shape, kind, said, False, starts)


def _results(out: Any, shapes: Sequence[Any], heads: Sequence[str], roles: Sequence[str] | None) -> tuple[list[Result], set[int]]:
    parts = _children(out, shapes if roles is None else ())
    if roles is not None and (len(roles) != len(parts) or any(r not in RESULTS for r in roles)):
        raise TraceError(f"roles: {len(parts)} results need one of {', '.join(RESULTS)} each, not {list(roles)}")
    found: list[Result] = []
    updated: set[int] = set()  # arguments with a gradient or a new value
    taken: set[int] = set()  # those with a new value
    loss = False
    for k, (name, part) in enumerate(parts):
        leaves = jax.tree_util.tree_flatten_with_path(part)[0]
        said = roles[k] if roles is not None else None
        scalar = len(leaves) == 1 and leaves[0][1].shape == () and is_real(leaves[0][1].dtype)
        if said == "loss" or (said is None and scalar and not loss):
            found += [Result("loss", None)]
            loss = True
            continue
        at = None
        if said != "metric":
            at = next((i for i, s in enumerate(shapes) if (said == "gradients" or i not in taken) and matched(part, s) is not None), None)
        if at is None:
            if said in ("parameters", "state", "gradients"):
                raise TraceError(f"result {name} is said to be {said}, and no argument has its structure")
            found += [Result("metric", n) for n in leaf_names(f"result.{name}", part)]
        elif said == "gradients":
            found += [Result("gradient", n) for n in _names_in(part, shapes[at], heads[at])]
            updated.add(at)
        else:
            updated.add(at)
            taken.add(at)
            role: Role = "parameter" if at == min(updated) else "state"
            found += [Result(role, n) for n in _names_in(part, shapes[at], heads[at])]
    return found, updated


def _names_in(part: Any, argument: Any, head: str) -> list[str]:
    """The leaves of an argument that those of its new value are."""
    names = leaf_names(head, argument)
    return [names[i] for i in matched(part, argument) or ()]


def _donated(jaxpr: ClosedJaxpr, arguments: Sequence[Argument]) -> tuple[str, ...]:
    """Arguments whose memory the step takes over."""
    at = {v: a.name for v, a in zip(jaxpr.jaxpr.invars, arguments, strict=True)}
    found = []
    for eqn in jaxpr.eqns:
        for v, given in zip(eqn.invars, eqn.params.get("donated_invars") or (), strict=False):
            if given and not hasattr(v, "val") and v in at:
                found.append(at[v])
    return tuple(found)


__all__ = ["Argument", "Result", "TraceError", "Traced", "argument_names", "trace"]
