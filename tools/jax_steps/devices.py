"""The truth about a program: JAX runs it on host devices in float64, beside the reference, on the same data.

One process stays and runs one program after the other. What every device holds of every result is compared after each step."""

from __future__ import annotations

import contextlib
import io
import multiprocessing as mp
import os
import warnings
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import numpy as np

from tools.step_campaigns.files import loaded
from tools.step_campaigns.outcomes import MORE, PATIENCE, STEPS, TOLERANCE, Truth

DEVICES: Final = 4
Array = np.ndarray[Any, Any]
Shares = dict[str, list[tuple[Any, Array]]]  # by result: which part of the whole a device has, and its content


def host_devices() -> None:
    """For this process and those that it starts; before JAX looks for devices."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    quick = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"  # most of the time is compilation
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={DEVICES} {quick}"


def _drawn(declared: Any, rng: np.random.Generator, step: int) -> Array:
    """A value of a declared argument."""
    kind, dtype = type(declared).__name__, np.dtype(declared.dtype)
    if kind == "Count":
        return np.full(declared.shape, step, dtype)
    if kind == "Ids":
        return np.asarray(rng.integers(0, declared.below, declared.shape), dtype)
    if dtype.kind == "b":
        return np.asarray(rng.random(declared.shape) < 0.7)
    if dtype.kind in "iu":
        return np.zeros(declared.shape, dtype)
    value = np.asarray(rng.standard_normal(declared.shape))
    return np.abs(value) if getattr(declared, "nonnegative", False) else value


def _batch(module: ModuleType, step: int) -> list[Any]:
    """The arguments of a step; those that the step before returned are drawn for the first one only."""
    import jax

    rng = np.random.default_rng(1000 + step)
    found = []
    for at, declared in enumerate(module.args):
        scale = 0.6 if at in module.new else 1.0
        leaves, tree = jax.tree.flatten(declared)
        values = [_drawn(leaf, rng, step) for leaf in leaves]
        values = [value * scale if value.dtype.kind == "f" else value for value in values]
        found.append(jax.tree.unflatten(tree, values))
    if hasattr(module, "initial") and step == 0:
        found[1] = jax.tree.map(np.asarray, module.initial(found[0]))
    return found


def _named(result: Any) -> dict[str, Any]:
    import jax

    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(result)[0]}


def _shares(result: Any) -> Shares:
    return {name: [(s.index, np.array(s.data)) for s in leaf.addressable_shards] for name, leaf in _named(result).items()}


def _run(module: ModuleType, function: Any, steps: int) -> Iterator[tuple[Shares, dict[str, tuple[int, ...]]]]:
    """What devices hold of the results of each step, and the shapes of these."""
    result: Any = None
    for step in range(steps):
        given = _batch(module, step)
        for at, key in module.new.items() if step else ():
            given[at] = result[key]
        result = function(*given)
        yield _shares(result), {name: tuple(leaf.shape) for name, leaf in _named(result).items()}


def _functions(module: ModuleType) -> tuple[Any, Any]:
    from jax.sharding import AxisType, Mesh

    import jax

    sizes = tuple(module.mesh.values())
    devices = np.array(jax.devices()[: int(np.prod(sizes))]).reshape(sizes)
    mesh = Mesh(devices, tuple(module.mesh), axis_types=(AxisType.Auto,) * len(sizes))
    return jax.jit(module.reference), module.distributed(mesh)


def _compared(module: ModuleType, steps: int) -> Truth:
    one, many = _functions(module)
    try:
        wanted = [{name: shares[0][1] for name, shares in found.items()} for found, _ in _run(module, one, steps)]
    except Exception as error:
        return Truth(error=f"reference: {type(error).__name__}: {error}"[:300])
    if not all(np.isfinite(value).all() for kept in wanted for value in kept.values()):
        return Truth(error="the reference is not finite")
    at = 0
    try:
        for at, (found, shapes) in enumerate(_run(module, many, steps)):
            if what := _differs(found, shapes, wanted[at]):
                return Truth(at + 1, what)
    except Exception as error:
        return Truth(error=f"ranks, step {at + 1}: {type(error).__name__}: {error}"[:300])
    return Truth()


def _differs(found: Shares, shapes: Mapping[str, tuple[int, ...]], wanted: Mapping[str, Array]) -> str:
    if found.keys() != wanted.keys():
        return f"results {sorted(found.keys() ^ wanted.keys())}"
    for name, value in wanted.items():
        if shapes[name] != value.shape:
            return f"{name} has another shape"
        for device, (index, got) in enumerate(found[name]):
            own = value[index].astype(np.float64)
            worst = float(np.abs(own - got).max()) if own.size else 0.0
            if not worst <= TOLERANCE * max(1.0, float(np.abs(own).max()) if own.size else 1.0):
                return f"{name} differs on device {device} by {worst:.1e}"
    return ""


def _serve(orders: Connection) -> None:
    """The process: runs the program of each order, and says whether it is right."""
    warnings.simplefilter("ignore")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # XLA warns too
    import jax

    jax.config.update("jax_enable_x64", True)
    while (order := orders.recv()) is not None:
        path, steps = order
        noise = io.StringIO()
        try:
            with contextlib.redirect_stdout(noise), contextlib.redirect_stderr(noise), loaded(path, f"run_{path.stem}") as module:
                found = _compared(module, steps)
        except Exception as error:
            found = Truth(error=f"{type(error).__name__}: {error}"[:300])
        jax.clear_caches()
        orders.send(found)


class Runner:
    """A process that runs programs, started anew after one that hung or ended it."""

    def __init__(self) -> None:
        self.process: Any = None
        self.orders: Any = None

    def start(self) -> None:
        context = mp.get_context("spawn")
        self.orders, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.join()
        self.process = None

    def truth(self, path: Path, steps: int = STEPS) -> Truth:
        if self.process is None:
            self.start()
        self.orders.send((path, steps))
        try:
            if self.orders.poll(PATIENCE):
                found: Truth = self.orders.recv()
                return found
            error = "a hang"
        except (EOFError, OSError):
            error = "the process ended"
        self.stop()
        return Truth(error=error)


def truth(runner: Runner, path: Path, planted: bool) -> Truth:
    """Right if all three steps agree; a program with a mistake that these do not show runs for more of them."""
    found = runner.truth(path)
    return runner.truth(path, STEPS + MORE) if found.right and planted else found
