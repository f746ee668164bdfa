"""What a step does besides computing: calls of Python, memory that it gives away, questions about devices."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("jaxlib", reason="JAX is absent: pip install 'trainverify[jax]'")

import jax.numpy as jnp
from jax.experimental import io_callback
from jax.extend.backend import get_backend
from jax.sharding import PartitionSpec as P

import jax
import trainverify.jax as tvj
from jax import devices, lax, local_devices, process_count
from trainverify.jax.command import subject
from trainverify.jax.judge import judge
from trainverify.ops import OPS
from trainverify.report import Report

ARGS = (tvj.Reals((3,)), tvj.Reals((4, 3)))
KEPT: list[Any] = []


def loss(w: Any, x: Any) -> Any:
    return jnp.mean((x @ w) ** 2)


def reference(w: Any, x: Any) -> Any:
    value, grads = jax.value_and_grad(loss)(w, x)
    return w - 0.1 * grads, value


def checked(step: Callable[[Any, Any, Any], Any]) -> Report:
    """The distributed step gets the mean gradient, computed by shard_map, and makes the new weights of it."""

    def made(mesh: Any) -> Any:
        def local(w: Any, x: Any) -> Any:
            value, grads = jax.value_and_grad(loss)(w, x)
            return lax.pmean(grads, "dp"), lax.pmean(value, "dp")

        mapped = jax.shard_map(local, mesh=mesh, in_specs=(P(), P("dp")), out_specs=(P(), P()), check_vma=False)

        def whole(w: Any, x: Any) -> Any:
            grads, value = mapped(w, x)
            return step(w, grads, value)

        return whole

    return tvj.verify(reference, made, ARGS, {"dp": 2}, points=1)


# -- calls of Python ------------------------------------------------------------------------------------------------------


def keep(value: Any) -> None:
    KEPT.append(value)


def kept(value: Any) -> Any:
    KEPT.append(value)
    return value


CALLS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "print": (lambda v: jax.debug.print("loss {}", v), "PROVED"),
    "debug": (lambda v: jax.debug.callback(keep, v), "UNKNOWN"),
    "io": (lambda v: io_callback(keep, None, v), "UNKNOWN"),
    "io with a result": (lambda v: io_callback(kept, jax.ShapeDtypeStruct((), jnp.float32), v), "UNKNOWN"),
    "pure": (lambda v: jax.pure_callback(kept, jax.ShapeDtypeStruct((), jnp.float32), v), "UNKNOWN"),
    "debug in a branch": (lambda v: lax.cond(v > 0, lambda: jax.debug.callback(keep, v), lambda: None), "UNKNOWN"),
}


@pytest.mark.parametrize("call", CALLS)
def test_calls_of_python(call: str) -> None:
    """What they return is not used. They may still change what the step reads in Python."""
    run, verdict = CALLS[call]

    def step(w: Any, grads: Any, value: Any) -> Any:
        run(value)
        return w - 0.1 * grads, value

    report = checked(step)
    assert report.verdict == verdict, report.reason
    if verdict == "UNKNOWN":
        assert "calls a function of Python" in report.reason


# -- memory ---------------------------------------------------------------------------------------------------------------

UPDATE = jax.jit(lambda w, g: w - 0.1 * g, donate_argnums=0)
SCALED = jax.jit(lambda g, n: n * g, donate_argnums=0)


def right(w: Any, grads: Any, value: Any) -> Any:
    return UPDATE(w, grads), value


def returned(w: Any, grads: Any, value: Any) -> Any:
    return w - 0.1 * grads, value + 0 * UPDATE(w, grads)[0] + 0 * w[0]


def twice(w: Any, grads: Any, value: Any) -> Any:
    half = SCALED(grads, 0.5)
    return w - 0.1 * (half + 0.5 * grads), value


def at_once(w: Any, grads: Any, value: Any) -> Any:
    return w - 0.1 * (grads + UPDATE(grads, grads) - 0.9 * grads), value


def another_name(w: Any, grads: Any, value: Any) -> Any:
    other = jax.device_put(grads)
    half = SCALED(grads, 0.5)
    return w - 0.1 * (half + 0.5 * other), value


def in_a_checkpoint(w: Any, grads: Any, value: Any) -> Any:
    half = jax.checkpoint(lambda g: SCALED(g, 0.5))(grads)
    return w - 0.1 * (half + 0.5 * grads), value


DONATED = {
    "right": (right, "PROVED"),
    "compiled as a whole": (jax.jit(twice), "PROVED"),
    "read by the result": (returned, "UNKNOWN"),
    "read twice": (twice, "UNKNOWN"),
    "the same operand twice": (at_once, "UNKNOWN"),
    "another name": (another_name, "UNKNOWN"),
    "in a checkpoint": (in_a_checkpoint, "UNKNOWN"),
}


@pytest.mark.parametrize("name", DONATED)
def test_reads_after_donation(name: str) -> None:
    step, verdict = DONATED[name]
    report = checked(step)
    assert report.verdict == verdict, report.reason
    if verdict == "UNKNOWN":
        assert "donated" in report.reason


# -- devices --------------------------------------------------------------------------------------------------------------

HERE = jax.device_count()  # of tests: 8

ASKED: dict[str, Callable[[], int]] = {
    "device_count": lambda: jax.device_count(),
    "devices": lambda: len(jax.devices()),
    "local_device_count": lambda: jax.local_device_count(),
    "local_devices": lambda: len(jax.local_devices()),
    "devices by name": lambda: len(devices()),
    "local_devices by name": lambda: len(local_devices()),
    "get_backend": lambda: int(get_backend().device_count()),
}


def meaning_over(ranks: int, count: Callable[[], int]) -> Report:
    """The mean over the ranks as the sum by the number of devices."""

    def made(mesh: Any) -> Any:
        def local(w: Any, x: Any) -> Any:
            value, grads = jax.value_and_grad(loss)(w, x)
            return w - 0.1 * lax.psum(grads, "dp") / count(), lax.pmean(value, "dp")

        return jax.shard_map(local, mesh=mesh, in_specs=(P(), P("dp")), out_specs=(P(), P()), check_vma=False)

    args = (tvj.Reals((3,)), tvj.Reals((2 * HERE, 3)))
    return tvj.verify(reference, made, args, {"dp": ranks}, points=1)


@pytest.mark.parametrize("name", ASKED)
@pytest.mark.parametrize(("ranks", "verdict"), [(HERE, "PROVED"), (2, "UNKNOWN")])
def test_numbers_of_devices(name: str, ranks: int, verdict: str) -> None:
    """The run has as many as the mesh; where there are others here the factor is another."""
    local_devices()  # remembered
    report = meaning_over(ranks, ASKED[name])
    assert report.verdict == verdict, report.reason
    if verdict == "PROVED":
        assert any("the answer of this process" in a for a in report.assumptions)
    else:
        assert "devices here" in report.reason
        assert "test_effects.py" in str(report.findings[0].source)


def test_that_seems_right_with_the_devices_of_this_process() -> None:
    """Too many devices, and a factor that makes up for that here: not in the run."""
    assert meaning_over(2, lambda: jax.device_count() * 2 // HERE).verdict == "UNKNOWN"


@pytest.mark.parametrize("ask", [jax.process_index, jax.process_count, process_count, jax.default_backend])
def test_processes(ask: Callable[[], Any]) -> None:
    """Only one process is an assumption."""

    def step(w: Any, grads: Any, value: Any) -> Any:
        assert ask() in (0, 1, "cpu")
        return w - 0.1 * grads, value

    report = checked(step)
    assert report.verdict == "PROVED", report.reason
    assert any(a.startswith("a run gets the answer of this process") for a in report.assumptions)


def test_what_jax_asks_itself_is_no_assumption() -> None:
    report = checked(right)
    assert not any("this process" in a for a in report.assumptions)


@pytest.mark.parametrize(("ranks", "verdict"), [(HERE, "PROVED"), (2, "UNKNOWN")])
def test_a_file_that_asks(ranks: int, verdict: str, tmp_path: Path) -> None:
    """The command reads files: what these ask before there is a step counts as well."""
    folder = tmp_path / f"of{ranks}"
    folder.mkdir()
    (folder / f"asking{ranks}.py").write_text(FILE.format(ranks=ranks, rows=HERE))
    path = str(folder / f"asking{ranks}.py")
    made = subject(f"{path}:reference", f"{path}:ranks", None, OPS, lambda text: None)
    report = judge(made.made, points=1)
    assert report.verdict == verdict, report.reason


FILE = """
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

COUNT = jax.device_count()
mesh = {{"dp": {ranks}}}
args = (jax.ShapeDtypeStruct((3,), jnp.float32), jax.ShapeDtypeStruct(({rows}, 3), jnp.float32))


def reference(w, x):
    return w, jnp.mean(x @ w)


def local(w, x):
    return w, jax.lax.psum(jnp.mean(x @ w), "dp") / COUNT


def ranks(mesh):
    return jax.shard_map(local, mesh=mesh, in_specs=(P(), P("dp")), out_specs=(P(), P()), check_vma=False)
"""
