"""A process group that talks to nobody: every call is handed to `Talk`, with the options that the caller gave.

It is a Python subclass, so that DDP's C++ reducer and Python callers both arrive here, and reductions, roots and peers are read from the
call. Its work objects tell when they are waited for.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import FrameType
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Work as _Work

from trainverify.torch.boundary import Boundary
from trainverify.torch.buffers import Group
from trainverify.torch.collectives import Flight, Talk
from trainverify.torch.discover import NotSupported
from trainverify.torch.frames import ENGINE
from trainverify.torch.lines import may_be_users
from trainverify.torch.private import _disable_current_modes

BACKEND: Final = "trainverify"
POLLED: Final = "whether communication has ended is asked before it is waited for (is_completed, done), which the network decides"


class LandingFuture(torch.futures.Future[Any]):
    """The result of communication: it is there from `wait` or `value` on; callbacks run then."""

    def __init__(self, land: Callable[[], None], result: Callable[[], Any], boundary: Boundary):
        super().__init__()
        self._land, self._result, self._boundary = land, result, boundary
        self._there = False

    def _complete(self) -> None:
        if not self._there:
            self._there = True
            self._land()
            self.set_result(self._result())

    def wait(self) -> Any:
        self._complete()
        return super().wait()

    def value(self) -> Any:
        self._complete()
        return super().value()

    def done(self) -> bool:
        if not self._there and may_be_users(sys._getframe(1).f_code.co_filename):
            self._boundary.note(POLLED)
            self._complete()  # code that asks until it has ended would ask for ever
        return self._there

    def then(self, callback: Any) -> Any:
        made = LandingFuture(self._complete, lambda: callback(self), self._boundary)
        self._boundary.callbacks.append((lambda: made._there, self._boundary.where()))
        return made

    def add_done_callback(self, callback: Any) -> None:
        text = "add_done_callback on a future of communication: use then, and wait for what it returns"
        raise self._boundary.refused(NotSupported(text))


def gathered_futures(boundary: Boundary) -> dict[str, Callable[[list[Any]], Any]]:
    """`torch.futures.collect_all` and `wait_all`: C++ would wait for ever for futures of communication, which land where Python waits."""
    together = torch.futures.collect_all

    def collect_all(futures: list[Any]) -> Any:
        if not any(isinstance(f, LandingFuture) for f in futures):
            return together(futures)
        return LandingFuture(lambda: _wait(futures), lambda: futures, boundary)

    def wait_all(futures: list[Any]) -> list[Any]:
        return [f.wait() for f in collect_all(futures).wait()]

    return {"collect_all": collect_all, "wait_all": wait_all}


def _wait(futures: Sequence[Any]) -> None:
    for f in futures:
        f.wait()


def _in_backward() -> bool:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_code is ENGINE:
            return True
        frame = frame.f_back
    return False


class CapturedWork(_Work):
    def __init__(self, talk: Talk, flights: Sequence[Flight], tensors: Any):
        super().__init__()
        self.talk = talk
        self.flights = flights
        self.future: torch.futures.Future[Any] = torch.futures.Future()
        self.future.set_result(tensors)
        self.real: list[Any] = []  # the work of a backend that really talks

    def land(self) -> None:
        while self.real:
            self.real.pop().wait()
        for flight in self.flights:
            self.talk.land(flight)

    def wait(self, timeout: timedelta | None = None) -> bool:
        self.land()
        return True

    def synchronize(self) -> None:
        self.land()

    def block_current_stream(self) -> None:
        self.land()

    def get_future(self) -> Any:
        """A future that lands when it is waited for. DDP waits for it in C++, unseen: what hooks of the backward pass ask for is there."""
        if torch._C._current_autograd_node() is not None or _in_backward():
            self.talk.assume("futures of communication that starts in the backward pass (DDP, its hooks) are waited for before it ends")
            self.land()
            return self.future
        return LandingFuture(self.land, self.future.value, self.talk.translator.boundary)

    def is_completed(self) -> bool:
        if not all(f.landed for f in self.flights) and may_be_users(sys._getframe(1).f_code.co_filename):
            self.talk.translator.boundary.note(POLLED)
            self.land()  # code that asks until it has ended would ask for ever
        return all(f.landed for f in self.flights)

    def is_success(self) -> bool:
        return True

    def exception(self) -> None:
        return None


class CapturedGroup(dist.ProcessGroup):
    def __init__(self, rank: int, size: int, talk: Talk):
        super().__init__(rank, size)
        self.talk = talk
        self._group: Group | None = None
        self.number: int | None = None  # among groups of the same ranks, as they were made
        self._name = ""
        self._description = ""
        self.asked = BACKEND  # the backend that the code asked for
        self._coalescing: list[Flight] | None = None

    # -- what torch.distributed asks of a group ---------------------------------------------------------------------------

    @property
    def pg_name(self) -> str:
        return self._name

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def group_desc(self) -> str:
        return self._description

    @property
    def supports_coalescing(self) -> bool:
        return False

    @property
    def supports_splitting(self) -> bool:
        return False

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu"), torch.device("cuda")]

    @property
    def bound_device_id(self) -> None:
        return None

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, text: str) -> None:
        self._description = text

    def getBackendName(self) -> str:  # noqa: N802 (PyTorch's name, by which C++ finds it)
        return BACKEND

    def name(self) -> str:
        return self.asked

    def _get_backend(self, device: torch.device) -> Any:
        return self

    def _get_backend_name(self) -> str:
        return self.asked

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return False

    def group(self) -> Group:
        if threading.current_thread() is not threading.main_thread():
            self.talk.translator.boundary.note("another thread communicates")
        if self._group is None:
            members = dist.get_process_group_ranks(self)
            self._group = self.talk.group(members, self.talk.counted_group(members) if self.number is None else self.number)
        return self._group

    def _work(self, flight: Flight | Sequence[Flight], tensors: Any) -> CapturedWork:
        flights = [flight] if isinstance(flight, Flight) else list(flight)
        if self._coalescing is not None:
            self._coalescing += flights
        return CapturedWork(self.talk, flights, tensors)

    def _start_coalescing(self, device: Any = None) -> None:
        self._coalescing = []

    def _end_coalescing(self, device: Any = None) -> CapturedWork:
        flights, self._coalescing = self._coalescing or [], None
        return CapturedWork(self.talk, flights, [])

    # -- collectives --------------------------------------------------------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any = None) -> CapturedWork:
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        op = dist.ReduceOp.SUM if opts is None else getattr(opts, "reduceOp", opts)
        if [t.dtype for t in tensors] == [torch.int32] and _from_reducer():
            return self._work(self.talk.used(self.group(), tensors[0], op), tensors)
        return self._work(self.talk.all_reduce(self.group(), tensors, op), tensors)

    allreduce_coalesced = allreduce

    def broadcast(self, tensors: Any, opts: Any = None) -> CapturedWork:
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        root = 0 if opts is None else int(getattr(opts, "rootRank", opts))
        group = self.group()
        return self._work([self.talk.broadcast(group, t, group.members[root]) for t in tensors], tensors)

    def reduce(self, tensors: Any, opts: Any = None) -> CapturedWork:
        group = self.group()
        flights = [self.talk.reduce(group, t, group.members[opts.rootRank], opts.reduceOp) for t in tensors]
        return self._work(flights, tensors)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> CapturedWork:
        flights = [self.talk.all_gather(self.group(), list(o), x) for o, x in zip(outputs, inputs, strict=True)]
        return self._work(flights, outputs)

    def all_gather_single(self, output: Any, x: Any, opts: Any = None) -> CapturedWork:
        return self._work(self.talk.all_gather_single(self.group(), output, x), [output])

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> CapturedWork:
        flights = [self.talk.all_gather_single(self.group(), o, x) for o, x in zip(outputs, inputs, strict=True)]
        return self._work(flights, outputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> CapturedWork:
        op = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        flights = [self.talk.reduce_scatter(self.group(), o, list(xs), op) for o, xs in zip(outputs, inputs, strict=True)]
        return self._work(flights, outputs)

    def reduce_scatter_single(self, output: Any, x: Any, opts: Any = None) -> CapturedWork:
        op = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        return self._work(self.talk.reduce_scatter_single(self.group(), output, x, op), [output])

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> CapturedWork:
        op = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        flights = [self.talk.reduce_scatter_single(self.group(), o, x, op) for o, x in zip(outputs, inputs, strict=True)]
        return self._work(flights, outputs)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def all_to_all_single(self, output: Any, x: Any, output_sizes: Any = (), input_sizes: Any = (), opts: Any = None) -> CapturedWork:
        return self._work(self.talk.all_to_all_single(self.group(), output, x, output_sizes or (), input_sizes or ()), [output])

    alltoall_base = all_to_all_single

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> CapturedWork:
        return self._work(self.talk.all_to_all(self.group(), outputs, inputs), outputs)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> CapturedWork:
        group = self.group()
        xs = list(inputs[0]) if inputs else []
        return self._work(self.talk.scatter(group, outputs[0], xs, group.members[opts.rootRank]), outputs)

    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> CapturedWork:
        group = self.group()
        made = list(outputs[0]) if outputs else []
        return self._work(self.talk.gather(group, made, inputs[0], group.members[opts.rootRank]), outputs)

    def send(self, tensors: Any, to: int, tag: int = 0) -> CapturedWork:
        return self._work([self.talk.send(self.group(), t, to, tag) for t in tensors], tensors)

    def recv(self, tensors: Any, origin: int, tag: int = 0) -> CapturedWork:
        return self._work([self.talk.recv(self.group(), t, origin, tag) for t in tensors], tensors)

    def barrier(self, opts: Any = None) -> CapturedWork:
        self.talk.barrier(self.group())
        return self._work([], [])


def _from_reducer() -> bool:
    """Whether C++ called, within a backward pass: DDP's reducer. (Users' calls come through torch.distributed.)"""
    return sys._getframe(2).f_code is ENGINE


_REAL: Final = {  # methods, and those of gloo that do it
    "allreduce": "allreduce",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "allgather": "allgather",
    "all_gather_single": "_allgather_base",
    "_allgather_base": "_allgather_base",
    "reduce_scatter": "reduce_scatter",
    "reduce_scatter_single": "_reduce_scatter_base",
    "_reduce_scatter_base": "_reduce_scatter_base",
    "all_to_all_single": "alltoall_base",
    "alltoall_base": "alltoall_base",
    "scatter": "scatter",
    "gather": "gather",
    "send": "send",
    "recv": "recv",
    "barrier": "barrier",
}
_NOT_REAL: Final = (
    "allreduce_coalesced",
    "all_gather_single_coalesced",
    "allgather_into_tensor_coalesced",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced",
    "alltoall",
    "_start_coalescing",
)


class RealGroup(CapturedGroup):
    """The same, and gloo moves real tensors."""

    def __init__(self, rank: int, size: int, talk: Talk, inner: Any):
        super().__init__(rank, size, talk)
        self.inner = inner


def _really(name: str, gloo: str) -> Callable[..., CapturedWork]:
    def call(self: RealGroup, *args: Any, **kwargs: Any) -> CapturedWork:
        work: CapturedWork = getattr(CapturedGroup, name)(self, *args, **kwargs)
        one = args and isinstance(args[0], torch.Tensor) and gloo in ("allreduce", "broadcast")
        given = ([args[0]], *args[1:]) if one else args
        with _disable_current_modes(), torch.no_grad():
            work.real.append(getattr(self.inner, gloo)(*(a for a in given if a is not None), **kwargs))
        return work

    return call


def _not_really(name: str) -> Callable[..., Any]:
    def call(self: RealGroup, *args: Any, **kwargs: Any) -> Any:
        raise NotSupported(f"{name} on real tensors")

    return call


for _name, _gloo in _REAL.items():
    setattr(RealGroup, _name, _really(_name, _gloo))
for _name in _NOT_REAL:
    setattr(RealGroup, _name, _not_really(_name))


def register(talk: Talk, real: bool = False) -> None:
    """Make the backend known to this process; its groups report to `talk`."""

    def create(store: Any, rank: int, size: int, timeout: Any) -> CapturedGroup:
        if real:
            return RealGroup(rank, size, talk, dist.ProcessGroupGloo(store, rank, size, timeout))
        return CapturedGroup(rank, size, talk)

    dist.Backend.register_backend(BACKEND, create, devices=["cpu", "cuda"])
