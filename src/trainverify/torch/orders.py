"""Loops over sets in the user's own files: another process goes through them in another order.

A set of text, or of objects without a hash of their own, is ordered by numbers that every process draws. Here all ranks have the same.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Final

from trainverify.torch.own_files import own_files, parsed

LOOP: Final = "{}:{} goes through a set: all ranks are taken to do so in one order, as with sorted()"
_SETS: Final = ("set", "frozenset")
_IN_ORDER: Final = ("list", "tuple", "enumerate", "iter", "zip", "map", "filter", "reversed", "next")


def loops() -> list[str]:
    """Of all modules that are the user's own, by line."""
    return [LOOP.format(Path(f).name, line) for f in own_files() for line in _lines(f)]


@cache
def _lines(file: str) -> tuple[int, ...]:
    tree = parsed(file)
    names = set(_named(tree))
    return tuple(sorted({e.lineno for e in _gone_through(tree) if _is_set(e, names)}))


def _named(tree: ast.AST) -> Iterator[str]:
    """Names that a file gives to sets, whole or of an object."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and _is_set(node.value, set()):
            yield from (ast.unparse(t) for t in node.targets)
        elif isinstance(node, ast.AnnAssign) and node.value is not None and _is_set(node.value, set()):
            yield ast.unparse(node.target)


def _gone_through(tree: ast.AST) -> Iterator[ast.expr]:
    for node in ast.walk(tree):
        if isinstance(node, ast.For | ast.comprehension):
            yield node.iter
        elif isinstance(node, ast.Starred):
            yield node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _IN_ORDER:
            yield from node.args
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "pop" and not node.args:
            yield node.func.value


def _is_set(node: ast.expr, names: Iterable[str]) -> bool:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub | ast.BitAnd | ast.BitOr | ast.BitXor):
        return _is_set(node.left, names) or _is_set(node.right, names) or _keys(node.left)
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id in _SETS
    return isinstance(node, ast.Set | ast.SetComp) or (isinstance(node, ast.Name | ast.Attribute) and ast.unparse(node) in names)


def _keys(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("keys", "items")


__all__ = ["loops"]
