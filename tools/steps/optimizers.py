"""Updates of parameters: PyTorch's optimizers, own classes, plain functions."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from tools.steps.code import Code, Ranks, Site
from tools.steps.pieces import Piece

OWN_SGD = """
class SGD(torch.optim.Optimizer):
    def __init__(self, params, lr=0.1, momentum=0.9, weight_decay=0.0):
        super().__init__(params, dict(lr=lr, momentum=momentum, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                g = p.grad + group["weight_decay"] * p
                if "velocity" not in state:
                    state["velocity"] = torch.zeros_like(p)
                {keep}
                p.add_(state["velocity"], alpha=-group["lr"])
"""
KEEPS = (
    'state["velocity"].mul_(group["momentum"]).add_(g)',
    'state["velocity"] = group["momentum"] * state["velocity"] + g',
    'state["velocity"] = torch.add(g, state["velocity"], alpha=group["momentum"])',
)
OWN_ADAM = """
class Paper(torch.optim.Optimizer):
    def __init__(self, params, lr=0.1, betas=(0.9, 0.99), eps=1e-3, weight_decay=0.0):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["t"], state["m"], state["v"] = 0, torch.zeros_like(p), torch.zeros_like(p)
                state["t"] += 1
                g = p.grad + group["weight_decay"] * p
                state["m"] = b1 * state["m"] + (1 - b1) * g
                state["v"] = b2 * state["v"] + (1 - b2) * g * g
                p -= group["lr"] * state["m"] / (state["v"].sqrt() + group["eps"])
"""
OWN_ROOT = """
class Rooted(torch.optim.Optimizer):
    def __init__(self, params, lr=0.1, weight_decay=0.0):
        super().__init__(params, dict(lr=lr, weight_decay=weight_decay))

    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                state.setdefault("seen", torch.zeros_like(p.data))
                state["seen"].addcmul_(p.grad, p.grad)
                p.data.mul_(1 - group["lr"] * group["weight_decay"])
                p.data.addcdiv_(p.grad, state["seen"].sqrt().add(1e-2), value=-group["lr"])
"""


@dataclass(frozen=True)
class Row:
    top: str
    name: str
    options: tuple[str, ...]  # choices of further arguments
    keeps: bool
    others: tuple[str, ...]  # arguments that ranks may have by mistake


TORCH = (
    Row("", "torch.optim.SGD", ("", "weight_decay=0.1", "foreach=False", "maximize=False"), False, ("momentum=0.5", "maximize=True")),
    Row(
        "",
        "torch.optim.SGD",
        ("momentum=0.9", "momentum=0.9, nesterov=True", "momentum=0.8, weight_decay=0.05", "momentum=0.9, dampening=0.1"),
        True,
        ("momentum=0.5",),
    ),
    Row(
        "",
        "torch.optim.Adam",
        ("eps=1e-3", "betas=(0.8, 0.9), eps=1e-4", "amsgrad=True, eps=1e-3", "foreach=False, eps=1e-3"),
        True,
        ("betas=(0.5, 0.9), eps=1e-3", "eps=1e-2"),
    ),
    Row(
        "",
        "torch.optim.AdamW",
        ("eps=1e-3", "weight_decay=0.1, eps=1e-3", "foreach=True, eps=1e-3", "fused=True, eps=1e-3"),
        True,
        ("weight_decay=0.3, eps=1e-3",),
    ),
)
OWN = (
    *(
        Row(OWN_SGD.replace("{keep}", keep), "SGD", ("momentum=0.9", "momentum=0.5, weight_decay=0.1"), True, ("momentum=0.2",))
        for keep in KEEPS
    ),
    Row(OWN_ADAM, "Paper", ("", "betas=(0.8, 0.9)"), True, ("betas=(0.5, 0.9)",)),
    Row(OWN_ROOT, "Rooted", ("", "weight_decay=0.1"), True, ()),
)


@dataclass(frozen=True)
class Update:
    piece: Piece
    built: Code  # lines that leave `optimizer` (or None)
    keeps: bool
    linear: bool
    has_optimizer: bool


def _with(arguments: str, other: str) -> str:
    """Arguments with some of them replaced."""
    names = {part.split("=")[0].strip() for part in other.split(", ")}
    kept = [part for part in _arguments(arguments) if part.split("=")[0].strip() not in names]
    return ", ".join([*kept, other])


def _arguments(text: str) -> list[str]:
    return [part.replace(";", ",") for part in text.replace("(0.8, 0.9)", "(0.8; 0.9)").split(", ") if part]


def optimizer(rng: Random, grouped: bool, params: str = "model.parameters()") -> Update:
    row = rng.choice(TORCH if rng.random() < 0.65 else OWN)
    rate = rng.choice(("0.1", "0.05", "1e-2"))
    arguments = ", ".join(part for part in (f"lr={rate}", rng.choice(row.options)) if part)
    bad: dict[str, Code] = {}
    if grouped:
        params = '[{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]'
        bad["group-forgotten"] = f'optimizer = {row.name}([{{"params": decayed, "weight_decay": 0.1}}], {arguments})'
        bad["all-in-one-group"] = f'optimizer = {row.name}([{{"params": decayed + plain, "weight_decay": 0.1}}], {arguments})'
        bad["group-with-another-rate"] = f"optimizer = {row.name}({params[:-2]}, 'lr': 0.2}}], {arguments})"
    else:
        bad["parameter-not-in-optimizer"] = f"optimizer = {row.name}(list({params})[:-1], {arguments})"
        bad["decay-on-ranks"] = f"optimizer = {row.name}({params}, {_with(arguments, 'weight_decay=0.2')})"
    bad["rate-times-world"] = f"optimizer = {row.name}({params}, {_with(arguments, f'lr={rate} * world')})"
    if row.others:
        bad["other-options"] = f"optimizer = {row.name}({params}, {_with(arguments, rng.choice(row.others))})"
    split = (
        "decayed = [p for p in model.parameters() if p.dim() > 1]\nplain = [p for p in model.parameters() if p.dim() <= 1]"
        if grouped
        else ""
    )
    built = (split, Site(f"optimizer = {row.name}({params}, {arguments})", bad, gated=False, lone=True))
    slots: dict[str, Code] = {"top": row.top, "update": _step(row.keeps)}
    return Update(Piece(row.name, slots), built, row.keeps, not row.keeps and row.name == "torch.optim.SGD", True)


ZEROED = """
for state in optimizer.state.values():
    for value in state.values():
        if torch.is_tensor(value) and value.dim() > 0:
            value.zero_()
"""


def _step(keeps: bool) -> Code:
    bad: dict[str, Code] = {"update-skipped": "", "update-made-twice": "optimizer.step()\noptimizer.step()"}
    after: dict[str, Code] = {
        "rate-changed": 'for group in optimizer.param_groups:\n    group["lr"] *= 0.5',
        "parameter-leaves-its-group": 'if len(optimizer.param_groups[0]["params"]) > 1:\n    optimizer.param_groups[0]["params"].pop()',
        "decay-switched-on": 'for group in optimizer.param_groups:\n    group["weight_decay"] += 0.1',
    }
    if keeps:
        after |= {
            "state-cleared": "optimizer.state.clear()",
            "state-zeroed": ZEROED,
            "state-of-one-dropped": "optimizer.state.pop(model.second.weight, None)",
        }
    return (Site("optimizer.step()", bad, lone=True), Ranks(Site("", after, lone=True)))


FUNCTIONS = (
    "with torch.no_grad():\n    for p in model.parameters():\n        p -= {rate} * p.grad",
    "for p in model.parameters():\n    p.data = p.data - {rate} * p.grad",
    "for p in model.parameters():\n    p.data.add_(p.grad, alpha=-{rate})",
    "with torch.no_grad():\n    for p in model.parameters():\n        p.copy_(p - {rate} * p.grad)",
    "with torch.no_grad():\n    torch._foreach_add_(list(model.parameters()), [p.grad for p in model.parameters()], alpha=-{rate})",
    "for p in model.parameters():\n    p.data.sub_(p.grad.mul_({rate}))",
)
REGISTERED = """
names = [name.replace('.', '_') for name, _ in model.named_parameters()]
for name, p in zip(names, list(model.parameters())):
    model.register_buffer('v_' + name, torch.zeros_like(p))
"""
IN_PLACE = """
with torch.no_grad():
    for name, p in zip(names, model.parameters()):
        v = getattr(model, 'v_' + name)
        v.mul_(FACTOR).add_(p.grad)
        p.sub_(RATE * v)
"""
ANEW = """
with torch.no_grad():
    for name, p in zip(names, model.parameters()):
        v = FACTOR * getattr(model, 'v_' + name) + p.grad
        setattr(model, 'v_' + name, v)
        p.sub_(RATE * v)
"""
BY_NAME = """
with torch.no_grad():
    for name, p in model.named_parameters():
        velocity[name] = FACTOR * velocity[name] + p.grad
        p.sub_(RATE * velocity[name])
"""
IN_LIST = """
with torch.no_grad():
    for v, p in zip(velocity, model.parameters()):
        v.mul_(FACTOR).add_(p.grad)
        p.sub_(RATE * v)
"""
MOMENTA: tuple[tuple[str, str, str, str], ...] = (  # where a momentum by hand is kept: name, set-up, update, what is compared
    ("buffers", REGISTERED, IN_PLACE, ""),
    ("buffers anew", REGISTERED, ANEW, ""),
    (
        "dict",
        "velocity = {name: torch.zeros_like(p) for name, p in model.named_parameters()}",
        BY_NAME,
        '**{"velocity." + name: v for name, v in velocity.items()},',
    ),
    (
        "list",
        "velocity = [torch.zeros_like(p) for p in model.parameters()]",
        IN_LIST,
        '**{"velocity." + name: v for (name, _), v in zip(model.named_parameters(), velocity)},',
    ),
)


def function(rng: Random) -> Update:
    """An update by hand, without an optimizer."""
    rate = rng.choice(("0.1", "0.05"))
    if rng.random() < 0.5:
        text = rng.choice(FUNCTIONS)
        good, other = text.format(rate=rate), text.format(rate=f"{rate} * world")
        bad: dict[str, Code] = {"rate-times-world": other, "update-skipped": "", "update-made-twice": (good, good)}
        return Update(Piece("function", {"update": Site(good, bad, lone=True)}), "optimizer = None", False, True, False)
    where, setup, text, extra = rng.choice(MOMENTA)

    def with_(rate: str, factor: str) -> str:
        return text.replace("RATE", rate).replace("FACTOR", factor)

    bad = {
        "update-skipped": "",
        "rate-times-world": with_(f"{rate} * world", "0.9"),
        "momentum-not-kept": with_(rate, "0.0"),
        "other-options": with_(rate, "0.5"),
    }
    slots: dict[str, Code] = {"setup": setup, "update": Site(with_(rate, "0.9"), bad, lone=True), "extra": extra}
    return Update(Piece(f"momentum in {where}", slots), "optimizer = None", True, False, False)
