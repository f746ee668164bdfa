"""Updates of parameters: by hand, or by optax. Rates that follow the number of the step."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Final

from tools.jax_steps.code import Draft

RATES: Final = (  # right, and what ranks may have by mistake
    ("0.1 / n", "0.1 / (n + 1)"),
    ("jnp.where(n % 2 == 0, 0.05, 0.1)", "jnp.where(n % 2 == 0, 0.1, 0.05)"),
    ("0.1 * jnp.minimum(n, 3) / 3", "0.1 * jnp.minimum(n, 2) / 2"),
    ("lax.cond(n > 2, lambda: 0.05, lambda: 0.1)", "lax.cond(n > 1, lambda: 0.05, lambda: 0.1)"),
    ("jnp.where(n <= 2, 0.04 * n, 0.1)", "jnp.where(n < 2, 0.04 * n, 0.1)"),
    ("lax.switch(n % 3, [lambda: 0.1, lambda: 0.05, lambda: 0.02])", "lax.switch((n + 1) % 3, [lambda: 0.1, lambda: 0.05, lambda: 0.02])"),
    ("jnp.array([0.02, 0.1, 0.05])[jnp.minimum(n - 1, 2)]", "jnp.array([0.02, 0.1, 0.05])[jnp.minimum(n, 2)]"),
    ("optax.linear_schedule(0.1, 0.02, 4)(n)", "optax.linear_schedule(0.1, 0.02, 4)(n - 1)"),
    ("optax.piecewise_constant_schedule(0.1, {2: 0.5})(n)", "optax.piecewise_constant_schedule(0.1, {3: 0.5})(n)"),
    ("0.1 * lax.rsqrt(n.astype(REAL))", "0.1 / n.astype(REAL)"),
    ("lax.select(n % 2 == 1, 0.1, 0.05)", "lax.select(n % 2 == 1, 0.1, 0.02)"),
    ("0.1 * (n // 2 + 1)", "0.1 * ((n + 1) // 2)"),
    ("optax.exponential_decay(0.1, 2, 0.5)(n)", "optax.exponential_decay(0.1, 2, 0.6)(n)"),
    ("optax.cosine_decay_schedule(0.1, 8)(n)", "optax.cosine_decay_schedule(0.1, 6)(n)"),
)


@dataclass(frozen=True)
class Update:
    name: str
    keeps: tuple[tuple[str, str], ...]  # entries of `opt`: name, and `tree`, `squares` or `count`
    lines: str  # with `params`, `opt`, `grads`, `rate` and `n`
    top: str = ""  # lines of the file, for optax
    one: str = ""  # the same with a mistake
    linear: bool = False


def rate(draft: Draft) -> str:
    rng = draft.rng
    bad = {"rate-times-devices": f"{draft.size} * {{}}", "rate-by-rank": f'{{}} * (1 + lax.axis_index("{draft.axis}"))'}
    if draft.vma or draft.apart:
        del bad["rate-by-rank"]
    if draft.counted and rng.random() < 0.5:
        good, other = rng.choice(RATES)
        bad = {name: text.format(f"({good})") for name, text in bad.items()} | {"another-rate": other}
        return f"rate = {draft.site(good, bad, lone=True)}"
    good = rng.choice(("0.1", "0.05", "0.2"))
    bad = {name: text.format(good) for name, text in bad.items()} | {"another-rate": "0.15"}
    return f"rate = {draft.site(good, bad, lone=True)}"


def by_hand(draft: Draft) -> Update:
    return draft.rng.choice((_sgd, _sgd, _momentum, _momentum, _adam, _adam, _rooted, _signed))(draft)


def _sgd(draft: Draft) -> Update:
    good = "jax.tree.map(lambda w, g: w - rate * g, params, grads)"
    bad = {
        "update-made-twice": "jax.tree.map(lambda w, g: w - 2 * rate * g, params, grads)",
        "update-skipped": "params",
        "decay-on-ranks": "jax.tree.map(lambda w, g: w - rate * (g + 0.1 * w), params, grads)",
        "last-parameter-not-updated": "but_last_of(lambda w, g: w - rate * g, params, grads)",
    }
    if draft.rng.random() < 0.4:
        good = "jax.tree.map(lambda w, g: (1 - 0.02) * w - rate * g, params, grads)"
        bad |= {
            "decay-missed": "jax.tree.map(lambda w, g: w - rate * g, params, grads)",
            "decay-for-matrices": "jax.tree.map(lambda w, g: (0.98 if w.ndim > 1 else 1.0) * w - rate * g, params, grads)",
        }
    return Update("sgd", (), f"params = {draft.site(good, bad, tree=True, lone=True)}", linear=True)


def _momentum(draft: Draft) -> Update:
    kind = draft.rng.choice(("m + g", "damped", "nesterov"))
    text = "{a} * m + g" if kind != "damped" else "{a} * m + (1 - {a}) * g"
    make = f"jax.tree.map(lambda m, g: {text}, opt['m'], grads)"
    bad = {
        "momentum-with-another-factor": make.format(a="0.8"),
        "momentum-from-zero": "grads",
        "momentum-decayed-twice": make.format(a="0.9 * 0.9"),
    }
    m = draft.site(make.format(a="0.9"), bad, tree=True, lone=True)
    used = (
        "jax.tree.map(lambda w, m, g: w - rate * (g + 0.9 * m), params, m, grads)"
        if kind == "nesterov"
        else "jax.tree.map(lambda w, m: w - rate * m, params, m)"
    )
    old = used.replace(", m, grads)", ", opt['m'], grads)").replace("params, m)", "params, opt['m'])")
    step = draft.site(
        used,
        {"update-by-old-momentum": old, "update-by-gradient": "jax.tree.map(lambda w, g: w - rate * g, params, grads)"},
        tree=True,
        lone=True,
    )
    kept = draft.site("m", {"momentum-not-kept": "opt['m']"}, tree=True, lone=True)
    return Update(f"momentum {kind}", (("m", "tree"),), f"m = {m}\nparams = {step}\nopt = {{'m': {kept}}}", linear=True)


def _adam(draft: Draft) -> Update:
    rng = draft.rng
    own = rng.random() < 0.6 or not draft.counted
    count = "opt['t'] + 1" if own else "n"
    late = {"count-one-late": f"{count} - 1 + jnp.where({count} < 2, 1, 0)", "count-one-early": f"{count} + 1"}
    lines = [f"t = {draft.site(count, late, lone=True)}"]
    make = "jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, opt['m'], grads)"
    lines.append(f"m = {draft.site(make, {'first-moment-with-another-factor': make.replace('0.9', '0.8')}, tree=True, lone=True)}")
    square = "jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g * g, opt['v'], grads)"
    bad = {
        "second-moment-with-another-factor": square.replace("0.01", "0.02"),
        "second-moment-not-kept": "opt['v']",
        "second-moment-of-the-first": square.replace("opt['v'], grads", "opt['v'], m"),
    }
    lines.append(f"v = {draft.site(square, bad, tree=True, lone=True)}")
    kind = rng.choice(("hats", "rate", "negative", "none"))
    if kind == "hats":
        step = "jax.tree.map(lambda w, m, v: w - rate * (m / (1 - 0.9**t)) / (jnp.sqrt(v / (1 - 0.99**t)) + 1e-3), params, m, v)"
    elif kind == "rate":
        lines.append("scale = rate * jnp.sqrt(1 - 0.99**t) / (1 - 0.9**t)")
        step = "jax.tree.map(lambda w, m, v: w - scale * m / (jnp.sqrt(v) + 1e-3), params, m, v)"
    elif kind == "negative":
        step = "jax.tree.map(lambda w, m, v: w + rate * m / ((0.9**t - 1) * (jnp.sqrt(v / (1 - 0.99**t)) + 1e-3)), params, m, v)"
    else:
        step = "jax.tree.map(lambda w, m, v: w - rate * m / (jnp.sqrt(v) + 1e-3), params, m, v)"
    other = {
        "epsilon-inside-the-root": step.replace("jnp.sqrt(v) + 1e-3", "jnp.sqrt(v + 1e-3)").replace(
            "jnp.sqrt(v / (1 - 0.99**t)) + 1e-3", "jnp.sqrt(v / (1 - 0.99**t) + 1e-3)"
        ),
        "another-epsilon": step.replace("1e-3", "1e-2"),
    }
    if kind == "hats":
        other["corrections-missed"] = step.replace(" / (1 - 0.9**t)", "").replace(" / (1 - 0.99**t)", "")
    if rng.random() < 0.4:
        step, other = step.replace("w - ", "0.99 * w - ").replace("w + ", "0.99 * w + "), {"decay-missed": step, **other}
    lines.append(f"params = {draft.site(step, other, tree=True, lone=True)}")
    lines.append(f"opt = {{'m': m, 'v': v{', ' + chr(39) + 't' + chr(39) + ': t' if own else ''}}}")
    keeps = (("m", "tree"), ("v", "squares"), *((("t", "count"),) if own else ()))
    return Update(f"adam ({kind})", keeps, "\n".join(lines))


def _rooted(draft: Draft) -> Update:
    text = draft.rng.choice(("v + g**2", "0.9 * v + 0.1 * g**2", "jnp.maximum(v, g**2)"))
    make = f"jax.tree.map(lambda v, g: {text}, opt['v'], grads)"
    v = draft.site(make, {"squares-not-kept": "jax.tree.map(jnp.square, grads)", "squares-kept-only": "opt['v']"}, tree=True, lone=True)
    step = "jax.tree.map(lambda w, v, g: w - rate * g / jnp.sqrt(v + 1e-2), params, v, grads)"
    bad = {"old-squares": step.replace("params, v,", "params, opt['v'],"), "root-missed": step.replace("jnp.sqrt(v + 1e-2)", "(v + 1e-2)")}
    return Update(
        "root of squares", (("v", "squares"),), f"v = {v}\nparams = {draft.site(step, bad, tree=True, lone=True)}\nopt = {{'v': v}}"
    )


def _signed(draft: Draft) -> Update:
    step = "jax.tree.map(lambda w, m, g: w - 0.1 * rate * jnp.sign(0.9 * m + 0.1 * g), params, opt['m'], grads)"
    lines = f"params = {draft.site(step, {'sign-of-gradient': step.replace('0.9 * m + 0.1 * g', 'g')}, tree=True, lone=True)}"
    make = "jax.tree.map(lambda m, g: 0.99 * m + 0.01 * g, opt['m'], grads)"
    return Update(
        "signs",
        (("m", "tree"),),
        f"{lines}\nopt = {{'m': {draft.site(make, {'momentum-with-another-factor': make.replace('0.01', '0.1')}, tree=True, lone=True)}}}",
    )


OPTAX: Final = (  # right, and what ranks may have by mistake with the same state
    ("optax.sgd({rate})", "optax.sgd({other})"),
    ("optax.sgd({rate}, momentum=0.9)", "optax.sgd({rate}, momentum=0.8)"),
    ("optax.sgd({rate}, momentum=0.9, nesterov=True)", "optax.sgd({rate}, momentum=0.9)"),
    ("optax.adam({rate}, eps=1e-3)", "optax.adam({rate}, b1=0.8, eps=1e-3)"),
    ("optax.adam({rate}, b1=0.8, b2=0.9, eps=1e-3)", "optax.adam({rate}, b1=0.8, b2=0.95, eps=1e-3)"),
    ("optax.adamw({rate}, eps=1e-3, weight_decay=0.1)", "optax.adamw({rate}, eps=1e-3, weight_decay=0.01)"),
    ("optax.chain(optax.clip(0.02), optax.adam({rate}, eps=1e-3))", "optax.chain(optax.clip(0.03), optax.adam({rate}, eps=1e-3))"),
    (
        "optax.chain(optax.add_decayed_weights(0.05), optax.sgd({rate}, momentum=0.9))",
        "optax.chain(optax.add_decayed_weights(0.0), optax.sgd({rate}, momentum=0.9))",
    ),
    ("optax.rmsprop({rate}, eps=1e-2)", "optax.rmsprop({rate}, decay=0.8, eps=1e-2)"),
    ("optax.adagrad({rate}, eps=1e-2)", "optax.adagrad({rate}, eps=1e-1)"),
    ("optax.lion({rate})", "optax.lion({rate}, weight_decay=0.1)"),
    ("optax.chain(optax.trace(0.9), optax.scale(-0.1))", "optax.chain(optax.trace(0.9), optax.scale(-0.2))"),
    (
        "optax.chain(optax.scale_by_adam(eps=1e-3), optax.scale_by_learning_rate({rate}))",
        "optax.chain(optax.scale_by_adam(eps=1e-2), optax.scale_by_learning_rate({rate}))",
    ),
    ("optax.adamax({rate}, eps=1e-3)", "optax.adamax({rate}, b1=0.7, eps=1e-3)"),
    ("optax.nadam({rate}, eps=1e-3)", "optax.adam({rate}, eps=1e-3)"),
)
WHOLE: Final = (  # right only where every rank has whole parameters, or outside of shard_map
    ("optax.chain(optax.clip_by_global_norm(0.1), optax.sgd({rate}))", "optax.chain(optax.clip_by_global_norm(0.05), optax.sgd({rate}))"),
    (
        "optax.chain(optax.clip_by_global_norm(0.1), optax.adamw({rate}, eps=1e-3))",
        "optax.chain(optax.clip_by_global_norm(0.2), optax.adamw({rate}, eps=1e-3))",
    ),
    (
        "optax.chain(optax.clip_by_global_norm(0.08), optax.adam({rate}, eps=1e-3))",
        "optax.chain(optax.clip_by_global_norm(0.08), optax.adam({rate}, b1=0.8, eps=1e-3))",
    ),
    ("optax.lamb({rate}, eps=1e-3)", "optax.lamb({rate}, eps=1e-2)"),
)
SCHEDULES: Final = (
    "optax.linear_schedule(0.1, 0.01, 5)",
    "optax.exponential_decay(0.1, 2, 0.5)",
    "optax.cosine_decay_schedule(0.1, 8)",
    "optax.piecewise_constant_schedule(0.1, {2: 0.5, 4: 0.5})",
    "optax.warmup_cosine_decay_schedule(0.02, 0.1, 2, 8)",
    "optax.warmup_constant_schedule(0.0, 0.1, 2)",
    "lambda count: 0.1 / (count + 1)",
    "lambda count: jnp.where(count % 2 == 0, 0.1, 0.05)",
    "optax.join_schedules([optax.constant_schedule(0.1), optax.linear_schedule(0.1, 0.0, 4)], [2])",
)


def by_optax(draft: Draft, whole: bool) -> Update:
    rng: Random = draft.rng
    row = rng.choice((*OPTAX, *WHOLE, *WHOLE) if whole else OPTAX)
    scheduled = rng.random() < 0.4
    first = rng.choice(SCHEDULES if scheduled else ("0.1", "0.05"))
    other = "lambda count: 0.3 / (count + 1)" if scheduled else "0.3"
    good, bad = (text.replace("{rate}", first).replace("{other}", other) for text in row)
    other_made = {"another-optimizer": "other_optimizer.update(grads, opt, params)"}
    made = draft.site("optimizer.update(grads, opt, params)", other_made, tree=True, lone=True)
    wrong = {
        "update-made-twice": "optax.apply_updates(optax.apply_updates(params, updates), updates)",
        "update-by-gradient": "optax.apply_updates(params, jax.tree.map(lambda g: -0.1 * g, grads))",
    }
    applied = draft.site("optax.apply_updates(params, updates)", wrong, tree=True, lone=True)
    lines = f"updates, opt = {made}\nparams = {applied}"
    linear = row[0].startswith("optax.sgd") or "trace" in row[0]
    name = row[0].replace("{rate}", "…")
    return Update(name, (("optax", "optax"),), lines, f"optimizer = {good}", f"other_optimizer = {bad}", linear)
