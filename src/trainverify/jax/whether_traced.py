"""Code that asks whether it is traced: where the step runs without a trace it gets another answer, and may go another way.

Only the arrays of the outermost trace count, which this program makes: what a jit or a loop within the step traces, it traces in a run
too. A step that is jitted itself never sees them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Final
from unittest.mock import patch

import jax.extend.core
from jax._src import core
from jax._src.array import ArrayImpl

import jax
from trainverify.jax.lines import installed, shown
from trainverify.translate.emit import Unmapped

_NO_VALUES: Final = frozenset(("block_until_ready", "copy_to_host_async"))  # what runs have, and what does not change what they compute
_TRACE: Final = str(Path(__file__).with_name("trace.py"))  # where our traces begin
_TRACING: Final = tuple(f"{Path(str(core.__file__)).parent}{os.sep}{n}" for n in ("pjit.py", f"lax{os.sep}control_flow"))
_STATE: Final = ("trace_state_clean", "unsafe_am_i_under_a_jit")  # functions about the trace
_PUBLIC: Final = {"unsafe_am_i_under_a_jit": "unsafe_am_i_under_a_jit_DO_NOT_USE"}  # where JAX's public name is another


class _Questions:
    """What the user's code asked, with the traces that are ours."""

    def __init__(self) -> None:
        self.outermost: list[Any] = []
        self.found: list[str] = []

    def begin(self) -> None:
        """To be called within each trace, before the step is."""
        self.outermost.append(core.trace_ctx.trace)

    def begun(self, x: Any) -> bool:
        """Whether an array is one of an outermost trace."""
        return any(x._trace is t for t in self.outermost)

    def note(self, what: str) -> None:
        """A question of the caller's caller."""
        frame = sys._getframe(2)
        file = frame.f_code.co_filename
        if self.outermost and not installed(file):
            self.found.append(f"{shown(file, os.getcwd())}:{frame.f_lineno} asks {what}")


def _within_jit() -> bool:
    """Whether a jit, or a loop, is traced here: also in a run. An eager shard_map, a gradient or vmap then has arrays with content."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename != _TRACE:
        if frame.f_code.co_filename.startswith(_TRACING):
            return True
        frame = frame.f_back
    return False


class _Asked(type):
    """The type of what stands for JAX's type of traced arrays while questions are noted."""

    questions: _Questions

    def __instancecheck__(cls, x: Any) -> bool:
        found = isinstance(x, core.Tracer)
        if found and cls.questions.begun(x):
            cls.questions.note("whether an array is traced")
        return found

    def __subclasscheck__(cls, other: type) -> bool:
        return issubclass(other, core.Tracer)


def _about_array(asked: _Questions, plain: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def is_concrete(x: Any) -> Any:
        if isinstance(x, core.Tracer) and not _within_jit():
            asked.note("whether an array is traced")
        return plain(x)

    return is_concrete


def _about_trace(asked: _Questions, plain: Callable[[], Any]) -> Callable[[], Any]:
    def state() -> Any:
        if not _within_jit():
            asked.note("whether something is traced")
        return plain()

    return state


def _attribute(asked: _Questions, plain: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
    def get(self: Any, name: str) -> Any:
        try:
            return plain(self, name)
        except AttributeError:
            if hasattr(ArrayImpl, name) and name not in _NO_VALUES and asked.begun(self):
                asked.note(f"an array for {name}, which traced arrays do not have")
            raise

    return get


def _stands(asked: _Questions) -> dict[str, tuple[Any, Any]]:
    """What users have of JAX by its public name, and what stands for it meanwhile."""
    spy = _Asked("Tracer", (), {})
    spy.questions = asked
    found = {"Tracer": (core.Tracer, spy), "is_concrete": (core.is_concrete, _about_array(asked, core.is_concrete))}
    return found | {_PUBLIC.get(n, n): (getattr(core, n), _about_trace(asked, getattr(core, n))) for n in _STATE}


@contextmanager
def _replaced(space: dict[str, Any], name: str, value: Any) -> Iterator[None]:
    before = space.get(name, space)
    space[name] = value
    try:
        yield
    finally:
        if space.get(name) is value:  # unless the step has set it meanwhile
            if before is space:
                del space[name]
            else:
                space[name] = before


@contextmanager
def none_asked() -> Iterator[Callable[[], None]]:
    """No verdict if the user's code asks such a question here. Gives what is to be called within each trace."""
    asked = _Questions()
    stands = _stands(asked)
    by_value = {id(value): stand for value, stand in stands.values()}
    with ExitStack() as stack:
        for public in (jax.core, jax.extend.core):
            for name, (_, stand) in stands.items():
                stack.enter_context(_replaced(vars(public), name, stand))
        for name in ("is_concrete", *_STATE):  # JAX calls these too: no questions of the user's
            stack.enter_context(_replaced(vars(core), name, stands[_PUBLIC.get(name, name)][1]))
        for space in _of_users():
            for name, value in list(space.items()):
                if id(value) in by_value:
                    stack.enter_context(_replaced(space, name, by_value[id(value)]))
        stack.enter_context(patch.object(core.Tracer, "__getattr__", _attribute(asked, core.Tracer.__getattr__)))
        yield asked.begin
    if asked.found:
        raise Unmapped(f"{asked.found[0]} while the step is traced: without tracing, it may go another way")


def _of_users() -> list[dict[str, Any]]:
    """The names of modules that are not libraries'."""
    files = ((m, getattr(m, "__file__", None)) for m in list(sys.modules.values()))
    return [vars(m) for m, file in files if file and not installed(file) and not _stdlib(file)]


def _stdlib(file: str) -> bool:
    return file.startswith(os.path.dirname(os.__file__)) and "site-packages" not in file


__all__ = ["none_asked"]
