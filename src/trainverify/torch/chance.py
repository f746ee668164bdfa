"""Numbers that another process would have otherwise: the clock's, its own number, the operating system's, those of unseeded generators.

A capture would take them for constants of the code.
"""

from __future__ import annotations

import datetime
import os
import platform
import random
import resource
import socket
import sys
import time
import uuid
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Final

import numpy as np
import torch

from trainverify.torch.asks import asks, callers
from trainverify.torch.boundary import Boundary
from trainverify.torch.frames import is_ours, torchs
from trainverify.torch.lines import may_be_users
from trainverify.torch.orders import loops
from trainverify.torch.patching import everywhere

CLOCKS: Final = tuple(
    f"{n}{ns}" for n in ("time", "monotonic", "perf_counter", "process_time", "thread_time", "clock_gettime") for ns in ("", "_ns")
)
TIMES: Final = {"localtime": 1, "gmtime": 1, "ctime": 1, "asctime": 1, "strftime": 2}  # with fewer arguments they ask the clock
PLACES: Final = ((os, "getpid"), (os, "getppid"), (socket, "gethostname"), (platform, "node"), (uuid, "getnode"))
PLACE: Final = "the number of the process and the name of the machine"
CLOCK: Final = "what the clock says, as the code asks it, decides on nothing"
SYSTEM: Final = "numbers that the operating system draws when the code is built decide on nothing"
DRAWN: Final = "random numbers of {} are drawn that no seed decides, others in every process: draw them with torch, or set a seed"
HASHED: Final = "hash() of text is another number in every process: set PYTHONHASHSEED, or use zlib.crc32"
NUMBERED: Final = (
    "id() of an object, its hash(), or the address of memory, that is gone afterwards: another one may have the same number then"
)
WEAK: Final = "a weak reference to a tensor that is made in a step: when memory is given back is seen in a real run only"
_SEEDS: Final = ((random, "random", ("seed", "setstate")), (np.random, "numpy.random", ("seed", "set_state")))
FILES: Final = "a step reads a file, or asks whether there is one: another step, or another rank, may find something else"
_LOADING: Final = f"torch{os.sep}utils{os.sep}data"
_MAKING: Final = (
    "makedirs",
    "mkdir",
    "linecache",
    "logging",
    "inspect",
    "warnings",
    "traceback",
)  # functions and modules that look at files
_IMPORTED: Final = "importlib"  # what modules do when they are imported is not the code's


class Chance:
    """What draws such numbers in this process tells of it."""

    def __init__(self, boundary: Boundary):
        self.boundary = boundary
        self.stepping = False  # a step runs, or has run
        self.within = False  # a step runs
        self.seeded: set[str] = set()
        self.before = generators()

    def install(self) -> None:
        """For the rest of this process."""
        changed = {id(getattr(time, n)): noting(getattr(time, n), self._asked) for n in CLOCKS}
        changed |= {id(getattr(time, n)): noting(getattr(time, n), partial(self._dates, least)) for n, least in TIMES.items()}
        changed |= {id(f): noting(f, self._asked) for f in (os.times, resource.getrusage)}
        changed |= {id(getattr(owner, n)): noting(getattr(owner, n), self._placed) for owner, n in PLACES}
        changed[id(os.urandom)] = noting(os.urandom, self._drawn)
        for module, said, names in _SEEDS:
            changed |= {id(getattr(module, n)): noting(getattr(module, n), partial(self._seeded, said)) for n in names}
        changed[id(hash)] = noting(hash, self._hashed)
        changed[id(id)] = noting(id, self.numbered)
        changed |= {id(f): noting(f, self._looked) for f in (open, os.stat)}
        everywhere(changed)
        datetime.datetime = _dated(datetime.datetime, self._asked)  # type: ignore[misc]
        datetime.date = _dated(datetime.date, self._asked)  # type: ignore[misc]
        weakref.ref = _weak(weakref.ref, self._weakly)
        weakref.KeyedRef.__new__ = staticmethod(noting(weakref.KeyedRef.__new__, lambda frame, kind, *args: self._weakly(frame, *args)))  # type: ignore[method-assign]
        random.Random.seed = noting(random.Random.seed, self._seeds)  # type: ignore[method-assign]

    def _asked(self, frame: FrameType, *args: Any) -> None:
        if may_be_users(frame.f_code.co_filename):
            self.boundary.assume(CLOCK)

    def _dates(self, least: int, frame: FrameType, *args: Any) -> None:
        if len(args) < least:
            self._asked(frame)

    def _hashed(self, frame: FrameType, value: Any) -> None:
        """Text has another hash in every process, and that of most objects is their number. A method for the keys of dicts has its own use
        of it."""
        if type(value).__hash__ in (object.__hash__, torch.Tensor.__hash__):
            self.numbered(frame, value)
        code, drawn = frame.f_code, sys.flags.hash_randomization and _has_text(value)
        if drawn and code.co_name != "__hash__" and may_be_users(code.co_filename) and "site-packages" not in code.co_filename:
            self.boundary.note(HASHED)

    def numbered(self, frame: FrameType, value: Any) -> None:
        """An object has its number, and memory its address, for as long as it is there."""
        if not self.within or not may_be_users(frame.f_code.co_filename) or "site-packages" in frame.f_code.co_filename:
            return
        try:
            weakref.finalize(value, self._gone).atexit = False
        except TypeError:  # no object tells when it is gone: a number, a list
            self.boundary.note(NUMBERED)

    def _gone(self) -> None:
        if self.stepping:
            self.boundary.note(NUMBERED)

    def _weakly(self, frame: FrameType, value: Any, *args: Any) -> None:
        if self.within and isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter) and by_user(frame):
            self.boundary.note(WEAK)

    def _looked(self, frame: FrameType, *args: Any) -> None:
        """A file is opened, or asked for. What is only written is not looked at."""
        mode = next((a for a in args[1:] if isinstance(a, str) and set(a) <= set("rwxabt+")), "r")
        if self.within and not (set(mode) & set("wa") and "+" not in mode) and _by_own(frame):
            self.boundary.note(FILES)

    def _placed(self, frame: FrameType, *args: Any) -> None:
        if may_be_users(frame.f_code.co_filename) and self.stepping:
            self.boundary.note(f"{PLACE} are asked for in a step: another process has others")
        elif may_be_users(frame.f_code.co_filename):
            self.boundary.assume(f"{PLACE}, as the code asks them when it is built, decide on nothing")

    def _seeded(self, said: str, frame: FrameType, *args: Any) -> None:
        if args and args[0] is not None:
            self.seeded.add(said)

    def _seeds(self, frame: FrameType, generator: Any, *args: Any) -> None:
        """A generator of the user's own: without a seed it asks the operating system."""
        if not args or args[0] is None:
            self._drawn(frame)

    def _drawn(self, frame: FrameType, *args: Any) -> None:
        if not by_user(frame):
            return
        if self.stepping:
            self.boundary.note(DRAWN.format("the operating system"))
        else:
            self.boundary.assume(SYSTEM)

    def begin(self) -> None:
        """The first step begins: what is built was not to draw from generators that nobody has seeded."""
        now = generators()
        for said in self.before:
            if now[said] != self.before[said] and said not in self.seeded:
                self.boundary.note(DRAWN.format(said))
        for text in (*loops(), *callers()):
            self.boundary.assume(text)
        for asked in asks():
            self.boundary.note(asked)
        self.stepping = True


def _by_own(frame: FrameType | None) -> bool:
    """Whether the user's own code calls, itself or through Python's library, and does not load data."""
    if frame is None or not by_user(frame):
        return False
    own = False
    while frame is not None:
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        if _LOADING in file or (not own and (name in _MAKING or Path(file).stem in _MAKING or "site-packages" in file)):
            return False
        own = own or may_be_users(file)
        frame = frame.f_back
    return own


def _has_text(value: Any) -> bool:
    if isinstance(value, tuple | frozenset):
        return any(map(_has_text, value))
    return isinstance(value, str | bytes)


def _weak(kind: Any, made: Callable[..., None]) -> Any:
    """The class of weak references that tells of those that are made by this name."""

    class Telling(type):
        def __instancecheck__(cls, value: object) -> bool:
            return isinstance(value, kind)

    def new(cls: type, *args: Any) -> Any:
        made(sys._getframe(1), *args)
        return kind.__new__(kind if cls is telling else cls, *args)

    telling: Any = Telling(kind.__name__, (kind,), {"__module__": kind.__module__, "__slots__": (), "__new__": new})
    return telling


def _dated(kind: Any, asked: Callable[..., None]) -> Any:
    """The class of dates, or of times of days, that tells who asks for now. Those that were there before are of it too."""

    class Asked(type):
        def __instancecheck__(cls, value: object) -> bool:
            return isinstance(value, kind) if cls is made else super().__instancecheck__(value)

        def __subclasscheck__(cls, other: type) -> bool:
            return issubclass(other, kind) if cls is made else super().__subclasscheck__(other)

    def telling(name: str) -> Any:
        def call(cls: type, *args: Any, **kwargs: Any) -> Any:
            asked(sys._getframe(1))
            return getattr(super(made, cls), name)(*args, **kwargs)

        return classmethod(call)

    changed = {n: telling(n) for n in ("now", "utcnow", "today") if hasattr(kind, n)}
    made: Any = Asked(kind.__name__, (kind,), {"__module__": kind.__module__, "__slots__": (), **changed})
    return made


def generators() -> dict[str, object]:
    """How far the generators of Python and of NumPy that all code shares have come."""
    return {"random": random.getstate(), "numpy.random": _state_of(np.random.get_state(legacy=False))}


def _state_of(value: Any) -> object:
    """The state of a generator, as something that is compared quickly."""
    if isinstance(value, dict):
        return tuple((name, _state_of(part)) for name, part in value.items())
    return value.tobytes() if isinstance(value, np.ndarray) else value


def noting(function: Callable[..., Any], note: Callable[..., None]) -> Callable[..., Any]:
    """The same function; `note` is told who calls it, and with what."""

    def call(*args: Any, **kwargs: Any) -> Any:
        note(sys._getframe(1), *args, *kwargs.values())
        return function(*args, **kwargs)

    return call


def by_user(frame: FrameType | None) -> bool:
    """Whether the user's code calls, itself or through Python's library."""
    while frame is not None:
        file = frame.f_code.co_filename
        if may_be_users(file):
            return True
        if _IMPORTED in file or torchs(file) is not None or is_ours(file):
            return False
        frame = frame.f_back
    return False


__all__ = ["Chance", "by_user", "generators", "noting"]
