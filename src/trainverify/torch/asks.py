"""Code of the user's that asks whether it runs on fake tensors, or who calls it: a real run answers otherwise.

Code in installed packages may ask too, and is not looked at: names are found in the user's own files."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final

from trainverify.torch.own_files import own_files, parsed

ASKS: Final = "{}:{} asks for {}, by which a capture may be told from a real run"
CALLERS: Final = "{}:{} asks for the functions that call it ({}): nothing decides on those that a real run has not"
_OURS: Final = "trainverify"  # is imported by scripts that are verified
NAMED: Final = '{}:{} says "trainverify": nothing decides on whether that is there'
_FAKE: Final = frozenset(
    (
        *("FakeTensor", "fake_mode", "fake_device", "is_fake", "constant_propagation"),
        *("detect_fake_mode", "maybe_get_fake_mode", "unset_fake_temporarily", "active_fake_mode", "in_kernel_invocation"),
        *("_dispatch_keys", "_dispatch_key_set", "_dispatch_tls_local_include_set", "_dispatch_tls_is_dispatch_key_included"),
        *("_len_torch_dispatch_stack", "_get_dispatch_stack_at", "_get_dispatch_mode", "_get_current_dispatch_mode"),
        *("_get_current_dispatch_mode_stack", "_get_backend", "_is_functional_tensor", "ProcessGroupGloo", "ProcessGroupNCCL"),
        *("_has_symbolic_sizes_strides", "__subclasses__"),
    )
)
_FRAMES: Final = frozenset(("_getframe", "_current_frames", "currentframe", "extract_stack", "format_stack", "walk_stack", "print_stack"))
_ALL: Final = _FAKE | _FRAMES | {_OURS}


def asks() -> list[str]:
    """What decides on which answers: no verdict where code asks so."""
    return [ASKS.format(Path(f).name, line, name) for f in own_files() for line, name in _found(f) if name in _FAKE]


def callers() -> list[str]:
    """What is assumed of questions that other code asks as well."""
    found = [(Path(f).name, line, name) for f in own_files() for line, name in _found(f)]
    frames = [CALLERS.format(*place) for place in found if place[2] in _FRAMES]
    return frames + [NAMED.format(file, line) for file, line, name in found if name == _OURS]


@cache
def _found(file: str) -> tuple[tuple[int, str], ...]:
    return tuple(sorted({(line, name) for line, name in _names(parsed(file)) if name in _ALL}))


def _names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.lineno, node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value
        elif isinstance(node, ast.ImportFrom | ast.Import):
            names = [a.name for a in node.names] + ([node.module or ""] if isinstance(node, ast.ImportFrom) else [])
            yield from ((node.lineno, part) for name in names for part in name.split(".") if part != _OURS)


__all__ = ["asks", "callers"]
