"""The device `cuda` of a capture, against what PyTorch's sources and a GPU show. Each test runs in a process of its own."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="PyTorch is absent: captured code is not tested")

import torch
from torch.nn.functional import cross_entropy, gelu, layer_norm, linear, softmax

from trainverify.cli import run as command
from trainverify.torch import autocast
from trainverify.torch.boundary import Boundary, Watched
from trainverify.torch.cuda import Fake
from trainverify.torch.environment import _patch_conversion
from trainverify.torch.launch import Failed, run

HEADER = (Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h").read_text("utf-8")


def shown(work: Callable[[], Any], count: int = 4) -> Any:
    """What a function gives in a process with GPUs that are not there, and what is assumed of them."""

    def inside() -> Any:
        gpus, boundary = Fake(count), Boundary(lambda: None)
        gpus.install()
        gpus.joins(boundary)
        _patch_conversion()
        torch.autograd.set_multithreading_enabled(False)
        with Watched(boundary):
            return work(), boundary.assumed

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # fork
        (found,) = run([inside])
    assert not isinstance(found, Failed), found.trace
    return found


def listed(macro: str) -> set[str]:
    body = HEADER.split(f"#define {macro}(_)")[1].split("#define")[0].split("#else")[0]
    return {".".join(n.split(", ")) for n in re.findall(r"_\((\w+(?:, \w+)?)\)", body)}


def test_lists_of_autocast() -> None:
    """They are those of PyTorch's header, and these operators are all for which CUDA has a kernel."""
    assert set(autocast.LOWER) - set(autocast.CUDNN) == listed("AT_FORALL_LOWER_PRECISION_FP")
    assert set(autocast.FLOAT32) == listed("AT_FORALL_FP32")
    assert set(autocast.FLOAT32_RESULT) == listed("AT_FORALL_FP32_SET_OPT_DTYPE")
    assert set(autocast.WIDEST) == listed("AT_FORALL_PROMOTE")
    names = {n.removeprefix("aten::") for n in torch._C._dispatch_get_all_op_names() if n.startswith("aten::")}
    theirs = {n for n in names if torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{n}", "AutocastCUDA")}
    ours = {*autocast.LOWER, *autocast.FLOAT32, *autocast.FLOAT32_RESULT, *autocast.WIDEST, *autocast.NORMS, autocast.BANNED}
    assert ours == theirs


def test_devices() -> None:
    """A tensor is where the code puts it; numbers of GPUs count; tensors on two devices do not meet."""

    def work() -> Any:
        torch.cuda.set_device(1)
        x, y = torch.zeros(2, 3, device="cuda"), torch.zeros(2, 3)
        model = torch.nn.Linear(3, 5)
        weight = model.weight
        moved = model.to("cuda").weight
        with torch.cuda.device(2):
            third = torch.tensor([1.0], device="cuda").device
        with pytest.raises(RuntimeError, match="same device"):
            _ = x + y
        with pytest.raises(RuntimeError, match="invalid device ordinal"):
            torch.cuda.set_device(4)
        (model(x).sum() * 2).backward()
        return (
            [str(t.device) for t in (x, y, y.cuda(), y.to("cuda:3"), moved, x.cpu(), moved.grad)],
            (str(third), torch.cuda.current_device(), torch.cuda.device_count()),
            (x.is_cuda, y.is_cuda, x.device.type == "cuda", x.device == torch.device("cuda", 1), x.type()),
            (x.to("cuda") is x, x.cuda() is x, x.to(x.device) is x, weight is moved, isinstance(moved, torch.nn.Parameter)),
        )

    (devices, numbers, kinds, same), assumed = shown(work)
    assert devices == ["cuda:1", "cpu", "cuda:1", "cuda:3", "cuda:1", "cpu", "cuda:1"]
    assert numbers == ("cuda:2", 1, 4)
    assert kinds == (True, False, True, True, "torch.cuda.FloatTensor")
    assert all(same)
    assert assumed[0].startswith("the code runs as on GPUs")


def test_autocast() -> None:
    """Types of results, weights that are cast once in a region, and one that is changed there: the cast stays what it was."""

    def work() -> Any:
        x, w = torch.zeros(2, 3, device="cuda"), torch.nn.Parameter(torch.zeros(5, 3, device="cuda"))
        labels = torch.zeros(2, dtype=torch.int64, device="cuda")
        with torch.autocast("cuda", dtype=torch.bfloat16):
            y = linear(x, w)
            loss = cross_entropy(y, labels)
            kinds = [t.dtype for t in (y, gelu(y), layer_norm(y, (5,)), softmax(y, -1), y.norm(), y.norm(dim=1), y.sum(), x + x, loss)]
            assert torch.is_autocast_enabled()
            assert torch.get_autocast_gpu_dtype() == torch.bfloat16
            on_cpu = linear(torch.zeros(2, 3), torch.zeros(5, 3)).dtype
            double = linear(x.double(), w.double()).dtype
            with torch.autocast("cuda", enabled=False):
                kinds.append(linear(x, w).dtype)
            with pytest.raises(RuntimeError, match="unsafe to autocast"):
                torch.nn.functional.binary_cross_entropy(y.float().sigmoid(), y.float())
        with torch.cuda.amp.autocast():
            kinds.append((x @ x.T).dtype)
        torch.set_autocast_gpu_dtype(torch.float16)
        torch.set_autocast_enabled(True)
        kinds.append((x @ x.T).dtype)
        torch.set_autocast_enabled(False)
        assert not torch.is_autocast_enabled()
        loss.backward()
        return kinds, on_cpu, double, w.grad.dtype

    (kinds, on_cpu, double, of_weight), assumed = shown(work)
    low, full = torch.bfloat16, torch.float32
    assert kinds == [low, low, full, full, full, full, full, full, full, full, torch.float16, torch.float16]
    assert (on_cpu, double, of_weight) == (full, torch.float64, full)
    assert "casts are exact: autocast to bfloat16 changes no value" in assumed


def test_weights_are_cast_once() -> None:
    def work() -> Any:
        casts: list[torch.Tensor] = []
        w = torch.nn.Parameter(torch.zeros(5, 3, device="cuda"))
        kept = autocast.Casts(Fake(1))
        with torch.autocast("cuda"):
            casts = [kept.cast(w, torch.float16) for _ in range(2)]
            with torch.no_grad():
                kept.kept.clear()
                kept.cast(w, torch.float16)
            with pytest.raises(Exception, match="cast under no_grad"):
                kept.cast(w, torch.float16)
        return casts[0] is casts[1]

    assert shown(work)[0]


def test_questions() -> None:
    """What the code asks about the hardware has an answer; what has none is an error that cannot be swallowed unseen."""

    def work() -> Any:
        free, total = torch.cuda.mem_get_info()
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        end.record()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.manual_seed_all(1)
        assert not hasattr(torch.cuda, "FloatTensor")
        with pytest.raises(Exception, match="temperature needs a GPU"):
            torch.cuda.temperature()
        said = (torch.cuda.is_bf16_supported(), torch.cuda.get_device_capability(), torch.distributed.is_nccl_available(), free == total)
        return said, torch.accelerator.current_accelerator().type, torch.zeros(3).pin_memory().is_pinned(), start.elapsed_time(end)

    found, assumed = shown(work)
    assert found == ((True, (8, 0), True, True), "cuda", True, 0.0)
    assert any(a.startswith("torch.cuda.is_bf16_supported is True, as ") for a in assumed)
    assert any("several CUDA streams" in a for a in assumed)


FUNCTIONS = """
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
import trainverify.torch as tvt

batch = {"x": tvt.Reals((6, 5), "(dp b) k")}
loss = {"dp": "avg"}
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def made(wrapped):
    model = nn.Sequential(nn.Linear(5, 3), nn.Dropout(0.5), nn.Linear(3, 2)).to(device)
    called, optimizer = wrapped(model), torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch):
        assert batch["x"].is_cuda
        with torch.autocast(device.type, dtype=torch.bfloat16):
            result = called(batch["x"]).square().mean()
        result.backward()
        optimizer.step()
        optimizer.zero_grad()
        return result

    return step


def reference():
    return made(lambda model: model)


def right(rank, world):
    return made(lambda model: DistributedDataParallel(model, device_ids=[0]))


def wrong(rank, world):
    return made(lambda model: model)
"""


@pytest.mark.parametrize(("expected", "name"), [("PROVED", "right"), ("REFUTED", "wrong")])
def test_functions(expected: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Functions on GPUs, with dropout."""
    path = tmp_path / "functions.py"
    path.write_text(FUNCTIONS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # fork
        code = command(["torch", f"{path}:reference", f"{path}:{name}", "--world-size", "2", "--device", "cuda"])
    shown = capsys.readouterr().out
    assert shown.startswith(expected), shown
    assert code == {"PROVED": 0, "REFUTED": 1}[expected]
    assert "casts are exact: autocast to bfloat16 changes no value" in shown
