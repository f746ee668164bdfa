"""Ways in which ranks that have parts of a batch come to the same gradients, by hand or by DDP."""

from __future__ import annotations

from random import Random

from tools.steps.code import Code, Ranks, Site
from tools.steps.pieces import Piece, Setting

EACH = "for p in {}:\n    if p.grad is not None:\n"


def _each(body: str, over: str = "model.parameters()") -> str:
    return EACH.format(over) + "".join(f"        {line}\n" for line in body.split("\n"))


def _loops(body: str) -> dict[str, Code]:
    """Mistakes of a loop over parameters that reduces every gradient by `body`."""
    return {
        "gradients-not-reduced": "",
        "sum-for-average": _each("dist.all_reduce(p.grad)"),
        "maximum-for-average": _each("dist.all_reduce(p.grad, op=dist.ReduceOp.MAX)"),
        "rank-0-for-average": _each("dist.broadcast(p.grad, src=0)"),
        "averaged-twice": (_each(body), _each("p.grad /= world")),
        "last-gradient-missed": _each(body, "list(model.parameters())[:-1]"),
        "biases-missed": _each("if p.dim() > 1:\n" + "".join(f"    {line}\n" for line in body.split("\n")).rstrip("\n")),
        "a-copy-is-reduced": _each("g = p.grad.clone()\ndist.all_reduce(g, op=dist.ReduceOp.AVG)"),
        "a-part-is-reduced": _each("dist.all_reduce(p.grad.view(-1)[:-1], op=dist.ReduceOp.AVG)"),
    }


BODIES = (
    "dist.all_reduce(p.grad, op=dist.ReduceOp.AVG)",
    "dist.all_reduce(p.grad)\np.grad /= world",
    "dist.all_reduce(p.grad.data)\np.grad.data.div_(world)",
    "p.grad.mul_(1 / world)\ndist.all_reduce(p.grad, op=dist.ReduceOp.SUM)",
    "dist.all_reduce(p.grad, async_op=True).wait()\np.grad.div_(dist.get_world_size())",
    "parts = [torch.empty_like(p.grad) for _ in range(world)]\ndist.all_gather(parts, p.grad)\np.grad = torch.stack(parts).mean(0)",
    "g = p.grad.clone()\ndist.all_reduce(g)\np.grad = g / world",
    "dist.reduce(p.grad, dst=0)\ndist.broadcast(p.grad, src=0)\np.grad.div_(world)",
)


def each(rng: Random, setting: Setting) -> Piece:
    body = rng.choice(BODIES)
    return Piece("each", {"reduce": Ranks(Site(_each(body), _loops(body)))})


def scaled(rng: Random, setting: Setting) -> Piece:
    """The loss is divided before the backward pass, and gradients are added up."""
    loop = Ranks(
        Site(
            _each("dist.all_reduce(p.grad)"),
            {"gradients-not-reduced": "", "last-gradient-missed": _each("dist.all_reduce(p.grad)", "list(model.parameters())[:-1]")},
        )
    )
    return Piece(
        "scaled",
        {
            "losses": Ranks(Site("scale = 1 / world", {"sum-for-average": "scale = 1.0", "averaged-twice": "scale = 1 / world ** 2"})),
            "reduce": loop,
        },
    )


def flat(rng: Random, setting: Setting) -> Piece:
    gather = "grads = [p.grad for p in model.parameters() if p.grad is not None]\nflat = torch.cat([g.reshape(-1) for g in grads])"
    spread = rng.choice(
        (
            "at = 0\nfor g in grads:\n    g.copy_(flat[at : at + g.numel()].view_as(g))\n    at += g.numel()",
            "for g, part in zip(grads, flat.split([g.numel() for g in grads])):\n    g.copy_(part.view_as(g))",
            "for g, part in zip(grads, torch._utils._unflatten_dense_tensors(flat, grads)):\n    g.copy_(part)",
        )
    )
    reduce = rng.choice(
        ("dist.all_reduce(flat)\nflat /= world", "dist.all_reduce(flat, op=dist.ReduceOp.AVG)", "flat /= world\ndist.all_reduce(flat)")
    )
    bad: dict[str, Code] = {
        "gradients-not-reduced": "",
        "sum-for-average": "dist.all_reduce(flat)",
        "averaged-twice": (reduce, "flat /= world"),
        "end-of-bucket-missed": "dist.all_reduce(flat[:-3], op=dist.ReduceOp.AVG)",
        "start-of-bucket-missed": "dist.all_reduce(flat[2:])\nflat[2:] /= world",
    }
    spreads = Site(
        spread,
        {
            "bucket-not-copied-back": "",
            "bucket-copied-to-all-but-one": spread.replace("in grads", "in grads[:-1]").replace("zip(grads,", "zip(grads[:-1],"),
        },
    )
    return Piece("flat", {"reduce": Ranks((gather, Site(reduce, bad), spreads))})


def bucket(rng: Random, setting: Setting) -> Piece:
    """Gradients are views of one flat tensor, on the reference too."""
    setup = """
        bucket = torch.zeros(sum(p.numel() for p in model.parameters()))
        at = 0
        for p in model.parameters():
            p.grad = bucket[at : at + p.numel()].view_as(p)
            at += p.numel()
    """
    bad: dict[str, Code] = {
        "gradients-not-reduced": "",
        "sum-for-average": "dist.all_reduce(bucket)",
        "end-of-bucket-missed": "dist.all_reduce(bucket[:-3], op=dist.ReduceOp.AVG)",
        "every-second-element": "part = bucket[::2].contiguous()\ndist.all_reduce(part)\nbucket[::2].copy_(part / world)",
        "a-copy-is-reduced": "dist.all_reduce(bucket.clone())",
    }
    begin = Site("bucket.zero_()", {"gradients-not-cleared": "", "part-not-cleared": "bucket[:-2].zero_()"}, lone=True)
    return Piece("bucket", {"setup": setup, "begin": begin, "reduce": Ranks(Site("dist.all_reduce(bucket)\nbucket.div_(world)", bad))})


def asynchronous(rng: Random, setting: Setting) -> Piece:
    start = "grads = [p.grad for p in model.parameters() if p.grad is not None]\nworks = [dist.all_reduce(g, async_op=True) for g in grads]"
    wait = "for work, g in zip(works, grads):\n    work.wait()\n    g.div_(world)"
    divided: dict[str, Code] = {
        "sum-for-average": wait.replace("\n    g.div_(world)", ""),
        "last-not-divided": (wait.replace("zip(works, grads)", "zip(works[:-1], grads)"), "works[-1].wait()"),
    }
    return Piece("asynchronous", {"reduce": Ranks((start, Site(wait, divided)))})


def hooked(rng: Random, setting: Setting) -> Piece:
    """Gradients are reduced by hooks, as soon as they exist."""
    kind = rng.choice(("after", "tensor"))
    if kind == "after":
        body = "def average(p):\n    {}dist.all_reduce(p.grad)\n    p.grad.div_(world)"
        register = "p.register_post_accumulate_grad_hook(average)"
    else:
        body = "def average(g):\n    {}g = g.clone()\n    dist.all_reduce(g)\n    return g / world"
        register = "p.register_hook(average)"
    loop = f"for p in model.parameters():\n    if p.requires_grad:\n        {register}"
    bad: dict[str, Code] = {
        "gradients-not-reduced": "",
        "last-gradient-missed": loop.replace("model.parameters()", "list(model.parameters())[:-1]"),
        "biases-missed": f"for p in model.parameters():\n    if p.requires_grad and p.dim() > 1:\n        {register}",
    }
    divided = Site(
        body.format(""),
        {"sum-for-average": body.format("").replace("p.grad.div_(world)", "pass").replace("return g / world", "return g")},
        gated=False,
    )
    once = Ranks(Site("", {"hooks-removed-after-a-step": "if n == 2:\n    for handle in handles:\n        handle.remove()"}, gated=False))
    listed = f"handles = []\nfor p in model.parameters():\n    if p.requires_grad:\n        handles.append({register})"
    return Piece(
        "hooked", {"setup": Ranks((divided, Site(listed, {k: ("handles = []", v) for k, v in bad.items()}, gated=False))), "begin": once}
    )


def scattered(rng: Random, setting: Setting) -> Piece:
    """Each rank adds up half of a flat gradient, and both are gathered."""
    before = """
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        flat = torch.cat([g.reshape(-1) for g in grads])
        flat = F.pad(flat, (0, -flat.numel() % world))
        mine = torch.empty(flat.numel() // world)
        dist.reduce_scatter_tensor(mine, flat)
    """
    after = "at = 0\nfor g in grads:\n    g.copy_(flat[at : at + g.numel()].view_as(g))\n    at += g.numel()"
    gather = Site(
        "dist.all_gather_into_tensor(flat, mine)",
        {
            "halves-not-gathered": "flat[rank * mine.numel() : (rank + 1) * mine.numel()] = mine",
            "halves-swapped": "dist.all_gather_into_tensor(flat, mine)\nflat = flat.roll(mine.numel())",
        },
    )
    return Piece("scattered", {"reduce": Ranks((before, Site("mine /= world", {"sum-for-average": ""}), gather, after))})


def parameters(rng: Random, setting: Setting) -> Piece:
    """Parameters are averaged after the update: the same as gradients where the update is linear in them and keeps nothing."""
    loop = "for p in model.parameters():\n    dist.all_reduce(p.data)\n    p.data /= world"
    bad: dict[str, Code] = {
        "parameters-not-averaged": "",
        "last-parameter-not-averaged": loop.replace("model.parameters()", "list(model.parameters())[:-1]"),
        "parameters-of-rank-0": "for p in model.parameters():\n    dist.broadcast(p.data, src=0)",
    }
    return Piece("parameters", {"after": Ranks(Site(loop, bad))})


def ddp(rng: Random, setting: Setting) -> Piece:
    options = ", ".join(
        rng.sample(
            ("gradient_as_bucket_view=True", "broadcast_buffers=False", "bucket_cap_mb=0.0001", "find_unused_parameters=True"),
            rng.choice((0, 0, 1, 2)),
        )
    )
    built = f"called = DistributedDataParallel(model{', ' + options if options else ''})"
    bad: dict[str, Code] = {
        "parameter-ignored": ('DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["second.weight"])', built),
        "frozen-while-wrapped": ("model.second.weight.requires_grad_(False)", built, "model.second.weight.requires_grad_(True)"),
        "not-wrapped": "called = model",
    }
    slots: dict[str, Code] = {"setup": Ranks(Site(built, bad, gated=False))}
    chance = rng.random()
    if chance < 0.25:
        slots["losses"] = Ranks(Site("", {"divided-before-ddp-averages": "scale = 1 / world"}))
    elif chance < 0.5 and not setting.accumulates:
        slots["top"], slots["setup"] = _comm_hook(rng), (slots["setup"], Ranks("called.register_comm_hook(None, reduced)"))
    return Piece("ddp", slots)


DIVIDED_AFTER = """
def reduced(state, bucket):
    def divided(f):
        return f.value()[0] / dist.get_world_size()
    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(divided)
"""
DIVIDED_BEFORE = """
def reduced(state, bucket):
    buffer = bucket.buffer().div_(dist.get_world_size())
    return dist.all_reduce(buffer, async_op=True).get_future().then(lambda f: f.value()[0])
"""
BUT_THE_LAST = """
def reduced(state, bucket):
    if not bucket.is_last():
        bucket.buffer().mul_(2)
    return dist.all_reduce(bucket.buffer().div_(2), async_op=True).get_future().then(lambda f: f.value()[0])
"""


def _comm_hook(rng: Random) -> Code:
    bad: dict[str, Code] = {
        "sum-for-average": DIVIDED_AFTER.replace(" / dist.get_world_size()", ""),
        "buckets-scaled-but-the-last": BUT_THE_LAST,
    }
    return Site(rng.choice((DIVIDED_AFTER, DIVIDED_BEFORE)), bad, gated=False)


BY_HAND = (each, each, each, scaled, flat, flat, bucket, asynchronous, hooked, scattered)
