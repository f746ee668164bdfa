"""Fully sharded parameters: gathered for the forward pass, gradients added up by parts."""

from __future__ import annotations

from dataclasses import replace

from tools.jax_steps import models
from tools.jax_steps.code import Draft
from tools.jax_steps.containers import Container, container
from tools.jax_steps.cores import ROWS, Array, Core, accumulated, differentiated, loss_function, own_functions
from tools.jax_steps.data_parallel import loss_value


def core(draft: Draft, accumulates: bool) -> Core:
    rng, size = draft.rng, draft.size
    made = models.model(rng, 8 if accumulates else rng.choice(ROWS[size]), even=True)
    loss = models.loss(rng, made, ("mean", "sum"))
    params = container(rng, made.shapes)
    dims = {name: _dim(shape, size, rng.random() < 0.25) for name, shape in made.shapes.items()}
    cut = {name: dim for name, dim in dims.items() if dim is not None}
    params = params.with_specs({name: "P(" + "None, " * dim + '"dp")' for name, dim in cut.items()})
    way = rng.choice(("inside", "inside", "outside")) if not draft.vma else "inside"
    functions: list[tuple[str, str]] = []
    names: tuple[str, ...] = (way,)
    if way == "inside":
        begin = f"R|params = {_gathered(draft, params, cut, True)}"
        function = loss_function(params, made, loss, begin)
        grads = differentiated(rng)
        if accumulates:
            text, kind = accumulated(draft, loss)
            functions.append(("accumulated", text))
            names = (way, f"accumulated by {kind}")
            grads = "loss, grads = accumulated(params, x, y)"
        grads += f"\nR|grads = {_divided(draft, params, cut, loss.kind)}"
    else:
        function = loss_function(params, made, loss)
        grads = f"R|shards, params = params, {_gathered(draft, params, cut, False)}\n{differentiated(rng)}\n"
        grads += f"R|params = shards\nR|grads = {_scattered(draft, params, cut, loss.kind)}"
    lines = f"{grads}\nR|loss = {loss_value(draft, loss.kind)}"
    functions = [*own_functions(function), ("loss_of", function), *functions]
    batch = (Array("x", made.x, 'P("dp")'), Array("y", loss.y, 'P("dp")'))
    made_core = Core("fsdp", (made.name, loss.kind, *names), {"dp": size}, params, batch, tuple(functions), lines)
    return replace(made_core, whole=False, squares=squares(draft, params, "dp"))


def _dim(shape: tuple[int, ...], size: int, other: bool) -> int | None:
    """Which dimension is cut."""
    possible = [dim for dim, length in enumerate(shape) if length % size == 0]
    return (possible[-1] if other else possible[0]) if possible else None


def _of(params: Container, name: str, tree: str) -> str:
    return params.access(name).replace("params", tree, 1)


def _gathered(draft: Draft, params: Container, cut: dict[str, int], inside: bool) -> str:
    place = draft.inner if inside else draft.site
    values: dict[str, str] = {}
    for name, shape in params.shapes.items():
        own = params.access(name)
        if name not in cut:
            values[name] = own
            continue
        dim = cut[name]
        good = f'lax.all_gather({own}, "dp", axis={dim}, tiled=True)'
        bad = {"shards-gathered-backwards": _turned(own, dim, shape, draft.size)}
        if not draft.vma:
            bad["own-shard-repeated"] = f"jnp.concatenate([{own}] * {draft.size}, axis={dim})"
        if draft.size == 4:
            bad["shards-gathered-rotated"] = (
                f'lax.all_gather(lax.ppermute({own}, "dp", [(i, (i + 1) % 4) for i in range(4)]), "dp", axis={dim}, tiled=True)'
            )
        if draft.size == 4 and not draft.vma and name == next(iter(cut)):
            bad["one-gathered-in-another-order"] = f'lax.all_gather({own}, "dp", axis={dim}, tiled=True, axis_index_groups=[[0, 1, 3, 2]])'
        values[name] = place(good, bad)
    return params.build(values)


def _turned(own: str, dim: int, shape: tuple[int, ...], size: int) -> str:
    """Shards in the opposite order."""
    turned = [(i, size - 1 - i) for i in range(size)]
    return f'lax.all_gather(lax.ppermute({own}, "dp", {turned}), "dp", axis={dim}, tiled=True)'


def _divided(draft: Draft, params: Container, cut: dict[str, int], kind: str) -> str:
    """What the transpose of a gather leaves is a sum over ranks."""
    mean = kind == "mean"
    values: dict[str, str] = {}
    for name in params.shapes:
        g = _of(params, name, "grads")
        whole = g if draft.vma else f'lax.psum({g}, "dp")'
        scaled = f"{{}} / {draft.size}" if mean else "{}"
        good = scaled.format(g if name in cut else whole)
        bad = {"sum-for-mean" if mean else "sum-divided": (g if name in cut else whole) + ("" if mean else f" / {draft.size}")}
        if name in cut:
            bad["scattered-sum-divided-twice"] = f"{g} / {draft.size**2}"
            if not draft.vma:
                bad["mean-of-different-shards"] = f'lax.pmean({g}, "dp")'
        elif not draft.vma:
            bad["whole-parameters-not-reduced"] = scaled.format(g)
        values[name] = draft.site(good, bad)
    return params.build(values)


def _scattered(draft: Draft, params: Container, cut: dict[str, int], kind: str) -> str:
    mean, size = kind == "mean", draft.size
    values: dict[str, str] = {}
    for name, shape in params.shapes.items():
        g = _of(params, name, "grads")
        if name not in cut:
            op, other = ("pmean", "psum") if mean else ("psum", "pmean")
            values[name] = draft.site(
                f'lax.{op}({g}, "dp")', {"whole-parameters-not-reduced": g, "whole-parameters-otherwise": f'lax.{other}({g}, "dp")'}
            )
            continue
        dim, part = cut[name], shape[cut[name]] // size
        total = f'lax.psum_scatter({g}, "dp", scatter_dimension={dim}, tiled=True)'
        good = f"{total} / {size}" if mean else total
        start = f'lax.axis_index("dp") * {part}'
        bad = {
            "sum-for-mean" if mean else "sum-divided": total if mean else f"{total} / {size}",
            "part-of-own-gradient": f"lax.dynamic_slice_in_dim({g}, {start}, {part}, {dim})",
            "part-of-another-rank": good.replace(f"({g},", f"(jnp.roll({g}, {part}, {dim}),"),
            "first-part-on-all": f'lax.slice_in_dim(lax.{"pmean" if mean else "psum"}({g}, "dp"), 0, {part}, axis={dim})',
        }
        values[name] = draft.site(good, bad)
    return params.build(values)


def squares(draft: Draft, params: Container, axis: str) -> str:
    """The sum of squares of a tree like the parameters, of which some are cut."""
    cut = [f"jnp.sum({_of(params, name, 'grads')} ** 2)" for name in params.shapes if name in params.specs]
    rest = [f"jnp.sum({_of(params, name, 'grads')} ** 2)" for name in params.shapes if name not in params.specs]
    local = " + ".join(cut)
    bad = {"mean-norm-of-shards": f'lax.pmean({local}, "{axis}")'} | ({} if draft.vma else {"norm-of-own-shards": f"({local})"})
    return " + ".join([draft.site(f'lax.psum({local}, "{axis}")', bad), *rest])
