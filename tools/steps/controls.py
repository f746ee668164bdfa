"""What happens around a step: schedules, clipping, hooks, modes, freezing, views, threads, swallowed exceptions."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from tools.steps.code import Code, Ranks, Site
from tools.steps.pieces import Piece, Setting

Control = Callable[[Random, Setting], Piece]
BY_HAND = """
norm = torch.sqrt(sum((p.grad ** 2).sum() for p in model.parameters() if p.grad is not None))
for p in model.parameters():
    if p.grad is not None:
        p.grad.mul_(0.5 / (norm + 1e-6))
"""
WHERE_LARGE = """
norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
if norm > 0.5:
    for p in model.parameters():
        if p.grad is not None:
            p.grad.mul_(0.5 / norm)
"""
RESTORED = """
if kept_weight:
    model.second.weight.data.copy_(kept_weight.pop())
kept_weight.append(model.second.weight.data.clone())
"""
IN_A_THREAD = """
import threading
worker = threading.Thread(target=lambda: model.second.weight.grad.mul_(2))
worker.start()
worker.join()
"""
WHERE_READ = """
try:
    float(loss)
    model.first.weight.grad.mul_(2)
except Exception:
    pass
"""


def schedule(rng: Random, setting: Setting) -> Piece:
    """One of PyTorch's schedulers, or rates by hand; the first rate may be 0."""
    kinds = (
        "torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)",
        "torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)",
        "torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: min(1.0, i / 2))",
        "torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: 1 / (i + 1))",
        "torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.25, total_iters=4)",
        "torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=8)",
        "torch.optim.lr_scheduler.ConstantLR(optimizer, factor=0.5, total_iters=1)",
    )
    bad: dict[str, Code] = {"schedule-not-stepped": "", "schedule-stepped-twice": "scheduler.step()\nscheduler.step()"}
    after = Site("scheduler.step()", bad, lone=True)
    good, other = rng.sample(kinds, 2)
    return Piece(
        "schedule",
        {"setup": Site(f"scheduler = {good}", {"another-schedule": f"scheduler = {other}"}, gated=False, lone=True), "after": after},
    )


def rates(rng: Random, setting: Setting) -> Piece:
    good, other = rng.choice(
        (
            ("0.1 / n", "0.1 / (n + 1)"),
            ("0.05 * min(n, 2)", "0.05 * min(n, 3)"),
            ("0.1 * (n - 1)", "0.1 * n"),
            ("0.1 if n % 2 else 0.05", "0.1 if n > 1 else 0.05"),
        )
    )
    text = "for group in optimizer.param_groups:\n    group['lr'] = {}"
    bad: dict[str, Code] = {
        "another-rate": text.format(other),
        "rate-for-one-group": f"optimizer.param_groups[0]['lr'] = {good}",
        "rate-by-rank": text.format(f"({good}) * (1 + rank)"),
    }
    return Piece("rates", {"begin": Site(text.format(good), bad, lone=True)})


def decay(rng: Random, setting: Setting) -> Piece:
    """Weight decay by hand, perhaps times a rate that starts at 0."""
    factor = rng.choice(("0.99", "(1 - 0.01 * (n - 1))", "(1 - 0.05 * min(1, n - 1))"))
    text = "with torch.no_grad():\n    for p in {}:\n        p.mul_({})"
    bad: dict[str, Code] = {
        "decay-missed": "",
        "decay-for-some": text.format("list(model.parameters())[1:]", factor),
        "decay-twice": (text.format("model.parameters()", factor),) * 2,
    }
    return Piece("decay", {"after": Site(text.format("model.parameters()", factor), bad, lone=True)})


def clip(rng: Random, setting: Setting) -> Piece:
    if not setting.whole:
        text = "for p in model.parameters():\n    if p.grad is not None:\n        p.grad.clamp_(-0.5, 0.5)"
    else:
        text = rng.choice(
            (
                "nn.utils.clip_grad_norm_(model.parameters(), 0.5)",
                "nn.utils.clip_grad_value_(model.parameters(), 0.1)",
                BY_HAND,
                WHERE_LARGE,
                "nn.utils.clip_grad_norm_(model.second.parameters(), 0.1)",
            )
        )
    bad: dict[str, Code] = {"not-clipped": ""}
    slots: dict[str, Code] = {"reduced": Site(text, bad, lone=True)}
    if setting.cut:
        slots["local"] = Site("", {"clipped-before-reduction": text}, lone=True)
        slots["reduced"] = Site(text, {"clipped-before-reduction": "", **bad}, lone=True)
    return Piece("clip", slots)


def hook(rng: Random, setting: Setting) -> Piece:
    after = "def smaller(p):\n    p.grad.mul_({})\n\nmodel.second.weight.register_post_accumulate_grad_hook(smaller)"
    kinds = (
        ("model.second.weight.register_hook(lambda g: g * 0.5)", "model.second.weight.register_hook(lambda g: g * 0.25)"),
        (
            "model.second.register_forward_hook(lambda module, given, out: out * 0.5)",
            "model.second.register_forward_hook(lambda module, given, out: out * 0.25)",
        ),
        (
            "model.second.register_forward_pre_hook(lambda module, given: (given[0] * 2,))",
            "model.second.register_forward_pre_hook(lambda module, given: (given[0] * 3,))",
        ),
        (
            "model.second.register_full_backward_hook(lambda module, before, after: (before[0] * 0.5,))",
            "model.second.register_full_backward_hook(lambda module, before, after: (before[0] * 0.25,))",
        ),
        (after.format("0.5"), after.format("0.25")),
    )
    some = kinds[:4] if setting.accumulates else kinds
    good, other = rng.choice(some)
    setup = Site(good, {"hook-missing": "", "another-hook": other, "hook-twice": (good, good)}, gated=False, lone=True)
    later = Ranks(Site("", {"hook-added-in-a-step": good}, lone=True))
    return Piece("hook", {"setup": setup, "begin": later})


def optimizer_hook(rng: Random, setting: Setting) -> Piece:
    """A hook that the optimizer runs before or after its step."""
    before = rng.random() < 0.5
    what = "p.grad.mul_({})" if before else "p.data.mul_({})"
    body = f"for p in model.second.parameters():\n        if p.grad is not None:\n            {what}"
    text = f"def adjust(*_):\n    {body}\n\noptimizer.register_step_{'pre' if before else 'post'}_hook(adjust)"
    bad: dict[str, Code] = {"optimizer-hook-missing": "", "another-optimizer-hook": text.format("0.8")}
    return Piece("optimizer hook", {"setup": Site(text.format("0.9"), bad, gated=False, lone=True)})


def rewound(rng: Random, setting: Setting) -> Piece:
    """The model goes back to what it was some steps ago."""
    if rng.random() < 0.5:
        setup, text = "saved = copy.deepcopy(model.state_dict())", "if n == 2:\n    model.load_state_dict(saved)"
    else:
        setup, text = (
            "saved = {}",
            "if n % 2:\n    saved['model'] = copy.deepcopy(model.state_dict())\nelse:\n    model.load_state_dict(saved['model'])",
        )
    return Piece("rewound", {"setup": setup, "after": Site(text, {"not-rewound": ""}, lone=True)})


def log(rng: Random, setting: Setting) -> Piece:
    """What a script writes down changes nothing."""
    kinds = (
        "history.append(loss.item())",
        "history.append(loss.detach())",
        "history.append(n)",
        "if n % 2 == 0:\n    history.append(float(loss))",
        "if rank == 0:\n    history.append(n)",
        "if rank == 0:\n    history.append(loss.item())",
        "print(f'step {n}', file=open(os.devnull, 'w'))",
        "history.append({name: p.shape for name, p in model.named_parameters()})",
        "history[:] = [loss.detach(), *history[:1]]",
    )
    return Piece("log", {"top": "import os", "setup": "history = []", "after": rng.choice(kinds)})


def removed(rng: Random, setting: Setting) -> Piece:
    """A hook that is removed after a step."""
    good = "handle = model.second.register_forward_hook(lambda module, given, out: out * 0.5)"
    return Piece(
        "removed hook",
        {
            "setup": good,
            "after": Site("if n == 2:\n    handle.remove()", {"hook-not-removed": "", "hook-removed-early": "handle.remove()"}, lone=True),
        },
    )


def modes(rng: Random, setting: Setting) -> Piece:
    """The model is put into evaluation mode after a step, and back before the next."""
    init = "self.halving = Halving()"
    top = "class Halving(nn.Module):\n    def forward(self, x):\n        return x * 0.5 if self.training else x"
    back = Site(
        "model.train()", {"training-mode-forgotten": "", "one-module-in-evaluation-mode": "model.train()\nmodel.halving.eval()"}, lone=True
    )
    return Piece(
        "modes",
        {
            "top": top,
            "init": init,
            "inner": "h = self.halving(h)",
            "begin": back,
            "after": rng.choice(("model.eval()", "model.train(False)")),
        },
    )


def freeze(rng: Random, setting: Setting) -> Piece:
    """A layer is trained from, or up to, some step only."""
    text = rng.choice(
        (
            "model.second.weight.requires_grad_(bool(n >= {}))",
            "model.second.weight.requires_grad_(bool(n < {}))",
            "for p in model.second.parameters():\n    p.requires_grad_(bool(n != {}))",
        )
    )
    bad: dict[str, Code] = {"not-frozen": "", "frozen-at-another-step": text.format(3)}
    return Piece("freeze", {"begin": Site(text.format(2), bad)})


def views(rng: Random, setting: Setting) -> Piece:
    """Gradients and weights are changed through views and in place."""
    kinds = (
        ("model.second.weight.grad[0].mul_(0.5)", "model.second.weight.grad[1].mul_(0.5)"),
        ("model.second.weight.grad.view(-1)[:2].zero_()", "model.second.weight.grad.view(-1)[:3].zero_()"),
        ("model.second.weight.grad.t()[1].add_(0.1)", "model.second.weight.grad[1].add_(0.1)"),
        ("model.second.weight.grad[::2] *= 2", "model.second.weight.grad[1::2] *= 2"),
        ("model.second.weight.grad.flatten()[-1] = 0.25", "model.second.weight.grad.flatten()[0] = 0.25"),
        (
            "g = model.second.weight.grad\ng[:, 0], g[:, 1] = g[:, 1].clone(), g[:, 0].clone()",
            "g = model.second.weight.grad\ng[:, 0] = g[:, 1]",
        ),
        ("model.second.weight.grad.diagonal().fill_(0.5)", "model.second.weight.grad.diagonal().add_(0.5)"),
        ("model.second.weight.grad.narrow(0, 0, 2).neg_()", "model.second.weight.grad.narrow(0, 1, 2).neg_()"),
        (
            "rows = model.second.weight.grad.unbind(0)\nrows[0].sub_(rows[1])",
            "rows = model.second.weight.grad.unbind(0)\nrows[1].sub_(rows[0])",
        ),
        ("model.second.weight.grad = model.second.weight.grad * 2", "model.second.weight.grad = model.second.weight.grad * 3"),
    )
    good, other = rng.choice(kinds)
    return Piece("views", {"reduced": Site(good, {"another-view-written": other, "view-not-written": ""}, lone=True)})


def weights(rng: Random, setting: Setting) -> Piece:
    """A weight is changed by hand after the update, or replaced by a new tensor or parameter."""
    kinds = (
        (
            "with torch.no_grad():\n    model.second.weight.clamp_(-0.3, 0.3)",
            "with torch.no_grad():\n    model.second.weight.clamp_(-0.2, 0.2)",
        ),
        ("model.second.weight.data[0] *= 0.9", "model.second.weight.data[1] *= 0.9"),
        ("model.second.weight.data = model.second.weight.data * 0.95", "model.second.weight.data = model.second.weight.data * 0.9"),
        (
            "with torch.no_grad():\n    w = model.second.weight\n    w.sub_(0.1 * w.mean(1, keepdim=True))",
            "with torch.no_grad():\n    w = model.second.weight\n    w.sub_(0.1 * w.mean(0, keepdim=True))",
        ),
        ("model.second.weight.detach().view(-1)[0].add_(0.01)", "model.second.weight.detach().view(-1)[1].add_(0.01)"),
        (
            "with torch.no_grad():\n    model.second.weight.copy_(model.second.weight * 0.9)",
            "with torch.no_grad():\n    model.second.weight.copy_(model.second.weight * 0.8)",
        ),
    )
    good, other = rng.choice(kinds)
    replaced = "model.second.weight = nn.Parameter(model.second.weight.detach().clone())"
    return Piece(
        "weights",
        {
            "after": Site(
                good, {"another-weight-written": other, "weight-not-written": "", "parameter-replaced": (good, replaced)}, lone=True
            )
        },
    )


def thread(rng: Random, setting: Setting) -> Piece:
    body = "def halve():\n    model.second.weight.grad.mul_(0.5)\n\nworker = threading.Thread(target=halve)\nworker.start()\nworker.join()"
    plain = "model.second.weight.grad.mul_(0.5)"
    pool = "with ThreadPoolExecutor(1) as pool:\n    pool.submit(lambda: model.second.weight.grad.mul_(0.5)).result()"
    text = rng.choice((body, pool))
    return Piece(
        "thread",
        {
            "top": "import threading\nfrom concurrent.futures import ThreadPoolExecutor",
            "reduced": Site(rng.choice((text, plain)), {"thread-missing": "", "thread-writes-twice": (text, text)}, lone=True),
        },
    )


def swallowed(rng: Random, setting: Setting) -> Piece:
    """An exception that a real run would not raise is swallowed."""
    read = rng.choice(
        ("float(loss)", "loss.item() + 0.0", "loss.detach().numpy().item()", "int(loss * 0 + 1)", "loss.tolist()", "hash(float(loss))")
    )
    text = f"try:\n    {read}\n    read = {{}}\nexcept Exception:\n    read = 1.0\nmodel.second.weight.grad.mul_(read)"
    return Piece("swallowed", {"reduced": Site(text.format("1.0"), {"factor-where-nothing-is-raised": text.format("2.0")}, lone=True)})


def instance(rng: Random, setting: Setting) -> Piece:
    """The type of a number that was read decides."""
    test = rng.choice(
        (
            "isinstance(loss.item(), float)",
            "type(loss.item()) is float",
            "isinstance(loss.item(), (int, float))",
            "dist.is_available()",
            "'gloo' in str(dist.get_backend()) if world > 1 else True",
        )
    )
    text = f"if {test}:\n    model.second.weight.grad.mul_({{}})"
    return Piece("instance", {"reduced": Site(text.format("1.0"), {"factor-by-type": text.format("2.0")}, lone=True)})


def accidents(rng: Random, setting: Setting) -> Piece:
    """Lines that only wrong programs have."""
    begin: dict[str, Code] = {
        "last-row-dropped": "batch = {key: value[:-1] for key, value in batch.items()}",
        "rows-shifted": "batch = {**batch, 'x': batch['x'].roll(1, 0)}",
        "old-weights-restored": RESTORED,
        "weight-replaced-in-a-step": "model.second.weight = nn.Parameter(model.second.weight.detach().clone())",
        "module-replaced-in-a-step": "model.second = copy.deepcopy(model.second)",
        "hook-of-all-gradients": "model.first.weight.register_hook(lambda g: g * 0.5)",
        "weight-moved": "model.first.weight.data.add_(0.01)",
    }
    losses: dict[str, Code] = {
        "loss-times-world": "loss = loss * world",
        "loss-in-half": "loss = loss / 2",
        "penalty-on-ranks": "loss = loss + 0.1 * model.first.weight.pow(2).sum()",
    }
    reduced: dict[str, Code] = {
        "gradient-doubled": "model.second.weight.grad.mul_(2)",
        "gradient-of-one-removed": "model.first.weight.grad = None",
        "gradient-doubled-through-data": "model.second.weight.grad.data *= 2",
        "gradient-doubled-in-a-thread": IN_A_THREAD,
        "gradient-doubled-through-numpy": "model.second.weight.grad.numpy()[:] *= 2",
        "gradient-anew": "model.second.weight.grad = model.second.weight.grad * 0.5",
        "gradient-shifted-by-rank": "model.first.weight.grad.add_(rank)",
        "gradient-doubled-where-a-number-is-read": WHERE_READ,
    }
    slots: dict[str, Code] = {
        "setup": Ranks(Site("", {"old-weights-restored": "kept_weight = []"}, gated=False)),
        "begin": Ranks((Site("", begin, lone=True), Site("", {"frozen-on-ranks": "model.second.weight.requires_grad_(False)"}))),
        "losses": Ranks(Site("", losses, lone=True)),
        "reduced": Ranks(Site("", reduced, lone=True)),
    }
    return Piece("accidents", slots)


def metrics(rng: Random, setting: Setting) -> Piece:
    """Another number that the step returns."""
    factor = Site("shown = 2 * loss.detach()", {"metric-with-another-factor": "shown = 3 * loss.detach()"}, lone=True)
    bad: dict[str, Code] = {"metric-not-reduced": "", "metric-summed": "dist.all_reduce(shown)"}
    reduced = Ranks(Site("dist.all_reduce(shown)\nshown = shown / world", bad)) if setting.cut else ""
    return Piece("metrics", {"after": (factor, reduced), "metrics": "'shown': shown,"})


CONTROLS: tuple[tuple[Control, int], ...] = (
    (schedule, 4),
    (rates, 4),
    (decay, 2),
    (clip, 4),
    (hook, 4),
    (removed, 1),
    (modes, 3),
    (freeze, 1),
    (views, 3),
    (weights, 3),
    (thread, 1),
    (swallowed, 1),
    (instance, 1),
    (metrics, 2),
    (optimizer_hook, 1),
    (rewound, 1),
    (log, 3),
)
NEED_OPTIMIZER = (schedule, rates, freeze, optimizer_hook)


def control(rng: Random, setting: Setting, used: set[str], optimizer: bool) -> Piece:
    possible = [(made, weight) for made, weight in CONTROLS if made.__name__ not in used and (optimizer or made not in NEED_OPTIMIZER)]
    made = rng.choices([row[0] for row in possible], [row[1] for row in possible])[0]
    used.add(made.__name__)
    if made in (schedule, rates):
        used.update(("schedule", "rates"))
    if made is freeze:
        used.update(("views", "thread", "swallowed", "instance"))  # they need a gradient of the frozen weight
    elif made in (views, thread, swallowed, instance):
        used.add("freeze")
    return made(rng, setting)
