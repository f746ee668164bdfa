"""Nothing that a step does stays unseen: what the capture cannot follow gives no verdict."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is absent: captured code is not tested")

import torch.distributed as dist  # noqa: E402
from torch.utils._python_dispatch import _disable_current_modes  # noqa: E402

import trainverify.torch as tvt  # noqa: E402
from capture.stepping import BATCH, Ending, double, report  # noqa: E402

KEPT: list[Any] = []  # libraries: what they register lives as long as they do


def doubled(folder: Path, name: str) -> Ending:
    """The function of a file with this name that doubles a gradient."""
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("def ending(model):\n    model.bias.grad.mul_(2)\n")
    spec = importlib.util.spec_from_file_location("doubling", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    ending: Ending = module.ending
    return ending


@pytest.mark.parametrize(
    "name",
    [
        "my_decompositions.py",
        "distributed/tensor/_sharding_prop.py",
        "distributed/device_mesh.py",
        "torch/autograd/graph.py",
        "trainverify/fake_tensor.py",
        "typing_extensions.py",
    ],
)
def test_a_users_file_may_have_any_name(tmp_path: Path, name: str) -> None:
    """REFUTED where only ranks double a gradient; PROVED where the reference does so too."""
    ending = doubled(tmp_path, name)
    found = report(ending)
    assert found.verdict == "REFUTED", found.reason
    assert report(ending, ending).verdict == "PROVED"


def in_a_thread(work: Ending) -> Ending:
    def ending(model: Any) -> None:
        thread = threading.Thread(target=work, args=(model,))
        thread.start()
        thread.join()

    return ending


def in_a_pool(work: Ending) -> Ending:
    pool: list[ThreadPoolExecutor] = []  # started by the first step

    def ending(model: Any) -> None:
        pool.extend([] if pool else [ThreadPoolExecutor(1)])
        pool[0].submit(work, model).result()

    return ending


def without_modes(work: Ending) -> Ending:
    def ending(model: Any) -> None:
        with _disable_current_modes():
            work(model)

    return ending


def double_data(model: Any) -> None:
    model.bias.grad.data.mul_(2)


def reduced(model: Any) -> None:
    dist.all_reduce(model.bias.grad)


def looks(model: Any) -> None:
    assert model.bias.grad.shape == (3,)
    assert not model.bias.grad.detach().is_sparse


@pytest.mark.parametrize("where", [in_a_thread, in_a_pool, without_modes])
@pytest.mark.parametrize("work", [double, double_data])
def test_ops_elsewhere(where: Callable[[Ending], Ending], work: Ending) -> None:
    """UNKNOWN, with the line."""
    found = report(where(work))
    assert found.verdict == "UNKNOWN", found.reason
    assert "where the capture does not see it" in found.reason
    assert "stepping.py:" in found.reason or "test_unseen.py:" in found.reason


@pytest.mark.parametrize("where", [in_a_thread, in_a_pool])
def test_communication_elsewhere(where: Callable[[Ending], Ending]) -> None:
    """UNKNOWN: its order is the threads' affair."""
    found = report(where(reduced))
    assert found.verdict == "UNKNOWN", found.reason
    assert "another thread communicates" in found.reason


@pytest.mark.parametrize("where", [in_a_thread, in_a_pool, without_modes])
def test_looking_elsewhere(where: Callable[[Ending], Ending]) -> None:
    """PROVED: nothing is written."""
    found = report(where(looks))
    assert found.verdict == "PROVED", found.reason


def shared(convert: Callable[[Any], Any], changed: bool) -> Ending:
    """A factor in memory of NumPy's, which the second step changes."""
    factor = np.ones(3, dtype=np.float32)
    kept: list[Any] = []

    def ending(model: Any) -> None:
        kept.append(kept[0] if kept else convert(factor))
        model.bias.grad.mul_(kept[0])
        if changed and len(kept) == 2:
            factor[0] = 2

    return ending


@pytest.mark.parametrize("convert", [torch.from_numpy, torch.as_tensor, lambda a: torch.frombuffer(a, dtype=torch.float32)])
def test_memory_of_numpy(convert: Callable[[Any], Any]) -> None:
    """UNKNOWN where the array changes, PROVED where it does not."""
    assert report(shared(convert, False)).verdict == "PROVED"
    found = report(shared(convert, True))
    assert found.verdict == "UNKNOWN", found.reason
    assert "NumPy" in found.reason


def test_a_write_that_numpy_sees() -> None:
    """UNKNOWN: Python reads what an op wrote."""

    def ending(model: Any) -> None:
        array = np.ones(3, dtype=np.float32)
        torch.from_numpy(array).mul_(2)
        if array[0] == 2:
            double(model)

    found = report(ending)
    assert found.verdict == "UNKNOWN", found.reason


@pytest.mark.parametrize(("op", "verdict"), [("tanh", "UNKNOWN"), ("erf", "PROVED")])
def test_a_kernel_of_the_codes_own(op: str, verdict: str) -> None:
    """UNKNOWN where a step calls an operator of PyTorch's that the code gives another kernel, which fake tensors do not run."""

    def ending(model: Any) -> None:
        library = torch.library.Library("aten", "IMPL")
        library.impl(op, lambda x: x * 0.5, "CPU")
        KEPT.append(library)
        model.bias.grad = model.bias.grad.tanh()

    found = report(ending, lambda model: setattr(model.bias, "grad", model.bias.grad.tanh()))
    assert found.verdict == verdict, found.reason
    assert verdict == "PROVED" or "a kernel of its own" in found.reason


LATE = [0]  # steps that have begun


def looked_up(weight: Any, indices: Any, *args: Any) -> Any:
    """An embedding that is another one in the third step."""
    return weight.index_select(0, indices) * (0.5 if LATE[0] == 3 else 1.0)


@pytest.mark.parametrize(("own", "verdict"), [(False, "PROVED"), (True, "UNKNOWN")], ids=["pytorchs_kernel", "a_kernel_for_all_devices"])
def test_kernels_for_all_devices(own: bool, verdict: str) -> None:
    """UNKNOWN where the code gives an operator a kernel for all devices (`CompositeExplicitAutograd`), which may change later."""

    def ending(model: Any) -> None:
        if own and not LATE[0]:
            library = torch.library.Library("aten", "IMPL")
            library.impl("embedding", looked_up, "CompositeExplicitAutograd")
            KEPT.append(library)
        LATE[0] += 1
        model.bias.grad = torch.embedding(model.weight.grad, torch.arange(3)).sum(1)

    found = report(ending, lambda model: setattr(model.bias, "grad", model.weight.grad.sum(1)))
    assert found.verdict == verdict, found.reason
    assert verdict == "PROVED" or "a kernel of its own" in found.reason


def by_hooks(world: int, own: bool) -> Any:
    """Every parameter has an optimizer of its own, which steps in the backward pass and which only hooks refer to."""
    model = torch.nn.Linear(4, 3)
    if not own:
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        optimizers = {}
    else:
        optimizers = {p: torch.optim.Adam([p], lr=0.1) for p in model.parameters()}

    def hook(p: Any) -> None:
        if world > 1:
            dist.all_reduce(p.grad, op=dist.ReduceOp.AVG)
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in optimizers:
        p.register_post_accumulate_grad_hook(hook)

    def step(batch: Any) -> Any:
        loss = model(batch["x"]).square().mean()
        loss.backward()
        if not own:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    return step


def test_optimizers_that_nothing_leads_to() -> None:
    """UNKNOWN: their state is compared with nothing. It is not missing."""
    found = tvt.verify(lambda: by_hooks(1, False), lambda r, w: by_hooks(w, True), 2, BATCH, {"dp": 2}, loss={"dp": "avg"}, points=1)
    assert found.verdict == "UNKNOWN", found.reason
    assert "an optimizer that nothing in the step's function leads to updates" in found.reason
