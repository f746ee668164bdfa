"""What training libraries do around a step, once a script has imported them: they are found by module, and only if they are there.

A loader of accelerate has loaded the next batch when it gives one: a step begins with what it gives. The states of generators that it makes
equal on all ranks are compared between ranks, as objects that ranks exchange. Lightning's Trainer has one device in the reference.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import inspect
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any, Final

import torch

from trainverify.torch.collectives import Talk
from trainverify.torch.environment import outside
from trainverify.torch.loading import LOADED

STATES: Final = "the states of random generators that ranks make equal (synchronize_rng_state) are the same before"


ONE: Final = "inferred: in the reference the Trainer has one device, where the code says another number"
LOGGED: Final = "the log of Transformers' Trainer, from which it leaves out losses that are not finite (logging_nan_inf_filter)"
SCHEDULED: Final = "inferred: in the reference accelerate's schedules make {} steps for one of the optimizer, as on ranks"
_CONNECTORS: Final = tuple(f"{n}.trainer.connectors.accelerator_connector" for n in ("lightning.pytorch", "pytorch_lightning"))


class _Loader(importlib.abc.Loader):
    """A module that is changed as soon as it has been loaded."""

    def __init__(self, inner: Any, change: Callable[[ModuleType], None]):
        self.inner, self.change = inner, change

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def create_module(self, spec: Any) -> ModuleType | None:
        made: ModuleType | None = self.inner.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        self.inner.exec_module(module)
        self.change(module)


class _Finder(importlib.abc.MetaPathFinder):
    """Modules by name, and what is changed in them."""

    def __init__(self, changes: Mapping[str, Callable[[ModuleType], None]]):
        self.changes = changes

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        if fullname not in self.changes:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self.changes[fullname])
        return spec


def install(talk: Talk, assume: Callable[[str], None], alone: bool, ranks: int) -> None:
    """For the rest of this process, which is `alone` if it is the reference: the batches of so many `ranks` are one there."""
    changes = {"accelerate.data_loader": _ahead, "accelerate.utils.random": lambda module: _states(module, talk, assume)}
    changes["transformers.trainer"] = lambda module: _unfiltered(module, assume)
    if alone:
        changes |= dict.fromkeys(_CONNECTORS, lambda module: _one_device(module, assume))
        changes["accelerate.scheduler"] = lambda module: _as_on_ranks(module, ranks, assume)
    sys.meta_path.insert(0, _Finder(changes))


def _ahead(module: Any) -> None:
    """A loader that has loaded a batch more than it has given."""
    kind = module.DataLoaderShard
    iterated = kind.__iter__

    def given(self: Any) -> Iterator[Any]:
        queue: deque[Any] = deque()
        batches = iterated(self)
        while not LOADED.ends():
            LOADED.ahead.append(queue)
            try:
                data = next(batches)
            except StopIteration:
                LOADED.over(True)
                return
            finally:
                LOADED.ahead.pop()
            LOADED.data, LOADED.batch = queue.popleft()
            yield LOADED.given(data)

    kind.__iter__ = given


def _states(module: Any, talk: Talk, assume: Callable[[str], None]) -> None:
    """Every rank has the state of its own generator, which is to be that of the others."""

    def same(rng_type: Any = None, generator: Any = None) -> None:
        assume(STATES)
        owner = torch.default_generator if generator is None else generator
        state = outside(owner.get_state)()
        talk.ledger.exchanged(f"synchronize_rng_state({rng_type})", outside(state.tolist)(), talk.translator.boundary.where())

    module.synchronize_rng_state = same


def _as_on_ranks(module: Any, ranks: int, assume: Callable[[str], None]) -> None:
    """A schedule that was prepared makes a step for every process, since each has a batch: so it does where their batches are one."""

    def state(*args: Any, **kwargs: Any) -> Any:
        if ranks > 1:
            assume(SCHEDULED.format(ranks))
        return SimpleNamespace(num_processes=ranks)

    module.AcceleratorState = state


def _unfiltered(module: Any, assume: Callable[[str], None]) -> None:
    """A loss that is not finite is replaced in the log: a condition on data that decides on nothing else."""
    made = module.Trainer.__init__

    def built(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        if self.args.logging_nan_inf_filter:
            assume(LOGGED)
            self.args.logging_nan_inf_filter = False

    module.Trainer.__init__ = built


def _one_device(module: Any, assume: Callable[[str], None]) -> None:
    """Lightning's Trainer is told how many devices there are: in the reference it has one."""
    made = module._AcceleratorConnector.__init__
    names = list(inspect.signature(made).parameters)

    def alone(self: Any, *args: Any, **kwargs: Any) -> None:
        given = {**dict(zip(names[1:], args, strict=False)), **kwargs}
        if given.get("devices", "auto") != "auto" or given.get("num_nodes", 1) != 1:
            assume(ONE)
        made(self, **{**given, "devices": 1, "num_nodes": 1})

    module._AcceleratorConnector.__init__ = alone


__all__ = ["install"]
