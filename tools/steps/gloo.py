"""The truth about a program: both ranks run it with gloo in float64, beside the reference, on the same data.

Two processes stay and run one program after the other. What the step returns, every parameter, every buffer, optimizer state and
what the program keeps beside them is compared after each step."""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tools.step_campaigns.files import loaded
from tools.step_campaigns.outcomes import MORE, PATIENCE, STEPS, TOLERANCE, Truth
from tools.steps.programs import Program

Kept = dict[str, np.ndarray[Any, Any]]


def _data(module: ModuleType, step: int, rank: int, world: int) -> dict[str, torch.Tensor]:
    """The batch of a step; a rank has its rows."""
    drawn = torch.Generator().manual_seed(1000 + step)
    found: dict[str, torch.Tensor] = {}
    for name, declared in module.batch.items():
        if "Ids" in type(declared).__name__:
            value = torch.randint(0, declared.below, declared.shape, generator=drawn)
            if declared.ignore is not None:
                ignored = torch.rand(declared.shape, generator=drawn) < 0.3
                ignored[0] = ignored[-1] = False  # both ranks have a row that counts
                value[ignored] = declared.ignore
        else:
            value = torch.randn(declared.shape, generator=drawn, dtype=torch.float64)
        found[name] = value.chunk(world)[rank].clone() if "dp" in module.mesh and world > 1 else value
    return found


def _kept(model: Any, optimizer: Any, extra: Any) -> Kept:
    found: dict[str, Any] = {f"parameter {name}": p for name, p in model.named_parameters(remove_duplicate=False)}
    found |= {f"buffer {name}": b for name, b in model.named_buffers(remove_duplicate=False)}
    inner = getattr(optimizer, "optim", optimizer)
    names = {id(p): name for name, p in model.named_parameters()}
    for p, slots in inner.state.items() if inner is not None else ():
        if id(p) in names:
            found |= {f"state {names[id(p)]}.{slot}": value for slot, value in slots.items() if value is not None}
    found |= {f"extra {name}": value for name, value in extra().items()}
    found |= {f"gradient {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: _array(value) for name, value in found.items()}


def _array(value: Any) -> np.ndarray[Any, Any]:
    return np.array(torch.as_tensor(value).detach().to(torch.float64).numpy())


def _run(path: Path, rank: int, world: int, steps: int) -> Iterator[Kept]:
    """What is there after each step."""
    with loaded(path, f"steps_of_{world}_{rank}") as module:
        step, *kept = module.parts(rank, world)
        for at in range(steps):
            result = step(_data(module, at, rank, world))
            results = result if isinstance(result, dict) else {"loss": result}
            yield {f"result {name}": _array(value) for name, value in results.items()} | _kept(*kept)


def _own(name: str, value: np.ndarray[Any, Any], cuts: Mapping[str, str] | None, rank: int, world: int) -> np.ndarray[Any, Any]:
    """A rank's part of a value of the reference."""
    for pattern, cut in (cuts or {}).items():
        if pattern.strip("*") in name and value.ndim:
            return np.split(value, world, 1 if cut.index("(") else 0)[rank]
    return value


def _differs(got: Kept, want: Kept, cuts: Mapping[str, str] | None, rank: int, world: int) -> str:
    for name, value in want.items():
        if name not in got:
            if name.startswith(("state ", "extra ")):
                continue
            return f"{name} is not on rank {rank}"
        own = _own(name, value, cuts, rank, world)
        if own.shape != got[name].shape:
            return f"{name} has another shape on rank {rank}"
        worst = float(np.abs(own - got[name]).max()) if own.size else 0.0
        if not worst <= TOLERANCE * max(1.0, float(np.abs(own).max()) if own.size else 1.0):
            return f"{name} differs on rank {rank} by {worst:.1e}"
    if further := [name for name in got if name not in want]:
        return f"{further[0]} is on rank {rank} only"
    return ""


def _combined(kept: list[Kept], averaged: bool) -> list[Kept]:
    """Losses that ranks report of their own rows, combined as declared."""
    loss = {"result loss": np.mean([part["result loss"] for part in kept], axis=0)}
    return [part | loss for part in kept] if averaged else kept


def _compared(path: Path, ranks: list[list[Kept]], ones: list[Kept]) -> Truth:
    with loaded(path, "steps_declared") as module:
        averaged, cuts = isinstance(module.loss, dict), module.cuts
    gradients = False
    for at, want in enumerate(ones):
        results, slopes = _split(want)
        parts = _combined([kept[at] for kept in ranks], averaged)
        for rank, part in enumerate(parts):
            got, left = _split(part)
            if what := _differs(got, results, cuts, rank, len(ranks)):
                return Truth(at + 1, what)
            gradients |= bool(_differs({name: left[name] for name in slopes if name in left}, slopes, cuts, rank, len(ranks)))
        if missing := [name for name in results if not any(name in got for got in parts)]:
            return Truth(at + 1, f"{missing[0]} is on no rank")
    return Truth(gradients=gradients)


def _split(kept: Kept) -> tuple[Kept, Kept]:
    """Results of a step, and the gradients that it leaves behind."""
    left = {name: value for name, value in kept.items() if name.startswith("gradient ")}
    return {name: value for name, value in kept.items() if name not in left}, left


def _serve(rank: int, store: str, orders: Connection) -> None:
    """A rank's process: runs the program of each order, and says what it kept."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    warnings.simplefilter("ignore")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # C++ warns too
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=PATIENCE))
    while (order := orders.recv()) is not None:
        path, steps, world = order
        noise = io.StringIO()
        try:
            with contextlib.redirect_stdout(noise), contextlib.redirect_stderr(noise):
                kept = list(_run(path, rank if world > 1 else 0, world, steps))
            orders.send((kept, ""))
        except Exception as error:
            orders.send((None, f"{type(error).__name__}: {error}"[:300]))
    dist.destroy_process_group()


class Pair:
    """Two rank processes, started anew after a program that raised or hung."""

    def __init__(self) -> None:
        self.processes: list[Any] = []
        self.orders: list[Connection] = []
        self.folder = tempfile.TemporaryDirectory()

    def start(self) -> None:
        context = mp.get_context("spawn")
        store = os.path.join(self.folder.name, f"store{time.monotonic_ns()}")
        for rank in range(2):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, store, theirs), daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self.orders.append(ours)

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        self.processes, self.orders = [], []

    def _answers(self, ranks: list[int], path: Path, steps: int, world: int, seconds: float) -> tuple[list[list[Kept]], str]:
        """What the ranks kept, or why there is no answer. Ranks that raise the same are ready for another program."""
        for rank in ranks:
            self.orders[rank].send((path, steps, world))
        end, found, errors = time.monotonic() + seconds, dict[int, list[Kept]](), dict[int, str]()
        while len(found) + len(errors) < len(ranks):
            if errors:
                end = min(end, time.monotonic() + 10)
            ready = wait(
                [self.orders[rank] for rank in ranks if rank not in found and rank not in errors], max(0.0, end - time.monotonic())
            )
            if not ready:
                self.stop()
                return [], next(iter(errors.values()), "a hang")
            for rank in ranks:
                if self.orders[rank] in ready:
                    try:
                        kept, error = self.orders[rank].recv()
                    except (EOFError, OSError):
                        self.stop()
                        return [], "a process ended"
                    (errors if error else found)[rank] = error or kept
        if errors and len(set(errors.values())) + len(found) > 1:
            self.stop()
        return [found[rank] for rank in ranks if rank in found], next(iter(errors.values()), "")

    def truth(self, path: Path, steps: int = STEPS) -> Truth:
        if not self.processes:
            self.start()
        ones, error = self._answers([0], path, steps, 1, PATIENCE)
        if error:
            return Truth(error=f"reference: {error}")
        ranks, error = self._answers([0, 1], path, steps, 2, PATIENCE)
        if error:
            return Truth(error=f"ranks: {error}")
        if not all(np.isfinite(value).all() for kept in ones[0] for value in kept.values()):
            return Truth(error="the reference is not finite")
        return _compared(path, ranks, ones[0])


def truth(pair: Pair, program: Program, path: Path) -> Truth:
    """Right if all three steps agree; a program with a mistake that these do not show runs for more of them."""
    found = pair.truth(path)
    if found.right and program.planted is not None:
        return pair.truth(path, STEPS + MORE)
    return found
