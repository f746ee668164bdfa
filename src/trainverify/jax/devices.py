"""What user code asks about devices and processes while it is traced: the answers are those of this process, not of the user's run.

All of JAX's functions for that go by `xla_bridge.get_backend`, or by what it calls. Those that remember their answer forget it first, and
JAX itself gets versions that do not remember: so each is seen when user code calls it, whichever name it has there.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

from jax._src import util as jax_util
from jax._src import xla_bridge

import jax
import trainverify
from trainverify.check.findings import Finding
from trainverify.graph.mesh import Mesh
from trainverify.graph.program import Source
from trainverify.jax.lines import source_of

_ASKED: Final = (xla_bridge.__file__, jax_util.__file__)
_OWN: Final = tuple(f"{Path(str(m.__file__)).parent}{os.sep}" for m in (jax, trainverify))
_REMEMBERED: Final = ("local_devices", "process_count", "get_backend")
_NO_COUNTS: Final = frozenset(  # of devices
    ("process_index", "process_count", "process_indices", "host_id", "host_ids", "host_count", "default_backend")
)


@dataclass(frozen=True)
class Question:
    """A function of JAX about devices, and the line that calls it."""

    name: str
    source: Source | None


@contextmanager
def questions() -> Iterator[list[Question]]:
    """What user code asks meanwhile."""
    found: list[Question] = []
    plain = xla_bridge._get_backend_uncached
    with ExitStack() as stack:
        for name in _REMEMBERED:
            remembering = getattr(xla_bridge, name)
            getattr(remembering, "cache_clear", _nothing)()
            if name != "get_backend":
                stack.enter_context(patch.object(xla_bridge, name, getattr(remembering, "__wrapped__", remembering)))
        for name in ("get_backend", "_get_backend_uncached"):
            stack.enter_context(patch.object(xla_bridge, name, partial(_answered, found, plain)))
        yield found


def _nothing() -> None:
    pass


def _answered(found: list[Question], plain: Callable[[Any], Any], platform: Any = None) -> Any:
    name, frame = "get_backend", sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename in _ASKED:
        name, frame = frame.f_code.co_name, frame.f_back
    file = frame.f_code.co_filename
    if not file.startswith(_OWN):
        found.append(Question(name, source_of(((file, frame.f_lineno),))))
    return plain(platform)


def unanswered(asked: Sequence[Question], mesh: Mesh) -> list[Finding]:
    """Questions about devices, where there are not as many here as the mesh has ranks."""
    count = jax.device_count()
    hint = f"XLA_FLAGS=--xla_force_host_platform_device_count={mesh.size}"
    text = f"{{}} is called while the step is made: there are {count} devices here, {mesh} has {mesh.size}; set {hint}"
    return [
        Finding("TV504", text.format(q.name), None, None, q.source, hint, "unsupported")
        for q in dict.fromkeys(asked)
        if q.name not in _NO_COUNTS and count != mesh.size
    ]


def answered(asked: Sequence[Question]) -> tuple[str, ...]:
    """What is assumed about the user's run: it gets the answers of this process."""
    text = "a run gets the answer of this process, one on {} with {} devices: {} at {}"
    return tuple(text.format(jax.default_backend(), jax.device_count(), q.name, q.source) for q in dict.fromkeys(asked))


__all__ = ["Question", "answered", "questions", "unanswered"]
