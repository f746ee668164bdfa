"""Everything that runs goes through here: a dispatch mode above fake tensors."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any, Final

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from trainverify.torch.bodies import python_body
from trainverify.torch.discover import NotSupported
from trainverify.torch.functional import Functional
from trainverify.torch.translate import Translator

_SILENT: Final = ("prim", "profiler", "prims")
_COLLECTIVES: Final = ("_c10d_functional", "_c10d_functional_autograd")
_PLAIN: Final = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, FakeTensor)
_MESH: Final = ("distributed/device_mesh.py", "distributed/_mesh_layout.py")
_PROPAGATION: Final = ("_sharding_prop.py", "_op_schema.py", "_decompositions.py")


class Recorder(TorchDispatchMode):
    """Hands every call on plain tensors to the translator; subclasses unwrap themselves first."""

    def __init__(self, translator: Translator, functional: Functional | None = None):
        super().__init__()
        self.translator = translator
        self.functional = functional
        translator.again = self

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(t not in _PLAIN for t in types):
            return NotImplemented
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
        if (body := python_body(func)) is not None:
            with self:
                return body(*args, **kwargs)
        if self.translator.real and func.namespace in _COLLECTIVES:
            raise NotSupported("functional collectives (DTensor) on real tensors")
        result = None if _only_writes(func, types) else func(*args, **kwargs)
        if func.namespace in _COLLECTIVES and self.functional is not None:
            self.functional.call(func, args, kwargs, result)
        else:
            self.translator.call(func, args, kwargs, result)
        return result


def _only_writes(func: Any, types: Sequence[type]) -> bool:
    """Fused optimizers on fake tensors have nothing to do, and without a Meta kernel PyTorch would run them on real ones of full size."""
    return FakeTensor in types and func._schema.name.startswith("aten::_fused_") and not func._schema.returns


def _beside() -> str | None:
    """What runs beside the user's program: `mesh`, device meshes that compute ranks, or `shapes`, DTensor that asks for global shapes."""
    frame: FrameType | None = sys._getframe(2)
    for _ in range(12):
        if frame is None:
            return None
        file = frame.f_code.co_filename
        if file.endswith(_MESH):
            return "mesh"
        if file.endswith(_PROPAGATION):
            return "shapes"
        frame = frame.f_back
    return None
