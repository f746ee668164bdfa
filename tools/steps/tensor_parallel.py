"""A model whose middle is cut over the ranks by hand, with the communication of its forward and backward pass."""

from __future__ import annotations

from random import Random

from tools.steps.code import Code, Ranks, Site
from tools.steps.models import Model
from tools.steps.pieces import Piece

CUTS = '{"*up_weight": "(tp o) k", "*up_bias": "(tp o)", "*down_weight": "o (tp k)"}'
TOP = """
class Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        g = g.clone()
        dist.all_reduce(g)
        return g


class Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, g):
        return g


class SummedBothWays(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, g):
        g = g.clone()
        dist.all_reduce(g)
        return g
"""


def model(rng: Random, rows: int) -> tuple[Model, Piece]:
    hidden, middle, width, out = rng.choice((4, 6)), rng.choice((4, 6)), 3, rng.choice((3, 5))
    act = rng.choice(("torch.tanh", "F.gelu", "F.relu", "F.silu"))
    init = f"""
        self.first = nn.Linear({width}, {hidden})
        up, down = nn.Linear({hidden}, {middle}), nn.Linear({middle}, {hidden})
        part = {middle} // world
        self.up_weight = nn.Parameter(up.weight.detach()[rank * part : (rank + 1) * part].clone())
        self.up_bias = nn.Parameter(up.bias.detach()[rank * part : (rank + 1) * part].clone())
        self.down_weight = nn.Parameter(down.weight.detach()[:, rank * part : (rank + 1) * part].clone())
        self.down_bias = nn.Parameter(down.bias.detach().clone())
        self.second = nn.Linear({hidden}, {out})
    """
    loss = rng.choice(('loss = F.mse_loss(out, given["y"])', 'loss = (out - given["y"]).pow(2).mean()'))
    batch = f'"x": tvt.Reals(({rows}, {width}), "(dp b) k"), "y": tvt.Reals(({rows}, {out}), "(dp b) o")'
    enter = Ranks(
        Site(
            "z = Copied.apply(z)", {"input-gradient-not-summed": "", "input-gradient-of-rank-0": "z = z if self.rank == 0 else z.detach()"}
        )
    )
    bad: dict[str, Code] = {
        "parts-not-summed": "",
        "parts-summed-twice": "z = Summed.apply(Summed.apply(z))",
        "gradient-summed-again": "z = SummedBothWays.apply(z)",
        "sum-without-gradient": "z = Summed.apply(z.detach())",
        "average-of-parts": "z = Summed.apply(z) / self.world",
    }
    add, part = Site("z = z + self.down_bias", {"bias-on-every-rank": ""}), Site("", {"bias-on-every-rank": "z = z + self.down_bias"})
    inner: Code = (
        f"h = {act}(self.first(x))\nz = h",
        enter,
        f"z = {act}(F.linear(z, self.up_weight, self.up_bias))\nz = F.linear(z, self.down_weight)",
        part,
        Ranks(Site("z = Summed.apply(z)", bad)),
        add,
        rng.choice(("h = h + z", "h = torch.tanh(z)")),
    )
    made = Model("cut mlp", init, "", "return self.second(h)", batch.replace("(dp b)", "b"), 'given["x"]', loss, hidden, False)
    return made, Piece("tensor parallel", {"top": TOP, "inner": inner})
