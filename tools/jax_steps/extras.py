"""What a step has besides: averages and statistics that it keeps, clipping, conditions on the step, metrics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from tools.jax_steps.code import Draft
from tools.jax_steps.cores import Core


@dataclass(frozen=True)
class Extra:
    name: str
    keeps: tuple[tuple[str, str, str], ...] = ()  # entries of `state`: name, declaration, spec
    reduced: str = ""  # lines after gradients are reduced
    after: str = ""  # lines after the update
    metrics: tuple[tuple[str, str], ...] = field(default=())  # further results: name and expression


Made = Callable[[Draft, Core], Extra | None]


def _like(core: Core, name: str) -> tuple[tuple[str, str, str], ...]:
    return ((name, core.params.declared(), core.params.cut()),)


def average(draft: Draft, core: Core) -> Extra:
    make = "jax.tree.map(lambda a, w: {k} * a + (1 - {k}) * w, state['ema'], params)"
    bad = {
        "average-with-another-factor": make.format(k="0.8"),
        "average-not-kept": "state['ema']",
        "average-of-gradients": make.format(k="0.9").replace("params)", "grads)"),
    }
    if not draft.vma and not draft.apart and core.whole:
        bad["average-of-shifted-weights"] = make.format(k="0.9").replace("* w,", f'* (w + 0.1 * lax.axis_index("{draft.axis}")),')
    return Extra(
        "average", _like(core, "ema"), after=f"state = {{**state, 'ema': {draft.site(make.format(k='0.9'), bad, tree=True, lone=True)}}}"
    )


def level(draft: Draft, core: Core) -> Extra:
    bad = {"level-with-another-factor": "0.7 * state['level'] + 0.3 * loss", "level-not-kept": "state['level']"}
    if not draft.vma and not draft.apart:
        bad["level-by-rank"] = f"0.9 * state['level'] + 0.1 * loss * (1 + lax.axis_index(\"{draft.axis}\"))"
    made = draft.site("0.9 * state['level'] + 0.1 * loss", bad, lone=True)
    return Extra("level", (("level", "tvj.Reals((), REAL)", "P()"),), after=f"state = {{**state, 'level': {made}}}")


def memory(draft: Draft, core: Core) -> Extra:
    make = "jax.tree.map(lambda g, b: g + 0.5 * b, grads, state['before'])"
    used = draft.site(make, {"memory-not-used": "grads", "memory-with-another-factor": make.replace("0.5", "0.25")}, tree=True, lone=True)
    kept = draft.site("grads", {"memory-not-kept": "state['before']"}, tree=True, lone=True)
    return Extra("memory", _like(core, "before"), f"grads = {used}\nstate = {{**state, 'before': {kept}}}")


def anchor(draft: Draft, core: Core) -> Extra:
    pull = "jax.tree.map(lambda g, w, a: g + 0.1 * (w - a), grads, params, state['anchor'])"
    reduced = f"grads = {draft.site(pull, {'anchor-not-used': 'grads'}, tree=True, lone=True)}"
    move = "jax.tree.map(lambda a, w: 0.75 * a + 0.25 * w, state['anchor'], params)"
    moved = draft.site(move, {"anchor-not-moved": "state['anchor']", "anchor-replaced": "params"}, tree=True, lone=True)
    after = f"state = {{**state, 'anchor': {moved}}}"
    return Extra("anchor", _like(core, "anchor"), reduced, after)


def slow(draft: Draft, core: Core) -> Extra | None:
    """Every second step weights go back half of the way to slow ones."""
    if not draft.counted:
        return None
    mixed = "jax.tree.map(lambda s, w: 0.5 * s + 0.5 * w, state['slow'], params)"
    condition = draft.rng.choice(("n % 2 == 0", "n == 2", "n > 2"))
    other = draft.site(
        condition,
        {"slow-weights-at-odd-steps": "n % 2 == 1", "slow-weights-at-third-steps": "n == 3", "slow-weights-always": "n > 0"},
        gated=False,
        lone=True,
    )
    if draft.rng.random() < 0.5:
        lines = f"""now = {other}
params = jax.tree.map(lambda s, w: jnp.where(now, 0.5 * s + 0.5 * w, w), state['slow'], params)
state = {{**state, 'slow': jax.tree.map(lambda s, w: jnp.where(now, w, s), state['slow'], params)}}"""
    else:
        lines = (
            f"params, kept = lax.cond({other}, lambda: ({mixed},) * 2, lambda: (params, state['slow']))\nstate = {{**state, 'slow': kept}}"
        )
    return Extra("slow weights", _like(core, "slow"), after=lines)


def seen(draft: Draft, core: Core) -> Extra | None:
    """Statistics of the batch, of which every rank has a part."""
    x = core.batch[0]
    if draft.apart or core.partitioned or "P()" in x.spec or len(core.mesh) > 1:
        return None
    return tokens(draft) if x.declared.startswith("tvj.Ids") else statistics(draft)


TOKENS: Final = (  # integers of a rank's rows, and what ranks may have by mistake
    ("jnp.sum(x != 0)", ""),
    ("(x > 2).astype(jnp.int32).sum()", "(x > 3).astype(jnp.int32).sum()"),
    ("jnp.sum(x % 2)", ""),
    ("jnp.sum(jnp.where(x == 3, 1, 0))", "jnp.any(x == 3).astype(jnp.int32)"),
    ("jnp.sum(40 * x)", "jnp.sum(40 * x).astype(jnp.int8).astype(jnp.int32)"),
    ("jnp.sum(90 * x)", "jnp.sum((90 * x).astype(jnp.uint8)).astype(jnp.int32)"),
    ("jnp.dot((x > 2).astype(jnp.int32), jnp.ones(x.shape[1:], jnp.int32)).sum()", "jnp.dot(x > 2, jnp.ones(x.shape[1:], bool)).sum()"),
    ("jnp.zeros(8, jnp.int32).at[x.reshape(-1)].add(1)", "jnp.zeros(8, jnp.int32).at[x.reshape(-1)].set(1)"),
    ("jax.nn.one_hot(x, 8, dtype=jnp.int32).sum((0, 1))", ""),
    ("(x[..., None] == jnp.arange(8)).sum((0, 1))", "(x[..., None] <= jnp.arange(8)).sum((0, 1))"),
)


def tokens(draft: Draft) -> Extra:
    local, other = draft.rng.choice(TOKENS)
    total = f"state['tokens'] + lax.psum({{}}, \"{draft.axis}\").astype(jnp.int32)"
    good = total.format(local)
    bad = {"tokens-counted-with-one-more": total.format(f"1 + {local}")}
    if other:
        bad["tokens-counted-otherwise"] = total.format(other)
    if not draft.vma:
        bad["tokens-of-own-rows"] = f"state['tokens'] + ({local}).astype(jnp.int32)"
        bad["largest-count-of-tokens"] = good.replace("psum", "pmax")
    one = f"1|state = {{**state, 'tokens': state['tokens'] + ({local}).astype(jnp.int32)}}"
    shape = "(8,)" if "8" in local else "()"
    after = f"{one}\nR|state = {{**state, 'tokens': {draft.site(good, bad)}}}"
    return Extra("tokens seen", (("tokens", f"tvj.Count({shape}, jnp.int32)", "P()"),), after=after)


def statistics(draft: Draft) -> Extra:
    local = draft.rng.choice(("x.mean()", "jnp.mean(x**2)", "jnp.abs(x).mean()"))
    good = f"0.9 * state['seen'] + 0.1 * lax.pmean({local}, \"{draft.axis}\")"
    bad = {"statistic-summed": good.replace("pmean", "psum"), "statistic-with-another-factor": good.replace("0.1", "0.2")}
    if not draft.vma:
        bad |= {
            "statistic-not-reduced": f"0.9 * state['seen'] + 0.1 * {local}",
            "statistic-of-rank-0": f"0.9 * state['seen'] + 0.1 * lax.all_gather({local}, \"{draft.axis}\")[0]",
            "largest-statistic": good.replace("pmean", "pmax"),
        }
    one = f"1|state = {{**state, 'seen': 0.9 * state['seen'] + 0.1 * {local}}}"
    after = f"{one}\nR|state = {{**state, 'seen': {draft.site(good, bad)}}}"
    return Extra("statistics", (("seen", "tvj.Reals((), REAL)", "P()"),), after=after)


def counter(draft: Draft, core: Core) -> Extra:
    kind = draft.rng.choice(("jnp.int32", "jnp.int32", "jnp.int16", "jnp.uint8", "jnp.int8"))
    made = draft.site("state['done'] + 1", {"counted-twice": "state['done'] + 2", "not-counted": "state['done']"}, lone=True)
    return Extra("counter", (("done", f"tvj.Count(dtype={kind})", "P()"),), after=f"state = {{**state, 'done': {made}}}")


def largest(draft: Draft, core: Core) -> Extra:
    squares = "sum(jnp.sum(g**2) for g in jax.tree.leaves(grads))"
    ranks = squares if draft.apart or core.whole else core.squares
    lines = f"1|now = {squares}\nR|now = {ranks}\n"
    made = draft.site(
        "jnp.maximum(state['largest'], now)", {"largest-not-kept": "now", "smallest-kept": "jnp.minimum(state['largest'], now)"}, lone=True
    )
    return Extra(
        "largest gradient", (("largest", "tvj.Reals((), REAL, nonnegative=True)", "P()"),), f"{lines}state = {{**state, 'largest': {made}}}"
    )


def halved(draft: Draft, core: Core) -> Extra | None:
    """Gradients that depend on the number of the step."""
    if not draft.counted:
        return None
    forms = (
        "jax.tree.map(lambda g: jnp.where(n % 2 == 0, 0.5 * g, g), grads)",
        "lax.cond(n > 2, lambda: jax.tree.map(lambda g: 0.5 * g, grads), lambda: grads)",
        "jax.tree.map(lambda g: g * (1 + (n == 2)), grads)",
        "jax.tree.map(lambda g: jnp.where(n < 3, g, jnp.clip(g, -0.2, 0.2)), grads)",
        "lax.switch(jnp.clip(n - 1, 0, 1), [lambda: grads, lambda: jax.tree.map(lambda g: 0.5 * g, grads)])",
        "lax.fori_loop(0, 2, lambda i, tree: jax.tree.map(lambda g: jnp.where(n % 2 == i, 0.9 * g, g), tree), grads)",
    )
    good, other = draft.rng.sample(forms, 2)
    return Extra(
        "gradients by step",
        reduced=f"grads = {draft.site(good, {'gradients-by-another-rule': other, 'gradients-by-no-rule': 'grads'}, tree=True, lone=True)}",
    )


def clip(draft: Draft, core: Core) -> Extra:
    bad = {"not-clipped": "grads", "clipped-twice": "jax.tree.map(lambda g: 0.5 * g, clipped(grads))", "clipped-before-reduction": "grads"}
    return Extra("clip", reduced=f"grads = {draft.site('clipped(grads)', bad, tree=True, lone=True)}")


def decay(draft: Draft, core: Core) -> Extra:
    good = "jax.tree.map(lambda g, w: g + 0.02 * w if w.ndim > 1 else g, grads, params)"
    bad = {
        "decay-missed": "grads",
        "decay-for-all": "jax.tree.map(lambda g, w: g + 0.02 * w, grads, params)",
        "decay-twice": good.replace("0.02", "0.04"),
    }
    if core.params.shapes and all(len(shape) > 1 for shape in core.params.shapes.values()):
        del bad["decay-for-all"]
    return Extra("decay", reduced=f"grads = {draft.site(good, bad, tree=True, lone=True)}")


def metric(draft: Draft, core: Core) -> Extra:
    if draft.rng.random() < 0.5:
        bad = {"metric-with-another-factor": "3 * loss"} | (
            {} if draft.vma or draft.apart else {"metric-summed": f'lax.psum(2 * loss, "{draft.axis}")'}
        )
        return Extra("metric", metrics=(("shown", draft.site("2 * loss", bad, lone=False)),))
    squares = "sum(jnp.sum(g**2) for g in jax.tree.leaves(grads))"
    ranks = squares if draft.apart or core.whole else core.squares
    return Extra("norm shown", reduced=f"1|norm = jnp.sqrt({squares})\nR|norm = jnp.sqrt({ranks})", metrics=(("norm", "norm"),))


def sent(draft: Draft, core: Core) -> Extra | None:
    """What all ranks have is sent by one of them."""
    if draft.apart or draft.vma or core.partitioned:
        return None
    good = f'lax.psum(jnp.where(lax.axis_index("{draft.axis}") == 0, rate, 0.0), "{draft.axis}")'
    bad = {"sent-by-two": good.replace("== 0", "< 2"), "sent-by-none": good.replace("== 0", f"== {draft.size}")}
    return Extra("rate sent", reduced=f"R|rate = {draft.site(good, bad)}")


EXTRAS: Final[tuple[tuple[Made, int], ...]] = (
    (average, 4),
    (level, 3),
    (memory, 3),
    (anchor, 2),
    (slow, 2),
    (seen, 5),
    (counter, 2),
    (largest, 2),
    (halved, 3),
    (decay, 2),
    (metric, 2),
    (sent, 2),
)


def extras(draft: Draft, core: Core, count: int, rated: bool) -> list[Extra]:
    found: list[Extra] = []
    left = [row for row in EXTRAS if rated or row[0] is not sent]
    while len(found) < count and left:
        row = draft.rng.choices(left, [weight for _, weight in left])[0]
        left.remove(row)
        if (made := row[0](draft, core)) is not None:
            found.append(made)
    return found
