"""Everything that runs goes through here: a dispatch mode above fake tensors."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import FrameType
from typing import Any, Final

import torch

from trainverify.torch.beside import Beside, described
from trainverify.torch.bodies import python_body
from trainverify.torch.checks import check
from trainverify.torch.data_draws import Draws
from trainverify.torch.discover import NotSupported
from trainverify.torch.frames import torchs
from trainverify.torch.functional import Functional
from trainverify.torch.private import FakeTensor, TorchDispatchMode, _disable_current_modes
from trainverify.torch.translate import Translator, is_computed

OVERFLOW: Final = "GradScaler finds no inf and no NaN: steps that it would skip, and whether ranks agree on them, are not compared"
_OWN: Final = frozenset(torch.library._impls)  # kernels that PyTorch itself writes in Python
_SILENT: Final = ("prim", "profiler")
_COLLECTIVES: Final = ("_c10d_functional", "_c10d_functional_autograd")
_PLAIN: Final = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, FakeTensor)
_MESH: Final = ("distributed/device_mesh.py", "distributed/_mesh_layout.py")
_PROPAGATION: Final = tuple(f"distributed/tensor/{n}.py" for n in ("_sharding_prop", "_op_schema", "_decompositions"))


class Recorder(TorchDispatchMode):
    """Hands every call on plain tensors to the translator; subclasses unwrap themselves first."""

    def __init__(self, translator: Translator, functional: Functional | None = None, beside: Beside | None = None):
        super().__init__()
        self.beside = beside
        self.translator = translator
        self.functional = functional
        self._inside: set[Any] = set()  # operators whose bodies run
        self.draws = Draws()
        translator.again = self

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(t not in _PLAIN for t in types):
            return NotImplemented
        with self.translator.boundary.passing():
            return self._passed(func, types, args, kwargs or {})

    def _passed(self, func: Any, types: Sequence[type], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if func.namespace in _SILENT:
            return func(*args, **kwargs)
        why = _beside()
        if why == "mesh":
            with _disable_current_modes():
                return func(*args, **kwargs)
        if why == "shapes":
            return func(*args, **kwargs)
        if func is torch.ops.aten._local_scalar_dense.default:
            return self.translator.item(args[0])
        if func is torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default:
            self.translator.boundary.assume(OVERFLOW)
        if not self.translator.real:
            drawn = self.draws.data(func, args, kwargs, self.translator.step is not None)
            if drawn is not None:
                return drawn
            check(self.translator, func, args, kwargs)
        given = self.translator.stood_in(func, args, kwargs)
        fault = self._fault(func, given.args, given.kwargs)
        if fault is None and func not in self._inside and (body := python_body(func)) is not None:
            made = self._by_body(func, body, args, kwargs)
            if made is not NotImplemented:
                return made
        if self.translator.real and func.namespace in _COLLECTIVES:
            raise NotSupported("functional collectives (DTensor) on real tensors")
        result = None if _only_writes(func, types) else func(*given.args, **given.kwargs)
        if func.namespace in _COLLECTIVES and self.functional is not None:
            self.functional.call(func, given.args, given.kwargs, result)
        else:
            self.translator.call(func, given.args, given.kwargs, result, fault)
        return given.originals.get(id(result), result)

    def _fault(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
        """What PyTorch computes otherwise than the mapping of a call, where that was found."""
        t = self.translator
        if self.beside is None or self._inside or not is_computed(func):
            return None
        if _replaced(func):
            return "the code registers a kernel of its own"
        if t.real:
            self.beside.unchecked["all calls"] = "the capture runs on real tensors"
            return None
        name = str(func._schema.name)
        if not (t.has_row(name) or (func.namespace == "aten" and python_body(func) is not None)):
            return None
        t.emitter.place = t.here()
        call = described(func, args, kwargs, t)
        return None if call is None else self.beside.fault(call, t)

    def _by_body(self, func: Any, body: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What an operator does by the calls of its body; NotImplemented if that does not work for these arguments, or calls what has no
        row: then the operator itself is named."""
        t = self.translator
        missing = {name: replace(m) for name, m in t.missing.items()}
        self._inside.add(func)
        try:
            with self:
                made = body(*args, **kwargs)
        except Exception:  # whatever a formula says that is not made for such arguments: the call is recorded as it is
            made = NotImplemented
        finally:
            self._inside.discard(func)
        if func._schema.is_mutable or (made is not NotImplemented and t.missing == missing):
            return made
        t.missing.clear()
        t.missing.update(missing)
        return NotImplemented


def _replaced(func: Any) -> bool:
    """Whether the code has registered (`torch.library`) a kernel for an operator of PyTorch's; fake tensors do not run it."""
    overload = func._schema.overload_name
    name = func._schema.name.replace("::", "/") + (f".{overload}" if overload else "")
    if func.namespace != "aten" or len(torch.library._impls) == len(_OWN):
        return False
    return any(k.startswith(f"{name}/") and not _above(k) for k in torch.library._impls - _OWN)


def _above(kernel: str) -> bool:
    """Whether a kernel runs before calls get here: that of another layer than the devices'."""
    return kernel.rpartition("/")[2].startswith(("Autograd", "Autocast", "ADInplaceOrView", "FuncTorch"))


def _only_writes(func: Any, types: Sequence[type]) -> bool:
    """Fused optimizers on fake tensors have nothing to do, and without a Meta kernel PyTorch would run them on real ones of full size."""
    return FakeTensor in types and func._schema.name.startswith("aten::_fused_") and not func._schema.returns


def _beside() -> str | None:
    """What runs beside the user's program: `mesh`, device meshes that compute ranks, or `shapes`, DTensor that asks for global shapes."""
    frame: FrameType | None = sys._getframe(3)
    for _ in range(12):
        if frame is None:
            return None
        file = torchs(frame.f_code.co_filename)
        if file in _MESH:
            return "mesh"
        if file in _PROPAGATION:
            return "shapes"
        frame = frame.f_back
    return None
