"""What steps take: arguments belong together by position, whatever they are called and whatever they hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("jaxlib", reason="JAX is absent: pip install 'trainverify[jax]'")

import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import jax
import trainverify.jax as tvj
from jax import lax
from trainverify.jax.trace import argument_names
from trainverify.translate.targets import CaptureError, module_of

W = tvj.Reals((3,))
X = tvj.Reals((4, 3))
SPECS: dict[str, Any] = {"in_specs": (P(), P(), P(), P(), P("dp")), "out_specs": P(), "check_vma": False}


def reference(config: Any, w: Any, first: Any, second: Any, x: Any) -> Any:
    return w, first - 0.1 * second, 0.5 * second, jnp.mean(x @ w)


def by_position(config: Any, w: Any, a: Any, b: Any, x: Any) -> Any:
    return w, a - 0.1 * b, 0.5 * b, lax.pmean(jnp.mean(x @ w), "dp")


def by_name(config: Any, w: Any, second: Any, first: Any, x: Any) -> Any:
    return w, 0.5 * second, first - 0.1 * second, lax.pmean(jnp.mean(x @ w), "dp")


@pytest.mark.parametrize("config", [{}, (), None])
@pytest.mark.parametrize(("step", "verdict"), [(by_position, "PROVED"), (by_name, "REFUTED")])
def test_an_argument_without_arrays(step: Any, verdict: str, config: Any) -> None:
    """PROVED: other names at the same places. REFUTED: the same names at other places."""
    report = tvj.verify(reference, lambda mesh: jax.shard_map(step, mesh=mesh, **SPECS), (config, W, W, W, X), {"dp": 2}, points=1)
    assert report.verdict == verdict, report.reason


def test_names_of_further_arguments() -> None:
    def step(arg1: Any, *rest: Any) -> Any:
        return arg1, *rest

    assert argument_names(step, 3) == ["arg1", "arg2", "arg3"]


@pytest.mark.parametrize("maker", [lambda mesh: mesh.devices, lambda mesh: 1 // 0, lambda mesh: None])
def test_refused_a_function_of_the_mesh_that_makes_no_step(maker: Any) -> None:
    with pytest.raises(CaptureError, match="the function of the mesh"):
        tvj.verify(reference, maker, ((), W, W, W, X), {"dp": 2})


@pytest.mark.parametrize("text", ["import nothing_there", "1 / 0", "def (", "raise SystemExit(3)"])
def test_refused_a_file_that_is_not_imported(text: str, tmp_path: Path) -> None:
    file = tmp_path / "unfit_file.py"
    file.write_text(text + "\n")
    with pytest.raises(CaptureError, match=r"unfit_file\.py cannot be imported"):
        module_of(f"{file}:step")
