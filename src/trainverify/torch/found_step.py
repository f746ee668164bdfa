"""The training step of a script that does not mark it: what runs from one batch of a data loader to the next, if an optimizer stepped.

Batches that are followed by a backward pass and not by an optimizer's step are micro-batches of one step. Batches that are loaded for an
evaluation (no gradients, models that do not train, another loader than the training's) belong to no step, and end the one that is open.
Whatever else a script does is ambiguous, and refused.
"""

from __future__ import annotations

import functools
import hashlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Final

import torch
from torch.utils.data import DataLoader

from trainverify.torch.capture import LaterStep, Session, Ways, optimizer_hooks
from trainverify.torch.captured import Captured
from trainverify.torch.discover import Found, kept, owner_of, search
from trainverify.torch.inputs import Flags, Ids, Input, Reals
from trainverify.torch.lines import is_users, user_frame
from trainverify.torch.loading import LOADED, mapped, on_yield
from trainverify.torch.objects import alive
from trainverify.torch.placed import local
from trainverify.torch.private import FakeTensor, _disable_current_modes
from trainverify.torch.reading import Number
from trainverify.translate.targets import CaptureError

MARK: Final = "put `with tvt.step(model, optimizer, batch):` around the step (docs/torch.md)"
UNTRAINED: Final = "the batch at {} is followed by another one without a backward pass between them: what a step is, is ambiguous; {}"
UNLIKE: Final = "{}: the loader yields {}, which is not followed; {}"
PLACES: Final = 2  # the domain of ids whose range is not known yet

Shapes = Sequence[Sequence[Mapping[str, Sequence[int]]]]  # of every tensor, for every batch of every step
Loads = list[list[dict[str, Any]]]  # what is known of every batch of every step


class StepEnded(BaseException):
    """All steps were captured: the rest of the script does not matter."""


@dataclass
class UnderWay:
    """A step that has begun."""

    hooks: optimizer_hooks
    batches: list[dict[str, Any]] = field(default_factory=list)  # what is known of them
    optimized: int = 0  # optimizers' steps
    passes: int = 0  # backward passes
    untrained: bool = False  # no backward pass since the last batch
    several: str = ""  # the line of a batch that another one came before without a backward pass between them
    loss: torch.Tensor | None = None


class FoundSteps:
    """The steps of this process as its loaders and optimizers tell them."""

    def __init__(
        self,
        session: Session,
        ways: Ways,
        marks: Sequence[object],
        scalers: Sequence[Any],
        joined: Mapping[str, Any] | None,
        ignored: Mapping[str, int] | None,
    ):
        """`marks` are objects by which a script that refers to them marks its step itself; `joined` is what the reference is given
        in place of its own batches: shapes, the lengths of loaders, and where they end."""
        self.session, self.ways, self.marks, self.scalers, self.joined = session, ways, marks, scalers, joined
        self.ignored: Mapping[str, int] = ignored or {}  # labels that are left out, by tensor, where other batches have them
        self.steps: list[Captured] = []
        self.loads: Loads = []
        self.lines: list[str] = []  # the line that trains on batches, and then those of other loaders
        self.specs: dict[str, Input] = {}
        self.off = False
        self.loaded = set(sys.modules)  # before the script began
        self.now: UnderWay | None = None
        self.versions: dict[str, tuple[int, int]] = {}  # of what the step left behind
        self.count, self.ends = 0, list[int]()  # batches that were trained on, and after how many of them the loader began anew
        self.loaders: list[DataLoader[Any]] = []

    def install(self) -> None:
        """For the rest of this process."""
        from torch.optim.optimizer import register_optimizer_step_post_hook

        on_yield(self._yielded, self._over)
        backward, made, length = torch.autograd.backward, DataLoader.__init__, DataLoader.__len__

        def passed(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
            self._passed(tensors, grad_tensors)
            backward(tensors, grad_tensors, *args, **kwargs)

        def stepped(optimizer: Any, args: Any, kwargs: Any) -> None:
            if self.now is not None:
                self.now.optimized += 1

        @functools.wraps(made)  # libraries look at its parameters
        def numbered(loader: Any, *args: Any, **kwargs: Any) -> None:
            self.loaders.append(loader)
            made(loader, *args, **kwargs)

        def counted(loader: Any) -> int:
            known = (self.joined or {}).get("lengths", [])
            number = next((i for i, one in enumerate(self.loaders) if one is loader), len(known))
            return int(known[number]) if number < len(known) and known[number] is not None else length(loader)

        torch.autograd.backward = passed
        DataLoader.__init__, DataLoader.__len__ = numbered, counted
        register_optimizer_step_post_hook(stepped)

    # -- what happens -----------------------------------------------------------------------------------------------------

    def _yielded(self, data: Any) -> Any:
        """A loader is about to give a batch to the script."""
        self.off = self.off or self._marked(sys._getframe(1))
        if self.off:
            return data
        line = str(user_frame(sys._getframe(1))[0])
        self.ended()
        if not self._trains(line):
            return data
        if self.now is not None and self.now.untrained:
            self.now.several = line
        self.lines = self.lines or [line]
        loaded, tensors = self._named(data, line)
        known = loaded["tensors"]
        place = self._place()
        if self.now is None:
            self.now = self._begin(tensors, known)
        else:
            self._describe(tensors, known)
            self.session.given(tensors)
        self.now.batches.append(loaded)
        self.now.untrained = True
        self.count += 1
        return data if self.joined is None else mapped(data, lambda path, t: tensors[named(path, place)])

    def _over(self, ends: bool) -> bool:
        """Whether the training's loader has no more batches: in the reference, where those of ranks have none."""
        if self.off or not self.lines or str(user_frame(sys._getframe(1))[0]) != self.lines[0] or not self._trains(self.lines[0]):
            return False
        if ends:
            self.ends.append(self.count)
            self.ended()
        return self.joined is not None and self.count in self.joined["ends"] and self.count not in self.ends

    def _passed(self, tensors: Any, grad_tensors: Any) -> None:
        """A backward pass begins."""
        if (now := self.now) is None:
            return
        now.passes += 1
        now.untrained = False
        loss = tensors[0] if isinstance(tensors, list | tuple) and len(tensors) == 1 else tensors
        if isinstance(loss, torch.Tensor) and loss.numel() == 1 and grad_tensors is None:
            now.loss = loss.detach() if now.loss is None else now.loss + loss.detach()

    def ended(self) -> None:
        """A step that is under way ends here, if an optimizer stepped."""
        if self.now is not None and self.now.optimized:
            self._close(self.now)

    def why_none(self) -> str:
        """What a script without a step lacks."""
        if not self.lines:
            return "no DataLoader of PyTorch gave it a batch"
        return (
            "no backward pass followed a batch"
            if self.now is None or not self.now.passes
            else "no optimizer's step followed the backward pass"
        )

    # -- steps ------------------------------------------------------------------------------------------------------------

    def _begin(self, tensors: Mapping[str, torch.Tensor], known: Mapping[str, Any]) -> UnderWay:
        self.session.batch = {}
        self._describe(tensors, known)
        found = self._found()
        now = versions(found)
        if (changed := next((n for n, v in self.versions.items() if now.get(n, v) != v), None)) is not None:
            raise LaterStep(f"{changed} changes after one step and before the next: {MARK}")
        self.session.begin(found, tensors, self.ways[len(self.steps)])
        hooks = optimizer_hooks(self.session)
        hooks.__enter__()
        return UnderWay(hooks)

    def _close(self, now: UnderWay) -> None:
        now.hooks.__exit__()
        self.now = None
        if now.several and now.passes < len(now.batches):  # else they are micro-batches that were loaded together
            raise CaptureError(UNTRAINED.format(now.several, MARK))
        specs = dict(self.session.batch)
        if self.steps and specs != self.specs:
            raise LaterStep(f"step {len(self.steps) + 1} has other batches than the first, in their number or shapes")
        self.specs = specs
        if self.joined is not None and len(now.batches) != len(self.joined["shapes"][len(self.steps)]):
            raise CaptureError(self._other_count(len(now.batches)))
        self.loads.append(now.batches)
        found = self._found()
        self.steps.append(self.session.finish({} if now.loss is None else {"loss": now.loss}, "step", found))
        self.versions = versions(found)
        if len(self.steps) == len(self.ways):
            raise StepEnded

    def _other_count(self, count: int) -> str:
        assert self.joined is not None
        wanted = len(self.joined["shapes"][len(self.steps)])
        text = f"alone the script takes {count} batches in a step, and {wanted} on ranks"
        return f"{text}: say with --reference-args how it takes as many; or {MARK}"

    def said(self) -> dict[str, Any]:
        """What the other processes need to know, as plain data."""
        lengths: list[int | None] = []
        for loader in self.loaders:
            try:
                lengths.append(len(loader))
            except TypeError:  # of a data set that has no length
                lengths.append(None)
        return {"loads": self.loads, "line": self.lines[0], "lengths": lengths, "ends": self.ends}

    # -- batches ----------------------------------------------------------------------------------------------------------

    def _marked(self, frame: FrameType | None) -> bool:
        """Whether code of the user's refers to the context manager for steps."""
        loaded = [m for n, m in list(sys.modules.items()) if n not in self.loaded or n == "__main__"]
        spaces = [vars(m) for m in loaded if is_users(getattr(m, "__file__", None) or "<")]
        while frame is not None:
            if is_users(frame.f_code.co_filename):
                spaces.append(frame.f_globals)
            frame = frame.f_back
        return any(v is m for space in spaces for v in list(space.values()) for m in self.marks)

    def _trains(self, line: str) -> bool:
        """Whether a batch that is loaded here is trained on."""
        models, optimizers = models_there()
        trained = {id(p) for o in optimizers for g in owner_of(o).param_groups for p in g["params"]}
        parts = [part for m in models for part in m.modules()]  # one that wraps others may say something else than they
        training = any(part.training for part in parts if any(id(p) in trained for p in part.parameters(recurse=False)))
        return torch.is_grad_enabled() and training and line in (self.lines or [line])

    def _place(self) -> int:
        """How many batches the step has had."""
        return 0 if self.now is None else len(self.now.batches)

    def _named(self, data: Any, line: str) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """What is known of a batch, and its tensors by name: in the reference, those of all ranks in place of its own."""
        place = self._place()
        real: dict[tuple[str, ...], torch.Tensor] = {}
        tensors: dict[str, torch.Tensor] = {}

        def seen(path: tuple[str, ...], t: torch.Tensor) -> torch.Tensor:
            real[path] = t
            return t

        mapped(LOADED.data, seen)
        known: dict[str, Any] = {}

        def noted(path: tuple[str, ...], t: torch.Tensor) -> torch.Tensor:
            name = named(path, place)
            tensors[name] = t if self.joined is None else self._joined(name, t, place)
            known[name] = described(t, real[path], len(LOADED.batch) if LOADED.batch is not None else None)
            return t

        rest = [type(v).__name__ for v in mapped_rest(mapped(data, noted))]
        if rest or not tensors:
            raise CaptureError(UNLIKE.format(line, f"a {rest[0]}" if rest else "no tensor", MARK))
        return {"rows": LOADED.batch, "tensors": known}, tensors

    def _joined(self, name: str, t: torch.Tensor, place: int) -> torch.Tensor:
        assert self.joined is not None
        batches = self.joined["shapes"][len(self.steps)]
        if place >= len(batches):
            raise CaptureError(self._other_count(place + 1))
        shape = batches[place].get(name)
        if shape is None or len(shape) != t.ndim:
            raise CaptureError(f"alone the script loads {name} of {list(t.shape)}, and ranks do not: {MARK}")
        return torch.empty(tuple(shape), dtype=t.dtype, device=t.device)

    def _describe(self, tensors: Mapping[str, torch.Tensor], known: Mapping[str, Any]) -> None:
        """Add tensors to the batch of the step. The range of ids, and how ranks share a tensor, follow when all ranks are there."""
        more: dict[str, Input] = {}
        for name, t in tensors.items():
            shape, dtype = tuple(t.shape), str(t.dtype).removeprefix("torch.")
            if t.dtype == torch.bool:
                more[name] = Flags(shape, None)
            elif t.is_floating_point():
                more[name] = Reals(shape, None, dtype)
            else:
                below = known.get(name, {}).get("below_zero", [])
                more[name] = Ids(shape, None, PLACES, self.ignored.get(name, min(below, default=None)), dtype)
        self.session.batch = {**self.session.batch, **more}

    def _found(self) -> Found:
        models, optimizers = models_there()
        scalers = {f"scaler{i or ''}": s for i, s in enumerate(self.scalers)}
        return search(dict(labelled(models)), optimizers, scalers, counters(sys._getframe(1)))


def counters(frame: FrameType | None) -> dict[str, Any]:
    """Numbers that functions of the script, and of the libraries that it calls, keep in variables and attributes: by function and name."""
    found: dict[str, Any] = {}
    while frame is not None:
        if is_users(frame.f_code.co_filename):
            held = {**_attributes(frame.f_locals.get("self")), **frame.f_locals}
            found = {f"{frame.f_code.co_name}.{n}": v for n, v in held.items() if _is_number(v)} | found
        frame = frame.f_back
    return found


def _attributes(value: Any) -> dict[str, Any]:
    """Of an object that is no model: those of a model are found otherwise."""
    return {} if isinstance(value, torch.nn.Module) else {f"self.{n}": v for n, v in getattr(value, "__dict__", {}).items()}


def _is_number(value: Any) -> bool:
    """Whether it is one number that is computed."""
    return type(value) is Number or (type(value) in (torch.Tensor, FakeTensor) and value.numel() == 1 and not value.requires_grad)


def named(path: tuple[str, ...], place: int) -> str:
    """The name of a tensor in a batch, which is not the first of its step if it has a place."""
    name = ".".join(path) if path and not path[0].isdigit() else ".".join(("batch", *path))
    return f"{name}.micro{place + 1}" if place else name


def described(t: torch.Tensor, real: torch.Tensor, rows: int | None) -> dict[str, Any]:
    """The shape of a batch's tensor and, if it has values, what tells its rows apart: all that ranks are compared by."""
    found: dict[str, Any] = {"shape": list(t.shape), "dtype": str(t.dtype), "rows": None, "low": None, "high": None, "below_zero": []}
    if isinstance(real, FakeTensor) or not t.ndim:
        return found
    with _disable_current_modes():
        plain = real.detach().cpu().contiguous()
        whole = plain.view(plain.shape[0], -1) if plain.numel() else plain.reshape(plain.shape[0], 0)
        raw = whole.view(torch.uint8).numpy() if whole.numel() else whole.to(torch.uint8).numpy()
        found["rows"] = [hashlib.blake2b(row.tobytes(), digest_size=8).hexdigest() for row in raw]
        if plain.numel() and not plain.is_floating_point() and not plain.is_complex() and plain.dtype != torch.bool:
            found["low"], found["high"] = int(plain.min()), int(plain.max())
            found["below_zero"] = [int(v) for v in plain[plain < 0].unique()[:2]]
    return found


def mapped_rest(data: Any) -> Iterator[Any]:
    """What a batch holds besides tensors, names and nothing: numbers would be constants here, and others in every step."""
    if isinstance(data, Mapping):
        for v in data.values():
            yield from mapped_rest(v)
    elif isinstance(data, list | tuple):
        for v in data:
            yield from mapped_rest(v)
    elif not isinstance(data, torch.Tensor | str | bytes | None):
        yield data


def versions(found: Found) -> dict[str, tuple[int, int]]:
    """The memory of parameters and states, and how often it was written."""
    here = {n.name: local(n.tensor) for n in kept(found)[0]}
    return {name: (int(t.untyped_storage()._cdata), t._version) for name, t in here.items()}


def models_there() -> tuple[list[torch.nn.Module], list[torch.optim.Optimizer]]:
    """Models that hold tensors and are no part of others, those that an optimizer trains first and in its order; and optimizers."""
    objects = alive()
    modules = [o for o in objects if issubclass(type(o), torch.nn.Module)]
    optimizers = [o for o in objects if issubclass(type(o), torch.optim.Optimizer)]
    within = {id(owner_of(o)) for o in optimizers if owner_of(o) is not o}
    inner = {id(c) for m in modules for c in vars(m).get("_modules", {}).values()}
    outer = [m for m in modules if id(m) not in inner and "_parameters" in vars(m) and any(True for _ in (*m.parameters(), *m.buffers()))]
    optimizers = [o for o in optimizers if id(o) not in within]
    order = [id(p) for o in optimizers for g in owner_of(o).param_groups for p in g["params"]]
    place = {p: i for i, p in reversed(list(enumerate(order)))}
    first = {id(m): min((place.get(id(p), len(order)) for p in m.parameters()), default=len(order)) for m in outer}
    return sorted(outer, key=lambda m: first[id(m)]), optimizers


def labelled(models: Sequence[torch.nn.Module]) -> Iterator[tuple[str, torch.nn.Module]]:
    """Models by their class, whatever wraps them on ranks."""
    counts: dict[str, int] = {}
    for m in models:
        inner = m.module if isinstance(getattr(m, "module", None), torch.nn.Module) else m
        name = next((k.__name__ for k in type(inner).__mro__ if not k.__name__.startswith("FSDP")), "model")
        counts[name] = counts.get(name, 0) + 1
        yield name if counts[name] == 1 else f"{name}#{counts[name]}", m


__all__ = ["FoundSteps", "Loads", "StepEnded"]
