"""Places are lines of the user's: what called the capture is none of them."""

from __future__ import annotations

import sys
from typing import Any

import pytest

pytest.importorskip("torch", reason="PyTorch is absent: captured code is not tested")

import typer

from trainverify.torch import script
from trainverify.torch.lines import user_frame


def function(source: str, file: str, **space: Any) -> Any:
    """A function as if it stood in a file."""
    exec(compile(source, file, "exec"), space)
    return space["f"]


def test_what_called_the_capture_is_no_place(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ours, above = script.__file__, typer.__file__
    here = function("def f():\n    return user_frame(sys._getframe(0))[0]", ours, user_frame=user_frame, sys=sys)

    def called(inner: Any) -> Any:
        captured = function("def capture_script(g):\n    return g()\nf = capture_script", ours)
        return function("def f(c, g):\n    return c(g)", above)(captured, inner)

    assert called(here) is None
    users = function("def f():\n\n    return g()", str(tmp_path / "train.py"), g=here)
    found = called(users)
    assert (found.file, found.line, found.caller) == ("train.py", 3, None)
