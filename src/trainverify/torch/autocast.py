"""Autocast on the device `cuda` of a capture: the operators that CUDA runs in the low precision, in float32, or in the widest type of their
arguments.

PyTorch's C++ has these lists for every kind of device but those that are written in Python. The rules for tensors on other devices, of
float64, and for weights that are cast once and kept until the outermost region ends, are those of `autocast_mode.h` too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

import torch

from trainverify.torch.discover import NotSupported
from trainverify.torch.patching import everywhere

KEY: Final = "AutocastPrivateUse1"
CASTS: Final = "casts are exact: autocast to {} changes no value"
NO_GRAD: Final = "autocast: a weight that was cast under no_grad is used where gradients are needed, in the same region"

CUDNN: Final = ("cudnn_convolution", "cudnn_convolution_transpose")
LOWER: Final = (
    *CUDNN,
    *("_convolution.deprecated", "_convolution", "conv1d", "conv2d", "conv3d", "conv_tbc", "conv_transpose1d", "conv_transpose2d.input"),
    *("conv_transpose3d.input", "convolution", "prelu", "addmm", "addmv", "addr", "matmul", "einsum", "mm", "mv", "linalg_vecdot"),
    *("linear", "addbmm", "baddbmm", "bmm", "chain_matmul", "linalg_multi_dot", "_thnn_fused_lstm_cell", "_thnn_fused_gru_cell"),
    *("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell", "_scaled_dot_product_flash_attention", "scaled_dot_product_attention"),
)
FLOAT32: Final = (
    *("acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt", "sinh", "tan"),
    *("pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "softplus", "layer_norm", "native_layer_norm", "rms_norm", "group_norm"),
    *("frobenius_norm.dim", "nuclear_norm", "nuclear_norm.dim", "cosine_similarity", "poisson_nll_loss", "cosine_embedding_loss"),
    *("nll_loss", "nll_loss2d", "hinge_embedding_loss", "kl_div", "l1_loss", "smooth_l1_loss", "huber_loss", "mse_loss"),
    *("margin_ranking_loss", "multilabel_margin_loss", "soft_margin_loss", "triplet_margin_loss", "multi_margin_loss"),
    *("binary_cross_entropy_with_logits", "dist", "pdist", "cdist", "renorm", "logsumexp", "upsample_nearest1d"),
    *("_upsample_nearest_exact1d", "upsample_nearest2d", "_upsample_nearest_exact2d", "upsample_nearest3d", "_upsample_nearest_exact3d"),
    *("upsample_linear1d", "upsample_bilinear2d", "_upsample_bilinear2d_aa", "upsample_trilinear3d", "upsample_bicubic2d"),
    "_upsample_bicubic2d_aa",
)
FLOAT32_RESULT: Final = (
    *("prod", "prod.dim_int", "softmax.int", "log_softmax.int", "cumprod", "cumsum", "linalg_vector_norm", "linalg_matrix_norm"),
    *("linalg_matrix_norm.str_ord", "sum", "sum.dim_IntList"),
)
NORMS: Final[Mapping[str, str]] = {"norm.Scalar": "norm.ScalarOpt_dtype", "norm.ScalarOpt_dim": "norm.ScalarOpt_dim_dtype"}
WIDEST: Final = (
    *("addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "grid_sampler", "index_put", "tensordot", "scatter_add"),
)
BANNED: Final = "binary_cross_entropy"

Kernel = Callable[..., Any]


class Notes(Protocol):
    def assume(self, text: str) -> None: ...

    def refused(self, error: NotSupported) -> NotSupported: ...


class Casts:
    """Casts under way in this process, and weights that were cast."""

    def __init__(self, notes: Notes):
        self.notes = notes
        self.kept: dict[int, tuple[torch.Tensor, torch.Tensor, bool]] = {}  # id of a weight → the weight, its cast, whether with a gradient

    def cast(self, value: Any, dtype: torch.dtype) -> Any:
        """A tensor, or tensors of a list, of another type."""
        if isinstance(value, list | tuple):
            return type(value)(self.cast(v, dtype) for v in value) if any(isinstance(v, torch.Tensor) for v in value) else value
        if not eligible(value) or value.dtype == dtype:
            return value
        lower = _lower()
        self.notes.assume(CASTS.format(str(lower).removeprefix("torch.")))
        weight = dtype == lower and value.dtype == torch.float32 and value.requires_grad and value.is_leaf and not value._is_view()
        if not weight or not torch.is_autocast_cache_enabled():
            return value.to(dtype)
        _, made, with_gradient = self.kept.get(id(value), (None, None, False))
        if made is None:
            made, with_gradient = value.to(dtype), torch.is_grad_enabled()
            self.kept[id(value)] = value, made, with_gradient
        if torch.is_grad_enabled() and not with_gradient:
            raise self.notes.refused(NotSupported(NO_GRAD))
        return made


def _lower() -> torch.dtype:
    return torch.get_autocast_dtype("cuda")


def eligible(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "cuda" and value.is_floating_point() and value.dtype != torch.float64


def _first(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    return next((v for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor)), None)


def _widest(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.dtype:
    """float32 if one tensor is of it, else the low precision; other types are an error."""
    found = _lower()
    for value in (*args, *kwargs.values()):
        for t in value if isinstance(value, list | tuple) else (value,):
            if eligible(t) and t.dtype not in (torch.float32, _lower()):
                raise RuntimeError("Unexpected floating ScalarType in at::autocast::prioritize")
            found = torch.float32 if eligible(t) and t.dtype == torch.float32 else found
    return found


def overload(name: str) -> Any:
    packet, _, overloaded = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overloaded or "default")


def _with_dtype(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with float32 as the type of the result, where none is given."""
    names = [a.name for a in op._schema.arguments]
    at = names.index("dtype")
    if len(args) > at:
        return (*args[:at], torch.float32 if args[at] is None else args[at], *args[at + 1 :]), kwargs
    return args, {**kwargs, "dtype": kwargs.get("dtype") or torch.float32}


def kernels(casts: Casts) -> dict[str, Kernel]:
    """What autocast runs for an operator, by name."""

    def all_to(dtype: Callable[..., torch.dtype]) -> Callable[[Any], Kernel]:
        def of(op: Any) -> Kernel:
            def run(*args: Any, **kwargs: Any) -> Any:
                to = dtype(args, kwargs)
                return op(*(casts.cast(v, to) for v in args), **{k: casts.cast(v, to) for k, v in kwargs.items()})

            return run

        return of

    def with_result(op: Any) -> Kernel:
        def run(*args: Any, **kwargs: Any) -> Any:
            if eligible(_first(args, kwargs)):
                args, kwargs = _with_dtype(op, args, kwargs)
            return op(*args, **kwargs)

        return run

    def norm(name: str) -> Kernel:
        op, names = overload(name), ("self", "p", "dim", "keepdim")

        def run(*args: Any, **kwargs: Any) -> Any:
            x = _first(args, kwargs)
            given = {**dict(zip(names, args, strict=False)), **kwargs}
            positional = [given.get(n, {"p": 2, "keepdim": False}.get(n)) for n in names if n in given or (n != "dim" and n != "keepdim")]
            return op(*positional, dtype=torch.float32 if eligible(x) else x.dtype)

        return run

    def banned(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(f"torch.nn.functional.{BANNED} and torch.nn.BCELoss are unsafe to autocast: use {BANNED}_with_logits")

    lower, full = all_to(lambda *given: _lower()), all_to(lambda *given: torch.float32)
    return {
        **{n: lower(overload(n)) for n in LOWER},
        **{n: full(overload(n)) for n in FLOAT32},
        **{n: with_result(overload(n)) for n in FLOAT32_RESULT},
        **{n: norm(to) for n, to in NORMS.items()},
        **{n: all_to(_widest)(overload(n)) for n in WIDEST},
        BANNED: banned,
    }


_LIBRARIES: list[Any] = []  # registrations end with their libraries


def install(notes: Notes) -> None:
    """For the rest of this process."""
    casts, off = Casts(notes), torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)

    def without_autocast(kernel: Kernel) -> Kernel:
        def run(*args: Any, **kwargs: Any) -> Any:
            with torch._C._ExcludeDispatchKeyGuard(off):
                return kernel(*args, **kwargs)

        return run

    others, listed = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    others.fallback(torch.library.fallthrough_kernel, KEY)
    for name, kernel in kernels(casts).items():
        listed.impl(name, without_autocast(kernel), KEY)
    _LIBRARIES.extend((others, listed))
    clear, enabled, enable = torch.clear_autocast_cache, torch.is_autocast_enabled, torch.set_autocast_enabled

    def cleared() -> None:
        casts.kept.clear()
        clear()

    changed: dict[str, Kernel] = {  # without the name of a device, PyTorch means the one that it has in C++
        "clear_autocast_cache": cleared,
        "is_autocast_enabled": lambda device_type="cuda": enabled(device_type),
        "set_autocast_enabled": lambda *given: enable(*(given if len(given) > 1 else ("cuda", *given))),
        "get_autocast_gpu_dtype": _lower,
        "set_autocast_gpu_dtype": lambda dtype: torch.set_autocast_dtype("cuda", dtype),
    }
    everywhere({id(getattr(torch, n)): function for n, function in changed.items()})
    for name, function in changed.items():
        setattr(torch, name, function)


__all__ = ["BANNED", "CUDNN", "FLOAT32", "FLOAT32_RESULT", "LOWER", "NORMS", "WIDEST", "eligible", "install", "kernels"]
