"""Models and optimizers of a step: found in what its function refers to, or given; their tensors by name."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

import torch
from torch.optim import Optimizer

from trainverify.translate.names import clean

Kind = Literal["parameter", "state"]
STEPS_TAKEN: Final = 2  # steps before the one that is captured: nothing is as in the first step
DEPTH: Final = 4


@dataclass
class Found:
    modules: dict[str, torch.nn.Module] = field(default_factory=dict)  # by the name of the variable
    optimizers: list[Optimizer] = field(default_factory=list)
    placed: dict[str, dict[str, Any]] = field(default_factory=dict)  # parameter → how it lies, if an adapter says it
    held: dict[str, dict[str, Any]] = field(default_factory=dict)  # likewise its gradient and states, where they lie in another way
    shards: list[tuple[torch.Tensor, str]] = field(default_factory=list)  # what an optimizer updates instead of a parameter, and its name
    apart: bool = False  # flat memory is followed piece by piece: all ranks cut it alike
    copies: list[Copy] = field(default_factory=list)  # other memory that holds parameters from step to step


@dataclass(frozen=True)
class Copy:
    """A flat tensor that holds a part of a parameter besides the parameter itself, or in its place.

    `parts` are [where in the tensor, start in the flattened parameter, count]; the rest is padding. With `flat`, it is a range of a tensor
    that an optimizer updates, and `start` says where it begins there."""

    name: str
    of: str
    tensor: torch.Tensor
    parts: tuple[tuple[int, int, int], ...]
    flat: torch.Tensor | None = None
    start: int = 0

    @property
    def place(self) -> dict[str, Any]:
        empty, done = [], 0
        for at, _, count in (*sorted(self.parts), (self.tensor.numel(), 0, 0)):
            if done < at:
                empty.append([done, at - done])
            done = at + count
        return {"of": self.of, "flat": [list(p) for p in self.parts], "padding": empty}

    def within(self, flat: torch.Tensor) -> torch.Tensor:
        """The same range of another tensor that lies as the optimizer's does: its gradient or state."""
        return flat[self.start : self.start + self.tensor.numel()]


@dataclass(frozen=True)
class Named:
    """A tensor that lives from step to step."""

    name: str
    tensor: torch.Tensor
    kind: Kind
    trained: bool = False
    nonnegative: bool = False
    of: str | None = None  # the parameter that a state of an optimizer belongs to
    buffer: Literal["kept", "made"] | None = None  # a buffer that a checkpoint keeps, or one that is made anew with the model


def shaped(n: Named, found: Found) -> Named:
    """A state in the shape that an adapter says it has."""
    shape = found.held.get(n.of or "", {}).get("shape")
    return n if shape is None else replace(n, tensor=n.tensor.view(shape))


def kept(found: Found) -> tuple[list[Named], dict[int, str]]:
    """Everything that lives from step to step, and the names of what optimizers update."""
    copied = {c.of for c in found.copies}
    named = [n for n in tensors_of(found.modules) if n.tensor.numel() or n.name not in copied]
    trained = {n.name for n in tensors_of(found.modules) if n.trained}
    named += [Named(c.name, c.tensor, "parameter" if c.of in trained else "state", c.of in trained) for c in found.copies]
    names = {id(n.tensor): n.name for n in named} | {id(t): n for t, n in found.shards}
    for optimizer in found.optimizers:
        named += [shaped(n, found) for n in preset(optimizer, lambda p: names.get(id(p)), flat_copies(found))]
    return named, names


def flat_copies(found: Found) -> dict[int, list[Copy]]:
    """By what an optimizer updates, the ranges of it."""
    by_flat: dict[int, list[Copy]] = {}
    for c in found.copies:
        if c.flat is not None:
            by_flat.setdefault(id(c.flat), []).append(c)
    return by_flat


def search(*roots: Any) -> Found:
    """All modules and optimizers that objects refer to: closures, globals that a function names, attributes, containers."""
    found = Found()
    seen: set[int] = set()

    def look(name: str, value: Any, depth: int) -> None:
        if id(value) in seen or depth > DEPTH:
            return
        seen.add(id(value))
        if isinstance(value, torch.nn.Module):
            again = sum(n == name or n.startswith(f"{name}#") for n in found.modules)  # stages of a pipeline are all called alike
            found.modules[f"{name}#{again}" if again else name] = value
        elif isinstance(value, Optimizer):
            found.optimizers.append(value)
            inner = getattr(value, "optim", None)
            if isinstance(inner, Optimizer):
                seen.add(id(inner))
        elif isinstance(value, functools.partial):
            for i, v in enumerate((value.func, *value.args, *value.keywords.values())):
                look(f"{name}{i}", v, depth + 1)
        elif isinstance(value, types.MethodType):
            look("self", value.__self__, depth + 1)
            look(name, value.__func__, depth + 1)
        elif isinstance(value, types.FunctionType):
            for n, v in referred(value):
                look(n, v, depth + 1)
        elif isinstance(value, dict):
            for k, v in value.items():
                look(str(k), v, depth + 1)
        elif isinstance(value, list | tuple):
            for i, v in enumerate(value):
                look(f"{name}{i}", v, depth + 1)
        elif not isinstance(value, type | types.ModuleType | torch.Tensor) and hasattr(value, "__dict__"):
            for n, v in vars(value).items():
                look(n, v, depth + 1)

    for i, r in enumerate(roots):
        look(str(i), r, 0)
    inner = {id(m) for root in found.modules.values() for m in list(root.modules())[1:]}
    found.modules = {n: m for n, m in found.modules.items() if id(m) not in inner}
    return found


def referred(fn: types.FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:
            continue
    for name in fn.__code__.co_names:
        if name in fn.__globals__ and not isinstance(fn.__globals__[name], types.ModuleType | type):
            yield name, fn.__globals__[name]


def tensors_of(modules: dict[str, torch.nn.Module]) -> Iterator[Named]:
    """Parameters and buffers. With several modules of which two have a name in common, names begin with the variable's."""
    names = [[clean(n) for n, _ in (*m.named_parameters(), *m.named_buffers())] for m in modules.values()]
    twice = len({n for ns in names for n in ns}) < sum(map(len, names))
    seen: set[int] = set()
    for variable, module in modules.items():
        prefix = f"{variable}." if twice else ""
        for n, p in module.named_parameters():
            if id(p) not in seen:
                seen.add(id(p))
                yield Named(prefix + clean(n), p, "parameter" if p.requires_grad else "state", p.requires_grad)
        made = {f"{m}.{b}" if m else b for m, inner in module.named_modules() for b in inner._non_persistent_buffers_set}
        for n, b in module.named_buffers():
            if id(b) not in seen:
                seen.add(id(b))
                yield Named(prefix + clean(n), b, "state", buffer="made" if n in made else "kept")


def preset(
    optimizer: Optimizer, names: Callable[[torch.Tensor], str | None], copies: Mapping[int, Sequence[Copy]] = types.MappingProxyType({})
) -> Iterator[Named]:
    """State as after some steps, so that none has to be run: its tensors by name."""
    inner = getattr(optimizer, "optim", None)
    if isinstance(inner, Optimizer):  # ZeroRedundancyOptimizer
        yield from preset(inner, names, copies)
        return
    kind = type(optimizer).__name__
    for group in optimizer.param_groups:
        for p in group["params"]:
            if not p.requires_grad:
                continue
            name = names(p)
            ranges = copies.get(id(p), ())
            if name is None and not ranges:
                raise NotSupported(f"{kind} updates a tensor of shape {list(p.shape)} that belongs to no model of the step")
            state = optimizer.state[p]
            for slot, nonnegative in _slots(kind, group):
                if slot not in state:
                    state[slot] = torch.zeros_like(p, memory_format=torch.preserve_format)
                if name is not None and not ranges:
                    yield Named(f"{name}.{slot}", state[slot], "state", nonnegative=nonnegative, of=name)
                for c in ranges:
                    yield Named(f"{c.of}.{slot}", c.within(state[slot]), "state", nonnegative=nonnegative, of=c.name)
            if kind in ("Adam", "AdamW", "NAdam", "RAdam") and "step" not in state:
                state["step"] = torch.tensor(float(STEPS_TAKEN), dtype=torch.float32)


def counted(optimizer: Optimizer, names: Mapping[int, str], copies: Mapping[int, Sequence[Copy]]) -> Iterator[tuple[str, torch.Tensor]]:
    """The number of steps that an optimizer has taken, by parameter."""
    inner = getattr(optimizer, "optim", None)
    owner = inner if isinstance(inner, Optimizer) else optimizer
    for p, state in owner.state.items():
        if isinstance(state.get("step"), torch.Tensor):
            found = [c.of for c in copies.get(id(p), ())] or ([names[id(p)]] if id(p) in names else [])
            for name in found:
                yield f"{name}.step", state["step"]


class NotSupported(Exception):
    """Something that cannot be captured, in the user's terms."""


def _slots(kind: str, group: dict[str, Any]) -> list[tuple[str, bool]]:
    """Tensors that an optimizer keeps for a parameter, and whether they are never negative."""
    if kind in ("Adam", "AdamW"):
        return [("exp_avg", False), ("exp_avg_sq", True)] + ([("max_exp_avg_sq", True)] if group.get("amsgrad") else [])
    if kind == "SGD":
        return [("momentum_buffer", False)] if group.get("momentum") else []
    raise NotSupported(f"optimizer {kind}: what it keeps from step to step is not known here")
