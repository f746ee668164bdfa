"""ZeRO by hand: every rank updates a part of the parameters and gets the rest from the others."""

from __future__ import annotations

from random import Random

from tools.steps.code import Code, One, Ranks, Site
from tools.steps.optimizers import Update
from tools.steps.pieces import Piece

OWNED = (One("mine = list(model.parameters())"), Ranks("mine = list(model.parameters())[rank::world]"))


def owners(rng: Random) -> Piece:
    """After the update the owner of each parameter sends it."""
    good = "for i, p in enumerate(model.parameters()):\n    dist.broadcast(p.data, src=i % world)"
    bad: dict[str, Code] = {
        "parameters-not-sent": "",
        "all-sent-by-rank-0": "for p in model.parameters():\n    dist.broadcast(p.data, src=0)",
        "last-parameter-not-sent": good.replace("enumerate(model.parameters())", "enumerate(list(model.parameters())[:-1])"),
        "a-copy-is-sent": good.replace("p.data,", "p.data.clone(),"),
    }
    early: dict[str, Code] = {"sent-before-update": good}
    return Piece("owners", {"reduced": Ranks(Site("", early)), "update": Ranks(Site(good, {**bad, "sent-before-update": ""}))})


def flat(rng: Random) -> Update:
    """Half of the flat parameters is updated on each rank, and both halves are gathered."""
    rate = rng.choice(("0.1", "0.05"))
    one = f"with torch.no_grad():\n    for p in model.parameters():\n        p -= {rate} * p.grad"
    cut = """
        flat = torch.cat([p.data.reshape(-1) for p in model.parameters()])
        slope = torch.cat([p.grad.reshape(-1) for p in model.parameters()])
        size = flat.numel()
        flat, slope = F.pad(flat, (0, size % world)), F.pad(slope, (0, size % world))
        part = flat.chunk(world)[rank]
    """
    step = Site(
        f"part = part - {rate} * slope.chunk(world)[rank]",
        {
            "slope-of-rank-0": f"part = part - {rate} * slope.chunk(world)[0]",
            "update-skipped": "",
            "rate-times-world": f"part = part - world * {rate} * slope.chunk(world)[rank]",
        },
    )
    gather = Site(
        "dist.all_gather_into_tensor(flat, part.contiguous())",
        {
            "halves-not-gathered": "flat.view(world, -1)[rank] = part",
            "gathered-into-a-copy": "dist.all_gather_into_tensor(flat.clone(), part.contiguous())",
        },
    )
    back = "at = 0\nfor p in model.parameters():\n    p.data.copy_(flat[at : at + p.numel()].view_as(p))\n    at += p.numel()"
    return Update(Piece("flat halves", {"update": (One(one), Ranks((cut, step, gather, back)))}), "optimizer = None", False, True, False)


def redundancy(rng: Random) -> Update:
    """PyTorch's own ZeRO."""
    name, options = rng.choice((("Adam", "eps=1e-3"), ("SGD", "momentum=0.9"), ("AdamW", "weight_decay=0.1, eps=1e-3")))
    sharded = f"optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.{name}, lr=RATE, {options})"
    built = (
        One(f"optimizer = torch.optim.{name}(model.parameters(), lr=0.1, {options})"),
        Ranks(Site(sharded.replace("RATE", "0.1"), {"rate-times-world": sharded.replace("RATE", "0.1 * world")}, gated=False)),
    )
    top = "from torch.distributed.optim import ZeroRedundancyOptimizer"
    step = Site("optimizer.step()", {"update-skipped": "", "update-made-twice": "optimizer.step()\noptimizer.step()"})
    return Update(Piece("ZeroRedundancyOptimizer", {"top": top, "update": step}), built, True, False, True)
