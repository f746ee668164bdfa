"""Errors of JAX that code catches while it is traced: a traced array has no number. Run without tracing, such code goes another way."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import jaxlib

import jax
from trainverify.jax.lines import shown
from trainverify.translate.emit import Unmapped

_SORTS: Final = (jax.errors.JAXTypeError, jax.errors.JAXIndexError)  # those of traced arrays are of these
_LIBRARIES: Final = tuple(f"{Path(str(m.__file__)).parent}{os.sep}" for m in (jax, jaxlib))


@contextmanager
def none_caught() -> Iterator[None]:
    """No verdict if code other than JAX's own catches such an error here."""
    made: list[BaseException] = []
    before = [(sort, sort.__init__) for sort in _SORTS]
    for sort, init in before:
        sort.__init__ = _noting(init, made)
    try:
        yield
    finally:
        for sort, init in before:
            sort.__init__ = init
    try:
        for error in made:
            _check(error)
    finally:
        made.clear()  # frames hold on to what was traced


def _noting(init: Any, made: list[BaseException]) -> Any:
    def noted(self: BaseException, *given: Any, **named: Any) -> None:
        made.append(self)
        init(self, *given, **named)

    return noted


def _check(error: BaseException) -> None:
    """The traceback of an error begins in the frame that caught it."""
    trace = error.__traceback__
    if trace is None or trace.tb_frame.f_code.co_filename.startswith(_LIBRARIES):
        return
    where = f"{shown(trace.tb_frame.f_code.co_filename, os.getcwd())}:{trace.tb_lineno}"
    raise Unmapped(f"{where} catches {type(error).__name__} while the step is traced: without tracing, it would go another way")


__all__ = ["none_caught"]
