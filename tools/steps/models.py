"""Small models. Each has modules `first` and `second` and a hidden activation `h`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

from tools.steps.code import Code, Ranks, Site


@dataclass(frozen=True)
class Model:
    name: str
    init: str  # lines of __init__
    before: str  # lines of forward up to h
    behind: str  # lines of forward after h
    batch: str  # entries of the dictionary of declarations
    inputs: str  # arguments of a call
    loss: Code  # lines that leave `loss`, from `out` and `given`
    hidden: int
    classes: bool  # labels instead of values
    ignoring: bool = False  # some labels do not count


ACTIVATIONS = ("torch.tanh({})", "F.relu({})", "F.gelu({})", "F.silu({})", "torch.sigmoid({})", "({}).pow(2)")


def _regression(rows: int, out: int) -> tuple[str, tuple[str, ...]]:
    declared = f'"y": tvt.Reals(({rows}, {out}), "(dp b) o")'
    return declared, (
        'loss = F.mse_loss(out, given["y"])',
        'loss = (out - given["y"]).pow(2).mean()',
        'loss = ((out - given["y"]) ** 2).sum(-1).mean()',
        'loss = F.mse_loss(out, given["y"], reduction="none").mean(1).mean()',
    )


def _classes(rows: int, out: int) -> tuple[str, tuple[str, ...]]:
    declared = f'"y": tvt.Ids(({rows},), "(dp b)", below={out})'
    return declared, (
        'loss = F.cross_entropy(out, given["y"])',
        'loss = nn.CrossEntropyLoss()(out, given["y"])',
        'loss = F.nll_loss(F.log_softmax(out, dim=-1), given["y"])',
        'loss = -torch.log_softmax(out, -1).gather(1, given["y"][:, None]).mean()',
    )


def model(rng: Random, rows: int) -> Model:
    """A model that takes `rows` rows, all of them on one device."""
    hidden, width, out = rng.choice((4, 6)), rng.choice((3, 5)), rng.choice((3, 5))
    made = rng.choice((_mlp, _mlp, _raw, _normed, _residual, _embedding, _attention, _tied))
    return made(rng, rows, width, hidden, out)


def _finish(
    rng: Random, name: str, rows: int, out: int, init: str, before: str, behind: str, x: str, hidden: int, classes: bool | None = None
) -> Model:
    labelled = rng.random() < 0.4 if classes is None else classes
    declared, losses = (_classes if labelled else _regression)(rows, out)
    return Model(name, init, before, behind, f'"x": {x}, {declared}', 'given["x"]', rng.choice(losses), hidden, labelled)


def _mlp(rng: Random, rows: int, width: int, hidden: int, out: int) -> Model:
    bias = rng.choice(("", ", bias=False"))
    init = f"self.first = nn.Linear({width}, {hidden})\nself.second = nn.Linear({hidden}, {out}{bias})"
    before = "h = " + rng.choice(ACTIVATIONS).format("self.first(x)")
    return _finish(rng, "mlp", rows, out, init, before, "return self.second(h)", f'tvt.Reals(({rows}, {width}), "(dp b) k")', hidden)


def _raw(rng: Random, rows: int, width: int, hidden: int, out: int) -> Model:
    init = f"""
        self.first = nn.ParameterDict({{"weight": nn.Parameter(torch.randn({hidden}, {width}) / 2)}})
        self.second = nn.Linear({hidden}, {out})
        self.gain = nn.Parameter(torch.ones({hidden}))
    """
    before = "h = " + rng.choice(ACTIVATIONS).format('x @ self.first["weight"].t()') + " * self.gain"
    return _finish(rng, "raw", rows, out, init, before, "return self.second(h)", f'tvt.Reals(({rows}, {width}), "(dp b) k")', hidden)


def _normed(rng: Random, rows: int, width: int, hidden: int, out: int) -> Model:
    norm = rng.choice((f"nn.LayerNorm({hidden})", f"nn.RMSNorm({hidden})"))
    init = f"self.first = nn.Linear({width}, {hidden})\nself.norm = {norm}\nself.second = nn.Linear({hidden}, {out})"
    before = "h = self.norm(torch.tanh(self.first(x)))"
    return _finish(rng, "normed", rows, out, init, before, "return self.second(h)", f'tvt.Reals(({rows}, {width}), "(dp b) k")', hidden)


def _residual(rng: Random, rows: int, width: int, hidden: int, out: int) -> Model:
    init = f"""
        self.first = nn.Linear({width}, {hidden})
        self.blocks = nn.ModuleList([nn.Linear({hidden}, {hidden}, bias=False) for _ in range(2)])
        self.second = nn.Linear({hidden}, {out})
    """
    before = """
        h = self.first(x)
        for block in self.blocks:
            h = h + torch.tanh(block(h))
    """
    return _finish(rng, "residual", rows, out, init, before, "return self.second(h)", f'tvt.Reals(({rows}, {width}), "(dp b) k")', hidden)


def _embedding(rng: Random, rows: int, width: int, hidden: int, out: int) -> Model:
    init = f"self.first = nn.Embedding(7, {hidden})\nself.second = nn.Linear({hidden}, {out})"
    before = rng.choice(("h = self.first(x).mean(1)", "h = torch.tanh(self.first(x)).sum(dim=1)"))
    x = f'tvt.Ids(({rows}, {width}), "(dp b) s", below=7)'
    return _finish(rng, "embedding", rows, out, init, before, "return self.second(h)", x, hidden)


def _attention(rng: Random, rows: int, width: int, hidden: int, out: int) -> Model:
    init = f"""
        self.first = nn.Embedding(7, {hidden})
        self.qkv = nn.Linear({hidden}, {3 * hidden}, bias=False)
        self.second = nn.Linear({hidden}, {out})
    """
    attended = rng.choice(
        (
            "h = F.scaled_dot_product_attention(q, k, v).mean(1)",
            f"h = (torch.softmax(q @ k.transpose(1, 2) / {hidden} ** 0.5, dim=-1) @ v).mean(1)",
        )
    )
    before = f"q, k, v = self.qkv(self.first(x)).chunk(3, dim=-1)\n{attended}"
    x = f'tvt.Ids(({rows}, {width}), "(dp b) s", below=7)'
    return _finish(rng, "attention", rows, out, init, before, "return self.second(h)", x, hidden)


def _tied(rng: Random, rows: int, width: int, hidden: int, out: int) -> Model:
    init = f"""
        self.first = nn.Embedding(7, {hidden})
        self.second = nn.Linear({hidden}, 7, bias=False)
        self.second.weight = self.first.weight
        self.gain = nn.Parameter(torch.ones({hidden}))
    """
    x = f'tvt.Ids(({rows}, {width}), "(dp b) s", below=7)'
    return _finish(
        rng, "tied", rows, 7, init, "h = torch.tanh(self.first(x).mean(1)) * self.gain", "return self.second(h)", x, hidden, True
    )


def ignoring(rng: Random, made: Model) -> Model:
    """The same model with labels of which some do not count: ranks divide by the number on all of them."""
    total = 'total = F.cross_entropy(out, given["y"], ignore_index=-100, reduction="sum")\ncounted = (given["y"] != -100).sum()'
    right = Ranks(("dist.all_reduce(counted)", "total = total * world"))
    wrong: dict[str, Code] = {"count-not-reduced": "", "count-reduced-loss-not-scaled": Ranks("dist.all_reduce(counted)")}
    loss = (total, Site(right, wrong), rng.choice(("loss = total / counted", "loss = total / counted.clamp(min=1)")))
    return replace(made, loss=loss, batch=made.batch.replace('"(dp b)", below=', '"(dp b)", ignore=-100, below='), ignoring=True)
