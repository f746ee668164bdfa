"""Scripts as they are: the step is found by itself, or marked by one line, `with tvt.step(model, optimizer, batch):`.

In an ordinary run the line does nothing. In a process that captures, a step is everything between its start and its end, and the
script ends after the third one.
"""

from __future__ import annotations

import runpy
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from trainverify.graph.mesh import Mesh
from trainverify.ops.table import OpTable
from trainverify.torch import libraries, objects
from trainverify.torch.between import Between
from trainverify.torch.boundary import Watched
from trainverify.torch.capture import STEPS, LaterStep, Session, Ways, optimizer_hooks
from trainverify.torch.captured import Captured, Steps
from trainverify.torch.cuda import CPU, CUDA, Fake
from trainverify.torch.discover import Found, search
from trainverify.torch.environment import launched, patch, start_group
from trainverify.torch.found_step import MARK, FoundSteps, StepEnded
from trainverify.torch.inputs import Flags, Ids, Input, Reals, Spelling
from trainverify.torch.loading import LOADED
from trainverify.torch.patching import everywhere
from trainverify.translate.targets import CaptureError


@dataclass
class Running:
    """The capture under way in this process, if any."""

    session: Session | None = None
    choices: Ways = ()  # for every step
    steps: list[Captured] = field(default_factory=list)
    specs: dict[str, Input] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    scalers: list[Any] = field(default_factory=list)
    between: Between | None = None  # what the last step left
    loaded: list[list[int]] = field(default_factory=list)  # rows of data loaders, for every step
    found: FoundSteps | None = None  # of a script without `tvt.step`


RUNNING: Final = Running()


class step:  # noqa: N801 (a context manager)
    """The training step of a script.

    `batch` are its tensors by name; `cut` says how each lies on the mesh, or all of them; ids are below `below`, or `ignore`.
    `mesh` names the axes of the ranks, `cuts` and `loss` are as in `verify`. Set `loss` on the step if it is not what `backward` ran on.
    """

    def __init__(
        self,
        model: Any,
        optimizer: Any,
        batch: Mapping[str, torch.Tensor],
        *,
        cut: Spelling | Mapping[str, Spelling] | None = None,
        below: int | Mapping[str, int] | None = None,
        ignore: int | Mapping[str, int] | None = None,
        mesh: Mapping[str, int] | None = None,
        cuts: Mapping[str, Spelling] | None = None,
        loss_over: Any = "whole",
    ):
        self.model, self.optimizer, self.batch = model, optimizer, dict(batch)
        self.cut, self.below, self.ignore = cut, below, ignore
        self.settings = {"mesh": None if mesh is None else dict(mesh), "cuts": dict(cuts or {}), "loss": loss_over}
        self.loss: torch.Tensor | None = None
        self.metrics: dict[str, torch.Tensor] = {}

    def __enter__(self) -> step:
        session = RUNNING.session
        if session is None:
            return self
        if RUNNING.found is not None and RUNNING.found.now is not None:
            raise CaptureError("tvt.step begins within a step that was found: import trainverify.torch at the top of the script")
        specs = {n: self._spec(n, t) for n, t in self.batch.items()}
        if RUNNING.steps and (RUNNING.specs, RUNNING.settings) != (specs, self.settings):
            raise LaterStep(f"step {len(RUNNING.steps) + 1} has another batch, or is said to lie otherwise, than the first")
        RUNNING.specs, RUNNING.settings = specs, self.settings
        RUNNING.loaded.append(LOADED.taken())
        session.batch, found = specs, self._found()
        changes = [] if RUNNING.between is None else list(RUNNING.between.changes(found, session.rank))
        session.begin(found, self.batch, RUNNING.choices[len(RUNNING.steps)])
        session.talk.findings += changes
        self._hooks = optimizer_hooks(session)
        self._hooks.__enter__()
        self._backward = torch.Tensor.backward

        def backward(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            if self.loss is None:
                self.loss = tensor
            self._backward(tensor, *args, **kwargs)

        torch.Tensor.backward = backward
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        session = RUNNING.session
        if session is None:
            return
        torch.Tensor.backward = self._backward
        self._hooks.__exit__()
        if error is not None:
            return
        returned = {**({} if self.loss is None else {"loss": self.loss.detach()}), **self.metrics}
        RUNNING.steps.append(session.finish(returned, "step", self._found()))
        RUNNING.between = Between(session.translator, self._found())
        if len(RUNNING.steps) == len(RUNNING.choices):
            raise StepEnded

    def _found(self) -> Found:
        return search([self.model], [self.optimizer], *({f"scaler{i or ''}": s} for i, s in enumerate(RUNNING.scalers)))

    def _spec(self, name: str, t: torch.Tensor) -> Input:
        def chosen(value: Any) -> Any:
            return value.get(name) if isinstance(value, Mapping) and not isinstance(value, str) else value

        shape, dtype = tuple(t.shape), str(t.dtype).removeprefix("torch.")
        if t.dtype == torch.bool:
            return Flags(shape, chosen(self.cut))
        if t.is_floating_point():
            return Reals(shape, chosen(self.cut), dtype)
        below = chosen(self.below)
        if below is None:
            raise CaptureError(f"batch tensor {name}: say below which number its ids are (below=)")
        return Ids(shape, chosen(self.cut), below, chosen(self.ignore), dtype)


def _note_scalers() -> None:
    """Scalers that the script makes are known."""
    made = torch.amp.GradScaler.__init__

    def scaler_made(scaler: Any, *args: Any, **kwargs: Any) -> None:
        RUNNING.scalers.append(scaler)
        made(scaler, *args, **kwargs)

    torch.amp.GradScaler.__init__ = scaler_made


def _run(script: str, found: FoundSteps, count: int) -> None:
    """Until so many steps have ended. What the code does when it is stopped then, and whether that fails, does not matter."""
    objects.begin()
    try:
        runpy.run_path(script, run_name="__main__")
        found.ended()
    except StepEnded:
        pass
    except BaseException:
        if len(RUNNING.steps or found.steps) < count:
            raise


def capture_script(
    script: str,
    arguments: Sequence[str],
    rank: int,
    world: int,
    reference: bool,
    table: OpTable,
    choices: Ways = ((),) * STEPS,
    accept: bool = False,
    device: str = CPU,
    joined: Mapping[str, Any] | None = None,
    ignored: Mapping[str, int] | None = None,
) -> tuple[Steps, Any, Any]:
    """Run a script as one rank until its third step ends: the programs, what its batch holds, and what it says about the mesh.

    Of a step that is found, what was loaded is told instead; `joined` is what the reference gets in place of what it loads, and
    `ignored` the labels that are left out, where a batch of some rank has them."""
    began = time.process_time()
    torch.set_num_threads(1)
    torch.autograd.set_multithreading_enabled(False)
    session = Session({}, Mesh(one=1), None if reference else rank, table, None, accept)
    session.reader.install()
    gpus = Fake(world) if device == CUDA else None
    if gpus is not None:
        gpus.install()
    patch(session.talk, session.assumed, gpus)
    session.lines.wrappers.install()
    launched(rank, world)
    _note_scalers()

    def init(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
        start_group(session.talk, rank, world, original, asked=backend)

    original = c10d.init_process_group
    c10d.init_process_group = dist.init_process_group = init
    everywhere({id(original): init})
    handles = session.lines.hooks()
    RUNNING.session, RUNNING.choices = session, choices
    found = RUNNING.found = FoundSteps(session, choices, (step, sys.modules["trainverify.torch"]), RUNNING.scalers, joined, ignored)
    found.install()
    libraries.install(session.talk, session.translator.boundary.assume, reference, int((joined or {}).get("ranks", 1)))
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).resolve().parent))
    session.translator.stand_ins.mode = mode = Watched(session.translator.boundary)
    with mode, session.recorder:
        _run(script, found, len(choices))
    for h in handles:
        h.remove()
    steps = RUNNING.steps or found.steps
    if not steps:
        raise CaptureError(f"{script} ended without a step: {'' if found.off else f'{found.why_none()}; '}{MARK}")
    if len(steps) < len(choices):
        raise CaptureError(f"{script} ended after {len(steps)} of {len(choices)} steps: let its loop run longer")
    steps[0].seconds = time.process_time() - began
    if found.steps:
        return tuple(steps), found.specs, found.said()
    return tuple(steps), RUNNING.specs, {**RUNNING.settings, "loaded": RUNNING.loaded, "loader": LOADED.where}
