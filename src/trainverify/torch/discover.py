"""Models and optimizers of a step: found in what its function refers to, or given; their tensors by name."""

from __future__ import annotations

import collections
import functools
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

import torch
import torch.distributed as dist
from torch.optim import Adam, AdamW, Optimizer

from trainverify.torch.frames import is_ours, torchs
from trainverify.torch.placed import local
from trainverify.translate.names import clean

Kind = Literal["parameter", "state"]
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
    by_hand: dict[str, torch.Tensor] = field(default_factory=dict)  # other tensors that the step's function refers to, by their path


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
    slot: bool = False  # state of an optimizer
    by_hand: bool = False  # in a variable, a container or an attribute

    @property
    def counts(self) -> bool:
        """Whether it is followed as a number where it follows from constants."""
        if self.by_hand:
            return False
        return (self.slot and self.tensor.numel() == 1) or (self.buffer is not None and not self.tensor.is_floating_point())


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
    named += kept_by_hand(found, named)
    names = {id(n.tensor): n.name for n in named} | {id(t): n for t, n in found.shards}
    copies = flat_copies(found)
    for optimizer in found.optimizers:
        named += [shaped(n, found) for n in states_of(optimizer, names, copies)]
    return named, names


def kept_by_hand(found: Found, named: Sequence[Named]) -> Iterator[Named]:
    """Tensors in variables, containers and attributes that have memory of their own."""
    others = [t for o in found.optimizers for state in owner_of(o).state.values() if isinstance(state, dict) for t in state.values()]
    others += [n.tensor for n in named]
    others += [t.grad for t in (*others, *found.by_hand.values()) if isinstance(t, torch.Tensor) and t.grad is not None]
    taken = {_storage(t) for t in others if isinstance(t, torch.Tensor)}
    names = {n.name for n in named}
    for name, t in found.by_hand.items():
        if t.layout == torch.strided and _storage(t) not in taken and t.numel() and not t.is_complex():
            taken.add(_storage(t))
            trained = t.requires_grad and t.is_leaf
            yield Named(f"{name} by hand" if name in names else name, t, "parameter" if trained else "state", trained, by_hand=True)


def _storage(t: torch.Tensor) -> int:
    return int(local(t).untyped_storage()._cdata)


def flat_copies(found: Found) -> dict[int, list[Copy]]:
    """By what an optimizer updates, the ranges of it."""
    by_flat: dict[int, list[Copy]] = {}
    for c in found.copies:
        if c.flat is not None:
            by_flat.setdefault(id(c.flat), []).append(c)
    return by_flat


def search(*roots: Any) -> Found:
    """All modules, optimizers and tensors that objects refer to: closures, globals that a function names, attributes, containers."""
    found = Search()
    for i, r in enumerate(roots):
        found.look((str(i),), r, 0)
    walked: set[int] = set()
    while more := [m for m in found.outermost().values() if id(m) not in walked]:
        for module in more:  # a plain list that it holds may have others, of which it does not know
            walked.add(id(module))
            found.attributes(module)
    return found.made


Path = tuple[str, ...]  # names of variables, attributes and keys that lead to an object


class Search:
    """A walk over what objects refer to."""

    def __init__(self) -> None:
        self.made = Found()
        self.seen: set[int] = set()
        self.tensors: set[int] = set()

    def look(self, path: Path, value: Any, depth: int) -> None:
        if isinstance(value, torch.Tensor):
            self._tensor(path, value)
        if id(value) in self.seen or depth > DEPTH or isinstance(value, torch.Tensor | types.ModuleType):
            return
        self.seen.add(id(value))
        if type(value).__module__.startswith("trainverify.") and isinstance(getattr(value, "_tensor", None), torch.Tensor):
            self._tensor(path, value._tensor)  # a number that Python holds
        elif isinstance(value, torch.nn.Module):
            name, modules = "".join(path[-2:]) if path[-1].isdigit() else path[-1], self.made.modules
            again = sum(n == name or n.startswith(f"{name}#") for n in modules)  # stages of a pipeline are all called alike
            modules[f"{name}#{again}" if again else name] = value
        elif isinstance(value, Optimizer):
            self._optimizer(path, value, depth)
        else:
            for more, inner in self._parts(path, value):
                self.look(more, inner, depth + 1)

    def _parts(self, path: Path, value: Any) -> Iterator[tuple[Path, Any]]:
        if isinstance(value, functools.partial):
            yield from (((*path, str(i)), v) for i, v in enumerate((value.func, *value.args, *value.keywords.values())))
        elif isinstance(value, types.MethodType):
            yield ("self",), value.__self__
            yield path, value.__func__
        elif isinstance(value, types.FunctionType):
            yield from (((n,), v) for n, v in referred(value))
        elif isinstance(value, dict):
            yield from (((*path, str(k if isinstance(k, str | int) else i)), v) for i, (k, v) in enumerate(value.items()))
        elif isinstance(value, list | tuple | collections.deque):
            yield from (((*path, str(i)), v) for i, v in enumerate(value))
        elif isinstance(value, type):
            held = vars(value).items() if _is_users(value) else ()
            yield from (((*path, n), v) for n, v in held if isinstance(v, torch.Tensor | dict | list | tuple | collections.deque))
        elif hasattr(value, "__dict__") and not isinstance(value, dist.ProcessGroup | dist.Work):  # those lead to the capture's own memory
            yield from (((n,) if path == ("self",) else (*path, n), v) for n, v in vars(value).items())

    def _optimizer(self, path: Path, optimizer: Optimizer, depth: int) -> None:
        """What an optimizer holds besides the tensors of its state: attributes of a user's class, and containers in slots."""
        self.made.optimizers.append(optimizer)
        inner = getattr(optimizer, "optim", None)
        if isinstance(inner, Optimizer):
            self.seen.add(id(inner))
        if _is_users(type(optimizer)):
            for n, v in vars(optimizer).items():
                if n not in _OPTIMIZERS:
                    self.look((*path, n), v, depth + 1)
        for i, state in enumerate(optimizer.state.values()):
            for slot, v in state.items() if isinstance(state, dict) else ():
                if not isinstance(v, torch.Tensor):
                    self.look((*path, str(i), str(slot)), v, depth + 1)

    def outermost(self) -> dict[str, torch.nn.Module]:
        """Modules that are no part of others. Wrappers of a part (`DDP(model.body)`) come last: what has that part gives the names."""
        inside = {n: {id(m) for m in root.modules()} - {id(root)} for n, root in self.made.modules.items()}
        inner = set[int]().union(*inside.values())
        roots = {n: m for n, m in self.made.modules.items() if id(m) not in inner}

        def wraps(n: str) -> bool:
            own = torchs_wrapper(roots[n])
            return any(inside[n] < inside[o] or (own and inside[n] == inside[o] and not torchs_wrapper(roots[o])) for o in roots)

        self.made.modules = {n: roots[n] for n in sorted(roots, key=lambda n: bool(inside[n]) and wraps(n))}
        return self.made.modules

    def attributes(self, root: torch.nn.Module) -> None:
        """What modules of the user's hold as plain attributes."""
        for name, module in root.named_modules():
            for n, v in vars(module).items() if _is_users(type(module)) else ():
                if n not in _MODULES:
                    self.look((*(p for p in (clean(name),) if p), n), v, 1)

    def _tensor(self, path: Path, t: torch.Tensor) -> None:
        name, held = ".".join(path), self.made.by_hand
        if id(t) not in self.tensors:
            self.tensors.add(id(t))
            held[f"{name}#{sum(n.startswith(f'{name}#') for n in held) + 1}" if name in held else name] = t


def torchs_wrapper(module: torch.nn.Module) -> bool:
    """Whether a module is a wrapper of PyTorch's, of which names of tensors say nothing."""
    return isinstance(module, torch.nn.parallel.DistributedDataParallel) or type(module).__module__.startswith("torch._dynamo")


def _is_users(kind: type) -> bool:
    """Whether a class is the user's: it may hold anything."""
    return kind.__module__.partition(".")[0] not in ("torch", "builtins", "trainverify") and not kind.__module__.startswith("collections")


_MODULES: Final = frozenset(vars(torch.nn.Module()))
_OPTIMIZERS: Final = frozenset(vars(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])))


def referred(fn: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Variables of a function, and of those that are written inside it."""
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:
            continue
    waiting, names = [fn.__code__], dict[str, None]()
    while waiting:
        code = waiting.pop()
        names |= dict.fromkeys(code.co_names)
        waiting += [c for c in code.co_consts if isinstance(c, types.CodeType)]
    for name in names:
        if name in fn.__globals__ and not isinstance(fn.__globals__[name], types.ModuleType):
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


def owner_of(optimizer: Optimizer) -> Optimizer:
    """The optimizer that holds the state: ZeroRedundancyOptimizer has another one inside."""
    inner = getattr(optimizer, "optim", None)
    return inner if isinstance(inner, Optimizer) else optimizer


def states_of(optimizer: Optimizer, names: Mapping[int, str], copies: Mapping[int, Sequence[Copy]]) -> Iterator[Named]:
    """Every tensor that an optimizer keeps for a parameter with a name, but for counts of steps."""
    owner = owner_of(optimizer)
    for p, state in owner.state.items():
        name, ranges = names.get(id(p)), copies.get(id(p), ())
        for slot, value in state.items() if isinstance(state, dict) else ():
            if not isinstance(value, torch.Tensor) or (slot == "step" and value.numel() == 1):
                continue
            squares = type(owner) in (Adam, AdamW) and slot in ("exp_avg_sq", "max_exp_avg_sq")
            if name is not None and not ranges:
                yield Named(f"{name}.{slot}", value, "state", nonnegative=squares, of=name, slot=True)
            for c in ranges:
                yield Named(f"{c.of}.{slot}", c.within(value), "state", nonnegative=squares, of=c.name, slot=True)


def counted(optimizer: Optimizer, names: Mapping[int, str], copies: Mapping[int, Sequence[Copy]]) -> Iterator[tuple[str, torch.Tensor]]:
    """The number of steps that an optimizer has taken, by parameter."""
    for p, state in owner_of(optimizer).state.items():
        count = state.get("step") if isinstance(state, dict) else None
        if isinstance(count, torch.Tensor) and count.numel() == 1:
            found = [c.of for c in copies.get(id(p), ())] or ([names[id(p)]] if id(p) in names else [])
            for name in found:
                yield f"{name}.step", count


def structure(found: Found, last: bool) -> dict[str, object]:
    """What decides, besides values, what a step does: modes, hooks, what trains, and optimizers. What the last step that is captured makes
    of their options does not show in another one, and counts too."""
    _, names = kept(found)
    made: dict[str, object] = {}
    several: dict[str, list[object]] = {}  # what modules of one name have: two models may have parts that are called alike
    for module in found.modules.values():
        for n, m in module.named_modules():
            name = clean(n) or "the model"
            several.setdefault(f"training of {name}", []).append(m.training)
            several.setdefault(f"hooks of {name}", []).append(_hooks(m))
    made |= {name: values if any(v != values[0] for v in values) else values[0] for name, values in several.items()}
    for n in tensors_of(found.modules):
        if n.buffer is None:
            made[f"requires_grad of {n.name}"] = n.tensor.requires_grad
            made[f"hooks of {n.name}"] = _hooks(n.tensor)
    for optimizer in found.optimizers:
        owner = owner_of(optimizer)
        hooks = _hooks(owner)
        for group in owner.param_groups:
            options = {k: _option(v) for k, v in group.items() if last and k != "params"}
            for name in (names[id(p)] for p in group["params"] if id(p) in names):
                made |= {f"{k} of {name}": v for k, v in options.items()}
                made |= {f"an optimizer of {name}": True, f"hooks of the optimizer of {name}": hooks}
    return made


def _hooks(owner: object) -> list[str]:
    """Hooks that are not PyTorch's: its own wrappers come and go with the first step."""
    there = [v for n, v in sorted(vars(owner).items()) if "hook" in n and isinstance(v, Mapping)]
    if isinstance(owner, torch.Tensor):
        there += [h for h in (owner._backward_hooks, getattr(owner, "_post_accumulate_grad_hooks", None)) if h is not None]
    return [str(getattr(h, "__qualname__", type(h).__qualname__)) for hooks in there for h in hooks.values() if not _is_torchs(h)]


def _is_torchs(hook: Any) -> bool:
    if isinstance(hook, functools.partial):
        return _is_torchs(hook.func)
    code = getattr(hook, "__code__", None) or getattr(type(hook).__call__, "__code__", None)
    return code is not None and (torchs(code.co_filename) is not None or is_ours(code.co_filename))


def _option(value: Any) -> str:
    """An option of an optimizer, as text; of anything but numbers and names only what it is."""
    plain = value is None or isinstance(value, bool | int | float | str | tuple | list)
    return repr(value) if plain else f"a tensor {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__qualname__


class NotSupported(Exception):
    """Something that cannot be captured, in the user's terms."""
