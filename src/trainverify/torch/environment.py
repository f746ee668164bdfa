"""What is different in a process that captures: nobody is talked to, and what needs data at building time runs outside fake tensors."""

from __future__ import annotations

import copy
import inspect
import os
import pickle
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, cast

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from trainverify.torch import loading
from trainverify.torch.agreement import Said
from trainverify.torch.buffers import Group
from trainverify.torch.chance import Chance, by_user, noting
from trainverify.torch.collectives import Talk, group_name
from trainverify.torch.cuda import Fake, no_gpu
from trainverify.torch.data_draws import UNSEEDED
from trainverify.torch.discover import NotSupported
from trainverify.torch.exchange import theirs
from trainverify.torch.patching import everywhere
from trainverify.torch.placed import local
from trainverify.torch.private import FakeTensor, FakeTensorMode, _disable_current_modes, _python_dispatch, fake_store, pipeline_schedule
from trainverify.torch.process_group import BACKEND, CapturedGroup, gathered_futures, register


def outside(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The same function on real tensors, unseen."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return fn(*args, **kwargs)

    return run


@contextmanager
def patched(owner: Any, **changes: Any) -> Iterator[None]:
    before = {n: getattr(owner, n) for n in changes}
    for n, v in changes.items():
        setattr(owner, n, v)
    try:
        yield
    finally:
        for n, v in before.items():
            setattr(owner, n, v)


GLOO: Final = "gloo"  # the backend of captured functions: tensors of theirs are on the CPU


LAUNCHED: Final = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def launched(rank: int | None, world: int) -> None:
    """What a new process has: the environment that `torchrun` gives to a rank, or that of a single run without one, and no seed."""
    torch.manual_seed(UNSEEDED)
    for name in LAUNCHED:
        os.environ.pop(name, None)
    if rank is not None:
        os.environ.update(zip(LAUNCHED, (str(rank), str(rank), str(world), str(world), "localhost", "1"), strict=True))


def start_group(
    talk: Talk,
    rank: int,
    world: int,
    init: Callable[..., None] = dist.init_process_group,
    store: str | None = None,
    asked: str | None = GLOO,
) -> None:
    """`dist` as this rank sees it, by the name of the backend that was asked for; with a file as `store`, ranks really talk."""
    register(talk, store is not None)
    c10d._maybe_attach_flight_recorder = lambda *args: None  # 2.15 attaches one for debugging, to what C++ knows
    if store is None:
        c10d._store_based_barrier = lambda *args, **kwargs: None
    init(BACKEND, store=_unheard(fake_store(), talk) if store is None else dist.FileStore(store, world), rank=rank, world_size=world)
    _name(c10d._get_default_group(), asked)


STORED: Final = (
    *("add", "append", "barrier", "check", "compare_set", "delete_key", "get", "list_keys", "multi_get", "multi_set", "num_keys"),
    *("queue_len", "queue_pop", "queue_push", "set", "wait"),
)
_STORES: Final[list[Any]] = []


def _unheard(kind: type[Any], talk: Talk) -> Any:
    """A store that tells nothing: what ranks leave there for each other is refused, as are Python objects that they send."""

    def refused(name: str) -> Any:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            text = f"{_source(talk)}: {name} of the store: values that ranks exchange through it are not captured"
            raise talk.translator.boundary.refused(NotSupported(text))

        return call

    made = type(kind.__name__, (kind,), {n: refused(n) for n in STORED})()
    _STORES.append(made)  # C++ finds methods of Python's for as long as the object is there
    return made


def patch(talk: Talk, assumed: list[str], gpus: Fake | None = None) -> None:
    """For the rest of this process. What is assumed because of it is added to `assumed`."""

    def note(text: str) -> None:
        if text not in assumed:
            assumed.append(text)

    if gpus is None:
        no_gpu(talk.translator.boundary)
    else:
        gpus.joins(talk.translator.boundary)
    _patch_building(talk, note)
    _patch_conversion()
    _patch_initial()
    _patch_copies(talk)
    _patch_questions(talk)
    before = dict(vars(c10d))
    _patch_pipelines(talk, note)
    _patch_storage(talk)
    loading.install(talk.translator.stand_ins, talk.translator.boundary.assume, outside)
    _patch_objects(talk, note)
    _patch_groups(talk)
    everywhere({id(f): vars(c10d)[n] for n, f in before.items() if vars(c10d)[n] is not f})
    everywhere({id(getattr(torch.futures, n)): f for n, f in gathered_futures(talk.translator.boundary).items()})
    talk.translator.boundary.chance = chance = Chance(talk.translator.boundary)
    chance.install()


def _patch_building(talk: Talk, note: Callable[[str], None]) -> None:
    """DDP's talk when it is built, and meshes, which are tables of real numbers."""
    import torch.distributed.device_mesh as device_mesh
    import torch.nn.parallel.distributed as ddp

    def synced(module: Any, process_group: Any, *args: Any, **kwargs: Any) -> None:
        note("DDP's broadcast of parameters and buffers when it is built has made all replicas equal")
        members = tuple(dist.get_process_group_ranks(process_group))
        for buffer in module.buffers():
            talk.same_constant(Group(group_name(members, 0), members), local(buffer))
        if talk.rank != members[0]:
            ignored = kwargs.get("params_and_buffers_to_ignore", ())
            talk.receives(local(t) for n, t in (*module.named_parameters(), *module.named_buffers()) if n not in ignored)

    def shapes(*args: Any, **kwargs: Any) -> None:
        note("DDP's check that all ranks have parameters of the same shapes is left out")

    ddp._verify_param_shape_across_processes = shapes
    ddp._sync_module_states = synced
    mesh = device_mesh.DeviceMesh
    for name in ("__init__", "__getitem__", "_flatten", "_get_all_submeshes", "_unflatten", "_concatenate"):
        if hasattr(mesh, name):
            setattr(mesh, name, outside(getattr(mesh, name)))


def _patch_conversion() -> None:
    """`model.to(dtype)` and `to_empty` of fake tensors: their data are replaced, as those of plain ones are."""
    swap = torch.utils.swap_tensors

    def swapped(one: torch.Tensor, other: torch.Tensor) -> None:
        if isinstance(one, FakeTensor) and isinstance(other, FakeTensor):
            one.data = other.data
            one.fake_device = other.fake_device
        else:
            swap(one, other)

    torch.utils.swap_tensors = swapped


def _patch_initial() -> None:
    """`nn.init.trunc_normal_` draws until all numbers are within bounds, which has no end here: it is another function of one draw."""
    drawn = torch.nn.init._no_grad_trunc_normal_

    def bounded(tensor: torch.Tensor, mean: float, std: float, a: float, b: float, generator: Any = None) -> torch.Tensor:
        if type(tensor) is torch.Tensor and not isinstance(tensor, FakeTensor):
            return cast("torch.Tensor", drawn(tensor, mean, std, a, b, generator))
        with torch.no_grad():
            return tensor.normal_(mean, std, generator=generator).clamp_(a, b)

    torch.nn.init._no_grad_trunc_normal_ = bounded
    everywhere({id(drawn): bounded})


def _patch_questions(talk: Talk) -> None:
    """Code that asks PyTorch for its modes would see a capture, and nothing in a real run: no verdict."""

    def asked(frame: Any, *args: Any) -> None:
        if by_user(frame):
            talk.translator.boundary.note("PyTorch is asked in which mode it runs, which a capture changes")

    owners: tuple[tuple[Any, str], ...] = (
        (_python_dispatch, r"_get_current_dispatch_mode|_get_current_dispatch_mode_stack|is_in_.*_mode|_detect_infra_mode"),
        (torch._guards, r"detect_fake_mode|active_fake_mode"),
        (torch._C, r"_len_torch_dispatch_stack|_get_dispatch_stack_at"),
    )
    found = [getattr(owner, n) for owner, names in owners for n in dir(owner) if re.fullmatch(names, n)]
    everywhere({id(f): noting(f, asked) for f in found})


def _patch_copies(talk: Talk) -> None:
    """`copy.deepcopy` of fake tensors gives others of the same mode. Tensors that show all of one memory share their copy of it."""

    def copied(self: torch.Tensor, memo: dict[Any, Any]) -> torch.Tensor:
        if not self.is_leaf:
            return cast("torch.Tensor", torch.Tensor.__deepcopy__(self, memo))  # an error
        if id(self) in memo:
            return cast("torch.Tensor", memo[id(self)])
        memory = ("memory", talk.translator.keep(self))
        whole = self.untyped_storage().nbytes() == self.numel() * self.element_size()
        before = memo.get(memory)
        if before is not None and not (whole and before[0]):
            raise talk.translator.boundary.refused(NotSupported("a deep copy of tensors that share some memory"))
        with torch.no_grad():
            made = self.detach().clone() if before is None else before[1].detach().as_strided(self.shape, self.stride())
        memo[memory] = whole, made
        if isinstance(self, torch.nn.Parameter):
            made = torch.nn.Parameter(made, self.requires_grad)
        elif self.requires_grad:
            made.requires_grad_()
        more = {n: v for n, v in vars(self).items() if n not in vars(made)}
        vars(made).update(copy.deepcopy(more, memo))
        if self.grad is not None:
            made.grad = copy.deepcopy(self.grad, memo)
        memo[id(self)] = made
        return made

    FakeTensorMode.__deepcopy__ = lambda self, memo: self
    FakeTensor.__deepcopy__ = copied


def _patch_pipelines(talk: Talk, note: Callable[[str], None]) -> None:
    """Stages do not ask each other for shapes; messages of one batch are known as such."""
    from torch.distributed.pipelining.schedules import InferenceMode

    def fixed(self: Any, stages: Any, has_backward: bool, p2p_done: bool) -> None:
        note("pipeline stages have the shapes that they were given; messages that warm up connections are left out")
        for stage in stages:
            stage._inference_mode = InferenceMode.STATIC

    pipeline_schedule()._warmup_p2p = fixed
    batch = c10d.batch_isend_irecv

    def batched(ops: Any) -> Any:
        talk.batch += 1
        talk.in_batch = True
        try:
            return batch(ops)
        finally:
            talk.in_batch = False

    c10d.batch_isend_irecv = dist.batch_isend_irecv = batched


def _patch_storage(talk: Talk) -> None:
    """Memory that is given back holds nothing."""
    resize = torch.UntypedStorage.resize_

    def resized(self: torch.UntypedStorage, size: int) -> Any:
        if size != self.nbytes():
            talk.translator.forget(int(self._cdata))
        return resize(self, size)

    torch.UntypedStorage.resize_ = resized


def _patch_objects(talk: Talk, note: Callable[[str], None]) -> None:
    """Python objects that ranks exchange are what they gave in a capture before, or copies of this rank's, to be compared with theirs."""
    counts: Counter[tuple[int, ...]] = Counter()

    def given(how: str, value: Any, group: Any) -> list[bytes]:
        members = tuple(dist.get_process_group_ranks(group or c10d._get_default_group()))
        sent = pickle.dumps(value)  # what cannot be pickled cannot be sent either
        talk.ledger.sent.setdefault(members, []).append((how, sent))
        counts[members] += 1
        if (found := theirs(members, counts[members] - 1, how)) is not None:
            return found
        note(f"objects that ranks exchange ({how}) are the same on all of them")
        return [talk.ledger.exchanged(how, value, _source(talk))] * len(members)

    def all_gather_object(object_list: list[Any], obj: Any, group: Any = None) -> None:
        if dist.get_rank(group) != -1:  # else this rank is not in the group
            for i, sent in enumerate(given("all_gather_object", obj, group)):
                object_list[i] = pickle.loads(sent)

    def broadcast_object_list(
        object_list: list[Any], src: int | None = None, group: Any = None, device: Any = None, group_src: int | None = None
    ) -> None:
        group = group or c10d._get_default_group()
        if (rank := dist.get_rank(group)) == -1:
            return
        root = group_src if group_src is not None else c10d.get_group_rank(group, src or 0)
        found = given(f"broadcast_object_list from {root}", object_list, group)
        if rank != root:
            object_list[:] = pickle.loads(found[root])

    def refused(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            text = f"{_source(talk)}: {name}: Python objects that ranks send are not captured"
            raise talk.translator.boundary.refused(NotSupported(text))

        return call

    for module in (dist, c10d):
        module.all_gather_object = all_gather_object
        module.broadcast_object_list = broadcast_object_list
        for name in ("gather_object", "scatter_object_list", "send_object_list", "recv_object_list"):
            setattr(module, name, refused(name))


def _patch_groups(talk: Talk) -> None:
    """Groups that all ranks have to create in the same order are noted. They bear the name of the backend that was asked for."""
    new_group, backend, configured = c10d.new_group, c10d.get_backend, c10d.get_backend_config
    place = list(inspect.signature(new_group).parameters).index("backend")
    helper = c10d._new_process_group_helper

    def numbered(group_size: int, group_rank: int, global_ranks_in_group: list[int], *args: Any, **kwargs: Any) -> Any:
        made, store = helper(group_size, group_rank, global_ranks_in_group, *args, **kwargs)
        if isinstance(made, CapturedGroup):
            made.number = talk.counted_group(global_ranks_in_group or range(group_size))
        return made, store

    c10d._new_process_group_helper = numbered

    def created(*args: Any, **kwargs: Any) -> Any:
        ranks = args[0] if args else kwargs.get("ranks")
        asked = args[place] if len(args) > place else kwargs.pop("backend", None)
        given = (*args[:place], None, *args[place + 1 :]) if len(args) > place else args
        if not kwargs.get("use_local_synchronization", False):
            talk.ledger.created.append(Said(f"new_group({None if ranks is None else sorted(int(r) for r in ranks)})", _source(talk)))
        group = new_group(*given, **kwargs)
        _name(group, asked or named(None))
        return group

    def named(group: Any = None) -> Any:
        found = backend(group)
        asked = group or c10d._get_default_group()
        return c10d.Backend(asked.asked) if isinstance(asked, CapturedGroup) else found

    def config(group: Any = None) -> str:
        found = configured(group)
        asked = group or c10d._get_default_group()
        return str(c10d.BackendConfig(c10d.Backend(asked.asked))) if isinstance(asked, CapturedGroup) else found

    c10d.new_group = dist.new_group = created
    c10d.get_backend = dist.get_backend = named
    c10d.get_backend_config = dist.get_backend_config = config


def _name(group: Any, asked: str | None) -> None:
    if isinstance(group, CapturedGroup):
        group.asked = (asked or "undefined").lower()


def _source(talk: Talk) -> Any:
    return talk.translator._place().source
