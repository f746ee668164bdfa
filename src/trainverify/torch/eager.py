"""One process, one rank: run the user's code for real, on given values, and bring back what it computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from trainverify.torch.discover import Copy, Found, Named, flat_copies, kept, search
from trainverify.torch.environment import launched
from trainverify.torch.inputs import Batch
from trainverify.torch.lines import Lines
from trainverify.torch.placed import local
from trainverify.torch.private import TorchDispatchMode
from trainverify.translate.emit import mask_name

Arrays = Mapping[str, np.ndarray[Any, Any]]
Outputs = dict[tuple[str, str | None], np.ndarray[Any, Any]]  # (role, of) → value


def run_eagerly(
    build: Callable[..., Any], batch: Batch, values: Arrays, rank: int | None, world: int, store: str, names: Sequence[str]
) -> Outputs:
    """The outputs of one step on real tensors; ranks talk by gloo through the file `store`."""
    torch.set_num_threads(1)
    launched(rank, world)
    torch.manual_seed(1)
    if rank is not None:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    step = build() if rank is None else build(rank, world)
    inputs = {n: torch.from_numpy(np.array(values[n])).to(getattr(torch, s.dtype)) for n, s in batch.items()}
    return run_step(step, inputs, values, names)


def run_step(step: Any, inputs: Mapping[str, torch.Tensor], values: Arrays, names: Sequence[str]) -> Outputs:
    """The outputs of a step that is built, from given values of its parameters and state."""
    said = getattr(step, "found", None)  # an adapter says where the parameters are
    found = said if isinstance(said, Found) else search(step)
    named, by_tensor = kept(found)
    _set(named, values)
    made: Outputs = {}
    grads: dict[str, torch.Tensor] = {}
    handle = _note_gradients(by_tensor, flat_copies(found), grads)
    lines = Lines()
    for module in found.modules.values():
        lines.name_modules(module)
    handles = [handle, *lines.hooks()]
    with Masks(lines, values):
        returned = step(dict(inputs))
    for h in handles:
        h.remove()
    for key, value in (returned if isinstance(returned, Mapping) else {"loss": returned}).items():
        if isinstance(value, torch.Tensor | float | int):  # a number was read of a tensor
            made["loss" if key == "loss" else "metric", None if key == "loss" else str(key)] = _array(torch.as_tensor(value))
    wanted = set(names)
    shapes = {n: place["shape"] for n, place in found.held.items() if "shape" in place}
    for n in kept(said if isinstance(said, Found) else search(step))[0]:  # what has the names now
        if n.name in wanted:
            made[n.kind, n.name] = _array(n.tensor)
            grad = grads.get(n.name, None if n.tensor.grad is None else local(n.tensor.grad))
            if grad is not None:
                made["gradient", n.name] = _array(grad.view(shapes.get(n.name, grad.shape)))
    return made


class Masks(TorchDispatchMode):
    """Dropout draws the masks that it is given."""

    def __init__(self, lines: Lines, values: Arrays):
        super().__init__()
        self.lines, self.values, self.drawn = lines, values, list[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.bernoulli_.float:
            name = mask_name(self.lines.here().module, args[1], self.drawn)
            if name in self.values:
                self.drawn.append(name)
                return args[0].copy_(torch.from_numpy(np.array(self.values[name])))
        return func(*args, **(kwargs or {}))


def _set(named: Sequence[Named], values: Arrays) -> None:
    with torch.no_grad():
        given = [n for n in named if n.name in values]
        copies = [(local(h.tensor), local(n.tensor)) for h in named if h.by_hand for n in given if _equal(h.tensor, n.tensor)]
        for n in given:
            here = local(n.tensor)
            here.copy_(torch.from_numpy(np.array(values[n.name])).to(here.dtype))
        for copy, of in copies:  # what is kept by hand starts as what it was copied from
            copy.copy_(of)


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    one, other = local(one), local(other)
    return one is not other and one.shape == other.shape and one.dtype == other.dtype and bool(torch.equal(one, other))


def _note_gradients(names: Mapping[int, str], copies: Mapping[int, Sequence[Copy]], into: dict[str, torch.Tensor]) -> Any:
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    def before(optimizer: Any, args: Any, kwargs: Any) -> None:
        inner = getattr(optimizer, "optim", None) or optimizer
        for group in inner.param_groups:
            for p in group["params"]:
                if id(p) in names and p.grad is not None:
                    into.setdefault(names[id(p)], local(p.grad).detach().clone())
                for c in copies.get(id(p), ()):
                    if p.grad is not None:
                        into.setdefault(c.name, c.within(p.grad).detach().clone())

    return register_optimizer_step_pre_hook(before)


def _array(t: torch.Tensor) -> np.ndarray[Any, Any]:
    here = local(t.detach())
    return np.array((here.to(torch.float64) if here.is_floating_point() else here).numpy())
