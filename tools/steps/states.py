"""What a step keeps beside parameters and optimizer: statistics, averages, memories."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from tools.steps.code import Code, Ranks, Site
from tools.steps.pieces import Piece, Setting

State = Callable[[Random, Setting], Piece]


def _mean(setting: Setting, value: str, world: str) -> Code:
    """Reduces a mean over a rank's rows to the one over all rows, where ranks have parts of the batch."""
    if not setting.cut:
        return ""
    bad: dict[str, Code] = {
        "statistic-not-reduced": "",
        "statistic-summed": f"dist.all_reduce({value})",
        "statistic-of-rank-0": f"dist.broadcast({value}, src=0)",
        "statistic-reduced-in-a-copy": f"dist.all_reduce({value}.clone())",
    }
    return Ranks(Site(f"dist.all_reduce({value})\n{value} = {value} / {world}", bad))


def statistics(rng: Random, setting: Setting) -> Piece:
    """Running means of activations, written in the forward pass."""
    writes = (
        "self.mean.mul_({k}).add_(m, alpha=0.1)",
        "self.mean = {k} * self.mean + 0.1 * m",
        "self.mean = {k} * self.mean + 0.1 * m",
        "self.mean.copy_({k} * self.mean + 0.1 * m)",
        "self.mean[:] = {k} * self.mean + 0.1 * m",
        "self.mean.data = {k} * self.mean + 0.1 * m",
        "self.mean.lerp_(m, 1 - {k})",
        "self._buffers['mean'] = {k} * self.mean + 0.1 * m",
        "torch.add({k} * self.mean, m, alpha=0.1, out=self.mean)",
    )
    text = rng.choice(writes)
    bad: dict[str, Code] = {"statistic-with-another-factor": text.format(k="0.5"), "statistic-not-kept": ""}
    write = Site(text.format(k="0.9"), bad, lone=True)
    persistent = rng.choice(("", ", persistent=False"))
    inner: Code = ("m = h.detach().mean(0)", _mean(setting, "m", "self.world"), write)
    used = rng.random()
    if used < 0.4:
        inner = (inner, "h = h - 0.1 * self.mean")
    elif used < 0.6:
        inner = ("h = h - 0.1 * self.mean.clone()", inner)
    return Piece("statistics", {"init": f"self.register_buffer('mean', torch.zeros({setting.hidden}){persistent})", "inner": inner})


def level(rng: Random, setting: Setting) -> Piece:
    """A running mean of the loss, as a buffer of the model."""
    writes = (
        "model.level.mul_({k}).add_(0.1 * now)",
        "model.level = {k} * model.level + 0.1 * now",
        "model.level.copy_({k} * model.level + 0.1 * now)",
        "model.level.lerp_(now, 1 - {k})",
    )
    text = rng.choice(writes)
    write = Site(text.format(k="0.9"), {"level-with-another-factor": text.format(k="0.7"), "level-not-kept": ""}, lone=True)
    slots: dict[str, Code] = {
        "setup": "model.register_buffer('level', torch.ones(()))",
        "after": ("now = loss.detach().clone()", _mean(setting, "now", "world"), write),
    }
    if rng.random() < 0.4:
        slots["losses"] = "loss = loss * (1 + 0.1 * model.level.detach().clone())"
    return Piece("level", slots)


def counted(rng: Random, setting: Setting) -> Piece:
    """An integer buffer that counts steps; perhaps the rate follows it."""
    write = rng.choice(("model.steps_done += 1", "model.steps_done.add_(1)", "model.steps_done = model.steps_done + 1"))
    bad: dict[str, Code] = {"count-not-kept": "", "counted-twice": (write, write)}
    return Piece(
        "counted", {"setup": "model.register_buffer('steps_done', torch.zeros((), dtype=torch.long))", "after": Site(write, bad, lone=True)}
    )


def seen(rng: Random, setting: Setting) -> Piece:
    """A maximum or a sum of gradients that is kept as a buffer."""
    text = rng.choice(
        ("model.seen_grad = {a} * model.seen_grad + model.second.weight.grad", "model.seen_grad.add_(model.second.weight.grad, alpha={a})")
    )
    bad: dict[str, Code] = {"sum-with-another-factor": text.format(a="0.25")}
    good = text.format(a="0.5")
    slots: dict[str, Code] = {"setup": "model.register_buffer('seen_grad', torch.zeros_like(model.second.weight))"}
    if setting.cut:
        slots["local"] = Site("", {"sum-of-local-gradients": good})
        slots["reduced"] = Site(good, {"sum-of-local-gradients": "", **bad})
    else:
        slots["reduced"] = Site(good, bad, lone=True)
    return Piece("sum of gradients", slots)


REGISTERED = """
for name, p in list(model.named_parameters()):
    model.register_buffer('ema_' + name.replace('.', '_'), p.detach().clone())
"""
IN_PLACE = """
with torch.no_grad():
    for name, p in model.named_parameters():
        getattr(model, 'ema_' + name.replace('.', '_')).mul_({k}).add_(p, alpha=0.1)
"""
ANEW = """
for name, p in list(model.named_parameters()):
    old = getattr(model, 'ema_' + name.replace('.', '_'))
    setattr(model, 'ema_' + name.replace('.', '_'), {k} * old + 0.1 * p.detach())
"""
IN_COPY = """
with torch.no_grad():
    for a, p in zip(averaged.parameters(), model.parameters()):
        a.mul_({k}).add_(p, alpha=0.1)
"""
BY_PYTORCH = """
follow = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
averaged = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=follow)
"""
AVERAGES: tuple[tuple[str, str, str, str], ...] = (  # where an average is kept: name, set-up, update, what is compared
    ("buffers", REGISTERED, IN_PLACE, ""),
    ("buffers anew", REGISTERED, ANEW, ""),
    ("copy", "averaged = copy.deepcopy(model)", IN_COPY, "**{'averaged.' + name: a for name, a in averaged.named_parameters()},"),
    (
        "dict",
        "averaged = {name: p.detach().clone() for name, p in model.named_parameters()}",
        "for name, p in model.named_parameters():\n    averaged[name] = {k} * averaged[name] + 0.1 * p.detach()",
        "**{'averaged.' + name: a for name, a in averaged.items()},",
    ),
    (
        "global",
        "AVERAGED.clear()\nAVERAGED.update((name, p.detach().clone()) for name, p in model.named_parameters())",
        "for name, p in model.named_parameters():\n    AVERAGED[name] = {k} * AVERAGED[name] + 0.1 * p.detach()",
        "**{'averaged.' + name: a for name, a in AVERAGED.items()},",
    ),
    (
        "list",
        "averaged = [p.detach().clone() for p in model.parameters()]",
        "for a, p in zip(averaged, model.parameters()):\n    a.mul_({k}).add_(p.detach(), alpha=0.1)",
        "**{'averaged.' + name: a for (name, _), a in zip(model.named_parameters(), averaged)},",
    ),
    (
        "AveragedModel",
        BY_PYTORCH,
        "averaged.update_parameters(model)",
        "**{'averaged.' + name: a for name, a in averaged.module.named_parameters()},",
    ),
)


def average(rng: Random, setting: Setting) -> Piece:
    """A moving average of the parameters."""
    name, setup, text, extra = AVERAGES[rng.choices(range(7), (4, 4, 1, 1, 1, 1, 1))[0]]
    good = text.format(k="0.9")
    bad: dict[str, Code] = {"average-not-kept": "", "average-updated-twice": (good, good)}
    if "{k}" in text:
        bad["average-with-another-factor"] = text.format(k="0.8")
    early = Site("", {"average-before-update": good})
    slots: dict[str, Code] = {"setup": setup, "reduced": early, "after": Site(good, {**bad, "average-before-update": ""}, lone=True)}
    if extra:
        slots["extra"] = extra
    if name == "global":
        slots["top"] = "AVERAGED = {}"
    return Piece(f"average in {name}", slots)


def target(rng: Random, setting: Setting) -> Piece:
    """A slowly moving copy of a layer that the loss looks at; a module of the model."""
    setup = "model.target = copy.deepcopy(model.second).requires_grad_(False)"
    good = "with torch.no_grad():\n    for a, p in zip(model.target.parameters(), model.second.parameters()):\n        a.lerp_(p, 0.25)"
    anew = "with torch.no_grad():\n    model.target.weight.copy_(0.75 * model.target.weight + 0.25 * model.second.weight)"
    text = rng.choice((good, anew))
    bad: dict[str, Code] = {"target-not-moved": "", "target-replaced": "model.target.load_state_dict(model.second.state_dict())"}
    return Piece(
        "target",
        {
            "setup": setup,
            "losses": "loss = loss + 0.1 * (model.second.weight - model.target.weight).pow(2).sum()",
            "after": Site(text, bad, lone=True),
        },
    )


def memory(rng: Random, setting: Setting) -> Piece:
    """The gradient of the step before takes part in this one."""
    kinds = (
        (
            "memory = {}",
            "if 'g' in memory:\n    model.second.weight.grad.add_(memory['g'], alpha={k})",
            "memory['g'] = model.second.weight.grad.detach().clone()",
        ),
        (
            "model.register_buffer('before', torch.zeros_like(model.second.weight))",
            "model.second.weight.grad.add_(model.before, alpha={k})",
            "model.before.copy_(model.second.weight.grad)",
        ),
        (
            "model.register_buffer('before', torch.zeros_like(model.second.weight))",
            "model.second.weight.grad.add_(model.before, alpha={k})",
            "model.before = model.second.weight.grad.detach().clone()",
        ),
        (
            "model.before = torch.zeros_like(model.second.weight)",
            "model.second.weight.grad.add_(model.before, alpha={k})",
            "model.before = model.second.weight.grad.detach().clone()",
        ),
    )
    setup, use, keep = kinds[rng.choices(range(4), (1, 3, 3, 1))[0]]
    used = Site(use.replace("{k}", "0.5"), {"memory-not-used": "", "memory-with-another-factor": use.replace("{k}", "0.25")}, lone=True)
    return Piece("memory", {"setup": setup, "reduced": (used, Site(keep, {"memory-not-kept": ""}, lone=True))})


def stale(rng: Random, setting: Setting) -> Piece:
    """A copy of a weight that the loss reads, made anew in every step."""
    kinds = (
        ("held = [None]", "held[0] = model.second.weight.detach().clone()", "held[0]"),
        (
            "model.register_buffer('held', model.second.weight.detach().clone())",
            "model.held.copy_(model.second.weight.detach())",
            "model.held.clone()",
        ),
        (
            "model.register_buffer('held', model.second.weight.detach().clone())",
            "model.held = model.second.weight.detach().clone()",
            "model.held",
        ),
    )
    setup, refresh, read = kinds[rng.choices(range(3), (1, 2, 2))[0]]
    if read == "held[0]":
        setup = "held = [model.second.weight.detach().clone()]"
    return Piece(
        "held weight",
        {
            "setup": setup,
            "begin": Site(refresh, {"weight-stale": ""}, lone=True),
            "losses": f"loss = loss + 0.1 * (model.second.weight * {read}).sum()",
        },
    )


def number(rng: Random, setting: Setting) -> Piece:
    """A running mean of the loss as a Python number, which scales the loss."""
    text = "running[0] = {k} * running[0] + 0.1 * now.item()"
    write = Site(text.format(k="0.9"), {"number-with-another-factor": text.format(k="0.5"), "number-not-kept": ""}, lone=True)
    after: Code = ("now = loss.detach().clone()", _mean(setting, "now", "world"), write)
    return Piece("number", {"setup": "running = [1.0]", "losses": "loss = loss * (1 + 0.1 * running[0])", "after": after})


STATES: tuple[tuple[State, int], ...] = (
    (statistics, 5),
    (level, 3),
    (counted, 2),
    (seen, 2),
    (average, 4),
    (target, 2),
    (memory, 2),
    (stale, 1),
    (number, 1),
)


def state(rng: Random, setting: Setting, used: set[str]) -> Piece | None:
    possible = [(made, weight) for made, weight in STATES if made.__name__ not in used and not (made is statistics and setting.accumulates)]
    if not possible:
        return None
    made = rng.choices([row[0] for row in possible], [row[1] for row in possible])[0]
    used.add(made.__name__)
    if made in (level, number):
        used.update(("level", "number"))  # both call the loss by one name
    if made in (average, target):
        used.update(("average", "target"))  # an average is of the parameters that were there when it was made
    return made(rng, setting)
