"""Operators for which GPUs have kernels of their own: which one runs changes no real number, so it is one that has a row."""

from __future__ import annotations

from typing import Any, Final

import torch

KEY: Final = "AutogradPrivateUse1"
_LIBRARIES: list[Any] = []  # registrations end with their libraries


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """`F.scaled_dot_product_attention`."""
    alike = query.shape[-1] == key.shape[-1] == value.shape[-1] and query.shape[:-3] == key.shape[:-3] == value.shape[:-3]
    heads = query.ndim == 4 and (query.shape[1] == key.shape[1] == value.shape[1] or enable_gqa)
    masked = attn_mask is not None and (attn_mask.requires_grad or is_causal or attn_mask.ndim not in (2, 4))
    if dropout_p or not alike or not heads or masked or type(query).__name__ == "DTensor":
        given = (query, key, value, attn_mask, dropout_p, is_causal)
        made: torch.Tensor = torch.ops.aten._scaled_dot_product_attention_math(*given, scale=scale, enable_gqa=enable_gqa)[0]
        return made
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(attn_mask.logical_not(), float("-inf"))
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    found: torch.Tensor = kernel(query, key, value, 0.0, is_causal, attn_mask=attn_mask, scale=scale)[0]
    return found


def dropout(x: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """`F.dropout`, as PyTorch writes it for devices without a kernel for it."""
    if p == 0 or not train or x.numel() == 0:
        return x
    if p == 1:
        return x * torch.zeros_like(x)
    return x * torch.empty_like(x).bernoulli_(1 - p).div_(1 - p)


def install() -> None:
    """For the rest of this process."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("scaled_dot_product_attention", attention, KEY)
    library.impl("dropout", dropout, KEY)
    _LIBRARIES.append(library)


__all__ = ["attention", "dropout", "install"]
