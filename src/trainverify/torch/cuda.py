"""GPUs that are not there: device `cuda` is one that is written in Python (PyTorch's PrivateUse1), by the name of CUDA.

From then on `torch.device("cuda")` names that device, for Python and for PyTorch's C++ alike: fake tensors are on it, devices must match,
autograd runs on it, and autocast has a dispatch key for it (`autocast.py`). The functions of `torch.cuda` answer here. What they say of
the hardware is an assumption of the verdict, with the line that asked.
"""

from __future__ import annotations

import gc
import inspect
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType, FunctionType, SimpleNamespace
from typing import Any, Final

import torch
import torch.distributed as dist

from trainverify.torch import autocast, gpu_kernels
from trainverify.torch.boundary import Boundary
from trainverify.torch.chance import CLOCK, by_user
from trainverify.torch.discover import NotSupported
from trainverify.torch.patching import everywhere
from trainverify.torch.private import DeviceContext, FakeTensor, FakeTensorMode, TorchDispatchMode, _device_constructors, tensor_random

CPU: Final = "cpu"
CUDA: Final = "cuda"
RUNS: Final = "the code runs as on GPUs, device cuda, one for every rank: kernels, memory and the network are not verified"
ASKED: Final = "{} is {!r}, as {} asks"
OFF: Final = '{}("cuda") is switched off where there is no GPU: capture the code as on GPUs, with --device cuda'
HINT: Final = "--device cuda"
STREAMS: Final = "work on several CUDA streams runs in the order of the code, {}: a wait that is missing is not found"
MODEL: Final = "NVIDIA A100-SXM4-80GB"
MEMORY: Final = 80 * 1024**3
CAPABILITY: Final = (8, 0)

Answer = Callable[..., Any]
PROPERTIES: Final = SimpleNamespace(
    name=MODEL,
    major=CAPABILITY[0],
    minor=CAPABILITY[1],
    total_memory=MEMORY,
    multi_processor_count=108,
    warp_size=32,
    is_integrated=False,
    is_multi_gpu_board=False,
    max_threads_per_multi_processor=2048,
)
_QUESTIONS: Final[Mapping[str, Answer]] = {  # about the hardware
    "is_available": lambda: True,
    "is_bf16_supported": lambda including_emulation=True: True,
    "is_tf32_supported": lambda: True,
    "get_device_name": lambda device=None: MODEL,
    "get_device_capability": lambda device=None: CAPABILITY,
    "get_device_properties": lambda device=None: PROPERTIES,
    "get_arch_list": lambda: ["sm_80"],
    "can_device_access_peer": lambda device, peer_device: True,
    "mem_get_info": lambda device=None: (MEMORY, MEMORY),
    "utilization": lambda device=None: 0,
    **{f"{n}{m}": lambda device=None: 0 for n in ("", "max_") for m in ("memory_allocated", "memory_reserved", "memory_cached")},
    "memory_stats": lambda device=None: defaultdict(int),
    "memory_summary": lambda device=None, abbreviated=False: "",
}
_ELSEWHERE: Final[tuple[tuple[Any, str, Answer], ...]] = (
    (dist, "is_nccl_available", lambda: True),
    (torch.cuda.nccl, "version", lambda: (2, 27, 3)),
    (torch.backends.cuda, "is_built", lambda: True),
    (torch.backends.cuda, "is_flash_attention_available", lambda: True),
    (torch.backends.cudnn, "is_available", lambda: True),
    (torch.backends.cudnn, "version", lambda: 91002),
)
_NOTHING: Final = (  # that a program computes depends on these
    *("init", "_lazy_init", "synchronize", "empty_cache", "ipc_collect", "set_per_process_memory_fraction", "set_sync_debug_mode"),
    *("reset_peak_memory_stats", "reset_accumulated_memory_stats", "reset_max_memory_allocated", "reset_max_memory_cached"),
    *("manual_seed", "manual_seed_all", "seed", "seed_all", "set_rng_state", "set_rng_state_all"),
)


class Stream:
    """All work runs in the order of the code."""

    def __init__(self, device: Any = None, priority: int = 0, **kwargs: Any):
        self.device = torch.device(CUDA, CURRENT.index(device))
        self.priority = priority
        self.cuda_stream = self.stream_id = 0
        self.device_index, self.device_type = self.device.index, 1  # the number of CUDA's type

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False

    def synchronize(self) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        pass

    def record_event(self, event: Any = None) -> Any:
        return event or Event()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *error: object) -> None:
        pass


class Event:
    """It has happened when it is asked for."""

    def __init__(self, enable_timing: bool = False, **kwargs: Any):
        pass

    def record(self, stream: Any = None) -> None:
        pass

    def wait(self, stream: Any = None) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: Any) -> float:
        return 0.0


class Current:
    """Which GPU of the machine is the current one, as `set_device` says."""

    def __init__(self) -> None:
        self.at = 0
        self.count = 1
        self.stream = None

    def index(self, device: Any = None) -> int:
        """The number of a device, or of the current one."""
        if isinstance(device, torch.Tensor):
            device = device.device
        if isinstance(device, str):
            device = torch.device(device)
        found = device.index if isinstance(device, torch.device) else device
        found = self.at if found is None or found < 0 else int(found)
        if not 0 <= found < self.count:
            raise RuntimeError(f"CUDA error: invalid device ordinal: cuda:{found} of {self.count}")
        return found

    def set(self, device: Any) -> None:
        self.at = self.index(device)

    def indexed(self, device: Any) -> Any:
        """A device as it is given, with the number of the current GPU where it says none."""
        if isinstance(device, str) and device.startswith(CUDA):
            device = torch.device(device)
        if isinstance(device, torch.device) and device.type == CUDA:
            return torch.device(CUDA, self.index(device))
        return device


CURRENT: Final = Current()
_DATA: Final = torch.Tensor.data


@contextmanager
def device(device: Any) -> Iterator[None]:
    """`with torch.cuda.device(1):`; a negative number, or none, changes nothing."""
    before = CURRENT.at
    if device is not None and not (isinstance(device, int) and device < 0):
        CURRENT.set(device)
    try:
        yield
    finally:
        CURRENT.at = before


class _MapsOfReducer(TorchDispatchMode):
    """DDP's reducer notes which parameters a rank has used, for itself: on the processor no driver copies that."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("dtype") is torch.int32 and "device" in kwargs:
            kwargs |= {"device": torch.device(CPU), "pin_memory": False}
        return func(*args, **kwargs)


def _patch_reducer() -> None:
    made: Any = dist.Reducer
    build = made.__init__

    def built(self: Any, *args: Any, **kwargs: Any) -> None:
        with _MapsOfReducer():
            build(self, *args, **kwargs)

    made.__init__ = built


class Fake:
    """The device in this process."""

    def __init__(self, count: int):
        CURRENT.at, CURRENT.count = 0, count
        self.boundary: Boundary | None = None
        self.before: list[str] = []  # assumptions of code that ran before there was a boundary

    def assume(self, text: str) -> None:
        if self.boundary is not None:
            self.boundary.assume(text)
        elif text not in self.before:
            self.before.append(text)

    def refused(self, error: NotSupported) -> NotSupported:
        return error if self.boundary is None else self.boundary.refused(error)

    def joins(self, boundary: Boundary) -> None:
        self.boundary = boundary
        for text in self.before:
            boundary.assume(text)

    def install(self) -> None:
        """For the rest of this process."""
        random = tensor_random()
        supported = random.is_rng_supported_mesh
        _register()
        self._patch_module()
        self._patch_tensors()
        self._patch_fakes()
        _patch_accelerator()
        _patch_reducer()
        for owner, name, answer in _ELSEWHERE:
            function = getattr(owner, name)
            everywhere({id(function): (ours := self._answering(f"{owner.__name__}.{name}", answer))})
            setattr(owner, name, ours)
        random.is_rng_supported_mesh = lambda mesh: False  # DTensor draws as on a processor: what it draws has no value
        everywhere({id(supported): random.is_rng_supported_mesh})
        autocast.install(self)
        gpu_kernels.install()

    def _answering(self, name: str, answer: Answer) -> Answer:
        """A question about the hardware: who asks is noted with the answer."""

        def call(*args: Any, **kwargs: Any) -> Any:
            found = answer(*args, **kwargs)
            if (where := _asks(sys._getframe(1))) is not None:
                self.assume(RUNS)
                self.assume(ASKED.format(name, found if isinstance(found, bool | int | str | tuple) else "made up", where))
            return found

        return call

    def _patch_module(self) -> None:
        cuda = torch.cuda
        changed: dict[str, Any] = {n: self._answering(f"torch.cuda.{n}", f) for n, f in _QUESTIONS.items()}
        changed |= {n: lambda *args, **kwargs: None for n in _NOTHING}
        changed |= {
            "device_count": lambda: CURRENT.count,
            "current_device": lambda: CURRENT.at,
            "set_device": CURRENT.set,
            "_exchange_device": _exchanged,
            "_maybe_exchange_device": _exchanged,
            "device": device,
            "device_of": device,
            "is_initialized": lambda: True,
            "_is_in_bad_fork": lambda: False,
            "is_current_stream_capturing": lambda: False,
            "initial_seed": torch.initial_seed,
            "get_rng_state": lambda device=None: torch.get_rng_state(),
            "get_rng_state_all": lambda: [torch.get_rng_state()] * CURRENT.count,
            "get_amp_supported_dtype": lambda: [torch.float16, torch.bfloat16],
            "Stream": self._noted_stream(),
            "Event": self._noted_event(),
            "stream": lambda stream: stream or Stream(),
            "current_stream": lambda device=None: Stream(device),
            "default_stream": lambda device=None: Stream(device),
            "set_stream": lambda stream: None,
        }
        before = {n: getattr(cuda, n, None) for n in changed}
        for name, function in vars(cuda).copy().items():
            ours = isinstance(function, FunctionType) and function.__module__.startswith("torch.cuda")
            if ours and not name.startswith("_") and name not in changed:
                changed[name], before[name] = self._refusing(f"torch.cuda.{name}", function), function
        for name, function in changed.items():
            setattr(cuda, name, function)
        everywhere({id(f): changed[n] for n, f in before.items() if f is not None})
        for name in [n for n in vars(cuda) if n.endswith("Tensor")]:
            delattr(cuda, name)  # torch.cuda.FloatTensor and its like would say that no tensor is one
        cuda._initialized = True
        nvtx: Any = cuda.nvtx
        for name in ("range_push", "range_pop", "range_start", "range_end", "mark"):
            setattr(nvtx, name, lambda *args, **kwargs: 0)

    def _refusing(self, name: str, function: Answer) -> Answer:
        """Any other function of `torch.cuda`: where it fails for want of a GPU, the code has seen what a real run would not show."""

        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except (AttributeError, RuntimeError, AssertionError, ImportError) as error:
                raise self.refused(NotSupported(f"{name} needs a GPU: {error}".splitlines()[0])) from error

        return call

    def _noted_stream(self) -> type[Stream]:
        fake = self

        class Noted(Stream):
            def __init__(self, *args: Any, **kwargs: Any):
                super().__init__(*args, **kwargs)
                if (where := _asks(sys._getframe(1))) is not None:
                    fake.assume(STREAMS.format(where))

        return Noted

    def _noted_event(self) -> type[Event]:
        fake = self

        class Noted(Event):
            def elapsed_time(self, end: Any) -> float:
                fake.assume(CLOCK)
                return super().elapsed_time(end)

        return Noted

    def _patch_fakes(self) -> None:
        """Fake tensors are on the current GPU where no other is named."""
        normal = FakeTensor._normalize_fake_device

        def on(device: torch.device) -> torch.device:
            if device.type != CUDA:
                return normal(device)
            self.assume(RUNS)
            return torch.device(CUDA, CURRENT.index(device))

        FakeTensor._normalize_fake_device = staticmethod(on)
        FakeTensor.data = property(_DATA.__get__, self._set_data)
        FakeTensorMode.avoid_device_init = property(lambda mode: True)

    def _set_data(self, t: torch.Tensor, other: torch.Tensor) -> None:
        """`t.data = other` from one device to another, as modules do when they are moved: PyTorch does it for devices of its own only."""
        if not isinstance(other, FakeTensor) or t.device.type == other.device.type:
            _DATA.__set__(t, other)
            return
        if t._backward_hooks or getattr(t, "_post_accumulate_grad_hooks", None) or not self._is_unused(t):
            raise self.refused(NotSupported(".data on another device, of a tensor that has hooks or was used"))
        needs = t.requires_grad
        torch._C._swap_tensor_impl(t, other.detach())  # one of its own, on the same memory
        t.fake_device = other.fake_device
        t.requires_grad_(needs)

    def _is_unused(self, t: torch.Tensor) -> bool:
        """Whether nothing in C++ refers to a tensor, but for the node that adds up its gradient: that one is not to run any more."""
        if t._use_count() > 2:
            gc.collect()  # what nothing refers to any more counts until then
        if t._use_count() == 1:
            return True
        if t._use_count() > 2 or not (t.is_leaf and t.requires_grad):
            return False

        def stale(gradients: Any) -> None:
            raise self.refused(NotSupported("the gradient of a tensor that was moved to another device since it was used"))

        torch.autograd.graph.get_gradient_edge(t).node.register_prehook(stale)
        return bool(t._use_count() == 2)  # else the node is new, and something else refers to the tensor

    def _patch_tensors(self) -> None:
        tensor: Any = torch.Tensor
        to, kind = tensor.to, tensor.type

        def moved(t: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            given = {k: CURRENT.indexed(v) if k == "device" else v for k, v in kwargs.items()}
            return to(t, *(CURRENT.indexed(v) if isinstance(v, str | torch.device) else v for v in args), **given)

        def cuda(t: torch.Tensor, device: Any = None, non_blocking: bool = False, memory_format: Any = torch.preserve_format) -> Any:
            return to(t, torch.device(CUDA, CURRENT.index(device)), non_blocking=non_blocking, memory_format=memory_format)

        def typed(t: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
            if dtype is None:
                return re.sub(r"^torch\.(CUDA|cuda|privateuseone)\.", "torch.cuda.", kind(t))
            return kind(t, dtype, *args, **kwargs)

        def pinned(t: torch.Tensor, device: Any = None) -> torch.Tensor:
            made = t.clone()
            made._pinned = True
            return made

        tensor.to, tensor.cuda, tensor.type = moved, cuda, typed
        tensor.is_cuda = property(lambda t: t.device.type == CUDA)
        tensor.pin_memory = pinned
        tensor.is_pinned = lambda t, device=None: getattr(t, "_pinned", False)
        tensor.record_stream = lambda t, stream: None
        _device_constructors()  # as they are called by name in `with torch.device("cuda"):`, before others take their names
        within = DeviceContext.__torch_function__

        def indexed(context: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is None:  # ours, on real tensors
                return func(*args, **(kwargs or {}))
            before, context.device = context.device, CURRENT.indexed(context.device)
            try:
                return within(context, func, types, args, kwargs)
            finally:
                context.device = before

        DeviceContext.__torch_function__ = indexed
        for name in ("tensor", "as_tensor", "asarray"):
            setattr(torch, name, _indexing(made := getattr(torch, name)))
            everywhere({id(made): getattr(torch, name)})


def _indexing(function: Answer) -> Answer:
    """A function that asks C++ for the current GPU, which always names the first one."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **{k: CURRENT.indexed(v) if k == "device" else v for k, v in kwargs.items()})

    return call


def _exchanged(device: int) -> int:
    before = CURRENT.at
    if device >= 0:
        CURRENT.set(device)
    return before


def _asks(frame: FrameType | None) -> str | None:
    """The line of the user's that calls, if one does."""
    from trainverify.torch.lines import user_frame

    return str(user_frame(frame)[0]) if by_user(frame) else None


_REGISTERED: list[object] = []  # C++ refers to them


def _register() -> None:
    """The device, as PyTorch's C++ knows it."""
    from torch.utils import backend_registration as registration

    if _REGISTERED:
        return
    torch._C._rename_privateuse1_backend(CUDA.upper())
    hook, guard = registration._DummyPrivateUse1Hook(), registration._DummyDeviceGuard()
    accelerators: Any = torch._C._acc
    accelerators.register_python_privateuseone_hook(hook)
    accelerators.register_python_privateuseone_device_guard(guard)
    _REGISTERED.extend((hook, guard))
    if torch.device(CUDA) != torch.device("privateuseone"):
        raise NotSupported("this PyTorch has no device cuda that can be written in Python")


def _patch_accelerator() -> None:
    """`torch.accelerator` names this device already."""
    accelerator: Any = torch.accelerator
    functions: dict[str, Answer] = {
        "is_available": lambda: True,
        "device_count": lambda: CURRENT.count,
        "current_device_index": lambda: CURRENT.at,
        "current_device_idx": lambda: CURRENT.at,
        "set_device_index": lambda device: CURRENT.set(device),
        "set_device_idx": lambda device: CURRENT.set(device),
        "synchronize": lambda device=None: None,
        "current_stream": lambda device=None: Stream(device),
        "set_stream": lambda stream: None,
    }
    before = {n: getattr(accelerator, n) for n in functions}
    for name, function in functions.items():
        setattr(accelerator, name, function)
    everywhere({id(f): functions[n] for n, f in before.items()})


def hinted(message: str, device: str) -> str:
    """What a failed capture says, and what to do where it needed a GPU."""
    needs = device == CPU and CUDA in message.lower() and HINT not in message
    return f"{message}; capture the code as on GPUs, with {HINT}" if needs else message


def no_gpu(boundary: Boundary) -> None:
    """Where the code runs as on a processor: what PyTorch would switch off without a word is refused."""

    def switched_off(kind: Any, name: str) -> None:
        made = kind.__init__

        def call(self: Any, *args: Any, **kwargs: Any) -> None:
            made(self, *args, **kwargs)
            named = inspect.signature(made).bind(self, *args, **kwargs)
            named.apply_defaults()
            asked = named.arguments.get("device_type", named.arguments.get("device"))
            if asked == CUDA and named.arguments["enabled"] and not self._enabled:
                raise boundary.refused(NotSupported(OFF.format(name)))

        kind.__init__ = call

    switched_off(torch.amp.autocast_mode.autocast, "autocast")
    switched_off(torch.amp.grad_scaler.GradScaler, "GradScaler")


__all__ = ["CPU", "CUDA", "CURRENT", "Fake", "hinted", "no_gpu"]
