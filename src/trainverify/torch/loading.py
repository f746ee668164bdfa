"""What scripts do around their steps: data loaders, which load for real, and checkpoints, which are not written."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch.utils.data import DataLoader

from trainverify.graph.mesh import Mesh
from trainverify.torch.chance import by_user
from trainverify.torch.inputs import Batch, lies
from trainverify.torch.lines import user_frame
from trainverify.torch.patching import everywhere
from trainverify.torch.private import FakeTensor, _DatasetKind, _SingleProcessDataLoaderIter
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
    data: Any = None  # the last batch as it was loaded
    batch: list[int] | None = None  # and its rows, if they are numbered
    given: Callable[[Any], Any] = lambda data: data  # what loaders give to the script goes through it
    over: Callable[[bool], bool] = lambda ends: False
    ahead: list[Any] = field(default_factory=list)  # of loaders that load before they give: what is not given yet

    def ends(self) -> bool:
        """Whether the loader is to end before its next batch."""
        return self.over(False) and (self.over(True) or True)

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


def mapped(data: Any, change: Callable[[tuple[str, ...], torch.Tensor], torch.Tensor], path: tuple[str, ...] = ()) -> Any:
    """A batch with every tensor changed, which is named by the keys and positions that lead to it."""
    if isinstance(data, torch.Tensor):
        return change(path, data)
    if isinstance(data, Mapping):
        changed = {k: mapped(v, change, (*path, str(k))) for k, v in data.items()}
        if type(data) is dict or not isinstance(data, MutableMapping):
            return changed
        made = copy.copy(data)
        made.update(changed)
        return made
    if isinstance(data, list | tuple):
        values = [mapped(v, change, (*path, str(i))) for i, v in enumerate(data)]
        return data._make(values) if hasattr(data, "_make") else type(data)(values)
    return data


def on_yield(given: Callable[[Any], Any], over: Callable[[bool], bool]) -> None:
    """What loaders give to the script goes through a function. Another is asked before whether the loader is to end here, with False,
    and told that it does, with True."""
    following = _SingleProcessDataLoaderIter.__next__
    LOADED.given, LOADED.over = given, over

    def after(iterating: Any) -> Any:
        if LOADED.ahead:
            data = following(iterating)
            LOADED.ahead[-1].append((LOADED.data, LOADED.batch))
            return data
        if LOADED.ends():
            raise StopIteration
        try:
            data = following(iterating)
        except StopIteration:
            over(True)
            raise
        return given(data)

    _SingleProcessDataLoaderIter.__next__ = after


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
            LOADED.batch = rows
        else:
            LOADED.batch = None
        return found

    def loaded(iterating: Any) -> Any:
        def faked(path: tuple[str, ...], t: torch.Tensor) -> torch.Tensor:
            if isinstance(t, FakeTensor) or stand_ins.mode is None:
                return t
            made = stand_ins.mode.from_tensor(t)
            vars(made).update(vars(t))
            return made

        LOADED.data = load(iterating)
        return mapped(LOADED.data, faked)

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


__all__ = ["LOADED", "install", "mapped", "on_yield", "repeated"]
