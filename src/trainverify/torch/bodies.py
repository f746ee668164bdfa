"""Operators without a row that PyTorch itself writes in terms of others: what they do is what these bodies call.

These are custom operators of PyTorch's (the gathers of context parallelism), operators that only call others (when they come from another
body), and the formulas that its compiler has for kernels."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Final

import torch

from trainverify.torch.compositions import COMPOSITIONS
from trainverify.torch.frames import torchs
from trainverify.torch.mappings import COMPLEX, MAPPINGS
from trainverify.torch.mappings.foreach import single
from trainverify.torch.private import OPDEFS, decomposition_table, tree_leaves, tree_map

_WRITING: Final = frozenset(("aten::_native_batch_norm_legit", "aten::_batch_norm_with_update"))  # running statistics


@cache
def _formula(func: Any) -> Callable[..., Any] | None:
    """How PyTorch's compiler computes an operator that has no row."""
    name = str(func._schema.name)
    in_place = func._schema.is_mutable and ((name.endswith("_") and not name.endswith("__")) or name in _WRITING)
    plain = name.removesuffix("_") if in_place else name
    view = func.is_view and func.namespace == "aten"  # read where it lies
    has_row = view or plain in MAPPINGS or plain in COMPLEX or single(plain.removeprefix("aten::")) is not None
    if has_row or (func._schema.is_mutable and not in_place) or torch.Tag.nondeterministic_seeded in func.tags:
        return None
    composed = COMPOSITIONS.get(plain)
    if composed is not None and in_place:
        return lambda self, *args, **kwargs: self.copy_(composed(self, *args, **kwargs))
    found: Callable[..., Any] | None = composed or decomposition_table.get(func)
    if found is None or func._schema.is_mutable or any(r.alias_info is not None for r in func._schema.returns):
        return found
    formula = found
    return lambda *args, **kwargs: _apart(formula(*args, **kwargs), (args, kwargs))


def _apart(made: Any, given: Any) -> Any:
    """The results of a formula, none of which shares memory with an argument or another result: those of a kernel do not."""
    seen = {t.untyped_storage()._cdata for t in tree_leaves(given) if isinstance(t, torch.Tensor)}

    def own(t: Any) -> Any:
        if not isinstance(t, torch.Tensor):
            return t
        t = t.clone() if t.untyped_storage()._cdata in seen else t
        seen.add(t.untyped_storage()._cdata)
        return t

    return tree_map(own, made)


def python_body(func: Any) -> Callable[..., Any] | None:
    """The body of an operator of PyTorch's, where it is the only one for all devices and says what it writes."""
    if func.namespace == "aten":
        name = str(func._schema.name)
        if name not in MAPPINGS and name not in COMPLEX and func._can_decompose():
            return lambda *args, **kwargs: func.decompose(*args, **kwargs)
        return _formula(func)
    found = OPDEFS.get(func._schema.name) if func._overloadname == "default" else None
    if found is None or func._schema.is_mutable or len(found._backend_fns) != 1:
        return None
    body: Callable[..., Any] = found._init_fn
    return body if torchs(body.__code__.co_filename) is not None else None
