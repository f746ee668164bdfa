"""What scripts do around their steps: data loaders, which load for real, and checkpoints, which are not written."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _DatasetKind, _SingleProcessDataLoaderIter

from trainverify.graph.mesh import Mesh
from trainverify.torch.chance import by_user
from trainverify.torch.inputs import Batch, lies
from trainverify.torch.lines import user_frame
from trainverify.torch.patching import everywhere
from trainverify.torch.stand_ins import StandIns

WORKERS: Final = "data loaders load in the process that trains: what num_workers changes is which rows come, not what a step does with them"
SAME: Final = (
    "ranks {} and {} hold different parts of the batch and load the same rows in every step: {} gives rows {} to both (DistributedSampler?)"
)
CHECKPOINTS: Final = "checkpoints are not written"


@dataclass
class Loaded:
    """Rows of data loaders since a step ended."""

    rows: list[int] = field(default_factory=list)
    where: str = ""

    def taken(self) -> list[int]:
        found, self.rows = self.rows, []
        return found


LOADED: Final = Loaded()


def repeated(mesh: Mesh, batch: Batch, ranks: Sequence[Mapping[str, Any]]) -> str | None:
    """Whether two ranks load the same rows, that hold different parts of the batch."""
    first: dict[str, int] = {}
    name, spec = next(iter(batch.items()))
    if spec.cut is None:
        return None
    for rank, said in enumerate(ranks):
        loaded = said["loaded"]
        if not all(loaded):
            return None  # no loader that numbers its rows
        other = first.setdefault(repr(loaded), rank)
        parts = [lies(name, spec).parts(mesh, r, spec.shape) for r in (other, rank)]
        if parts[0] != parts[1]:
            shown = ", ".join(map(str, loaded[0][:4])) + (", …" if len(loaded[0]) > 4 else "")
            return SAME.format(other, rank, f"the loader at {said['loader']}", shown)
    return None


def install(stand_ins: StandIns, assume: Callable[[str], None], outside: Callable[..., Any]) -> None:
    """For the rest of this process."""
    _patch_loaders(stand_ins, assume, outside)
    _patch_saving(assume)


def _patch_loaders(stand_ins: StandIns, assume: Callable[[str], None], outside: Callable[..., Any]) -> None:
    """Samplers and datasets see real tensors; what comes out of a loader has no values."""

    def single(loader: Any) -> Any:
        if loader.num_workers == 0:
            return _SingleProcessDataLoaderIter(loader)
        assume(WORKERS)
        workers, timeout = loader.num_workers, loader.timeout
        loader.num_workers = loader.timeout = 0
        try:
            return _SingleProcessDataLoaderIter(loader)
        finally:
            loader.num_workers, loader.timeout = workers, timeout

    def iterator(loader: Any) -> Any:
        if not (loader.persistent_workers and loader.num_workers > 0):
            return loader._get_iterator()
        if loader._iterator is None:
            loader._iterator = loader._get_iterator()
        else:
            loader._iterator._reset(loader)
        return loader._iterator

    load = outside(_SingleProcessDataLoaderIter._next_data)
    number = _SingleProcessDataLoaderIter._next_index

    def numbered(iterating: Any) -> Any:
        found = number(iterating)
        rows = found if isinstance(found, list) else [found]
        if iterating._dataset_kind == _DatasetKind.Map and all(isinstance(r, int) for r in rows):
            LOADED.rows += rows
            LOADED.where = str(user_frame(sys._getframe(1))[0])
        return found

    def loaded(iterating: Any) -> Any:
        def faked(t: torch.Tensor) -> torch.Tensor:
            if isinstance(t, FakeTensor) or stand_ins.mode is None:
                return t
            made = stand_ins.mode.from_tensor(t)
            vars(made).update(vars(t))
            return made

        return tree_map_only(torch.Tensor, faked, load(iterating))

    kind: Any = _SingleProcessDataLoaderIter
    kind.__init__ = outside(kind.__init__)
    kind._next_data, kind._next_index = loaded, numbered
    DataLoader._get_iterator = single
    DataLoader.check_worker_number_rationality = lambda loader: None
    DataLoader.__iter__ = iterator


def _patch_saving(assume: Callable[[str], None]) -> None:
    save = torch.save

    def skipped(*args: Any, **kwargs: Any) -> None:
        if not by_user(sys._getframe(1)):
            save(*args, **kwargs)
            return
        assume(CHECKPOINTS)

    torch.save = skipped
    everywhere({id(save): skipped})


__all__ = ["LOADED", "install", "repeated"]
