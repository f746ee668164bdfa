"""Every row of the mapping against ATen, every argument different from its default at least once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is absent: captured code is not tested")

import torch.nn.functional as F  # noqa: E402

from capture.tracing import agree, ids, mask, positive, real, traced  # noqa: E402
from trainverify.torch.mappings import MAPPINGS  # noqa: E402
from trainverify.torch.mappings.creation import RANDOM  # noqa: E402
from trainverify.torch.mappings.foreach import FOREACH  # noqa: E402

A = torch.ops.aten


x, y, z, p = real(2, 3), real(2, 3) * 2 + 0.3, real(3), positive(2, 3)
q4, k4, v4 = real(2, 4, 5, 6), real(2, 2, 5, 6), real(2, 2, 5, 6)


def attention_backward(g: Any, q: Any, k: Any, v: Any) -> Any:
    k, v = k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1)
    out, logsumexp = A._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True, scale=0.3)
    return A._scaled_dot_product_flash_attention_for_cpu_backward(g, q, k, v, out, logsumexp, 0.0, True, scale=0.3)


def _copied_in(a: Any, b: Any) -> Any:
    """What rank 1 of 3 puts into FSDP2's buffer."""
    whole = torch.empty(27, dtype=torch.float64)
    return torch.ops.fsdp.all_gather_copy_in([a.reshape(-1), b], whole, [6, 3], 9, 1)[0]


def _unscaled(gradients: list[Any], factor: Any) -> list[Any]:
    made = [g.clone() for g in gradients]
    torch._amp_foreach_non_finite_check_and_unscale_(made, torch.zeros(()), factor)
    return made


def _split_into(a: Any) -> Any:
    """FSDP2's buffer of two ranks [2, 5], taken apart along dimension 1."""
    made = [torch.empty(2, 2, dtype=torch.float64), torch.empty(6, dtype=torch.float64).view(2, 3)]
    torch.ops.fsdp.split_with_sizes_copy(a, [2, 3], 1, out=made)
    return made


TIED = torch.tensor([[0.5, -1.0, 0.5, -1.0], [0.0, 0.0, 0.0, 0.0], [-2.0, 3.0, 3.0, 1.0]], dtype=torch.float64)
CONVOLUTIONS: list[tuple[Any, ...]] = [  # stride, padding, dilation, transposed, output padding, groups; argument, weight, bias
    (([2], [1], [3], False, [0], 2), real(2, 4, 9), real(6, 2, 2), real(6)),
    (([2, 1], [1, 2], [1, 2], False, [0, 0], 1), real(2, 3, 5, 7), real(4, 3, 2, 3), real(4)),
    (([1, 2, 1], [0, 1, 0], [1, 1, 1], False, [0] * 3, 1), real(1, 2, 3, 5, 4), real(3, 2, 2, 3, 1), real(3)),
    (([2], [1], [1], True, [1], 2), real(2, 4, 5), real(4, 3, 3), real(6)),
    (([2, 1], [1, 0], [1, 3], True, [1, 2], 1), real(2, 3, 4, 5), real(3, 4, 3, 2), real(4)),
    (([1, 2, 2], [0, 1, 1], [2, 1, 1], True, [1, 0, 1], 1), real(1, 2, 3, 2, 3), real(2, 3, 2, 3, 2), real(3)),
]


def convolution_backward(a: Any, w: Any, b: Any, options: Any) -> Any:
    g = A.convolution(a, w, b, *options) * 2
    return A.convolution_backward(g, a, w, [b.numel()], *options, [True] * 3)


CASES: list[tuple[str, Callable[..., Any], tuple[Any, ...]]] = [
    ("add", lambda a, b: A.add.Tensor(a, b, alpha=3), (x, y)),
    ("add", lambda a: A.add.Scalar(a, 0.7, 3), (x,)),
    ("add", lambda a: a + 2, (ids(5, 3),)),
    ("sub", lambda a, b: A.sub.Tensor(a, b, alpha=0.3), (x, z)),
    ("rsub", lambda a: A.rsub.Scalar(a, 0.7, 3), (x,)),
    ("mul", lambda a, b: a * b * 1.4142135623730951 * 0.3, (x, z)),
    ("div", lambda a, b: (a / b) / 3 / 1.4142135623730951, (x, y)),
    ("div", lambda a: A.div.Tensor_mode(a, 2, rounding_mode="floor"), (ids(9, 5),)),
    ("pow", lambda a: a**3 + a**2 + a**0.5, (p,)),
    ("pow", lambda a: 10000.0**a, (x,)),
    ("neg", lambda a: -a, (x,)),
    ("abs", torch.abs, (x,)),
    ("sign", torch.sign, (x,)),
    ("sgn", torch.sgn, (x,)),
    ("floor", torch.floor, (x * 7,)),
    ("relu", torch.relu, (x,)),
    *((n, getattr(torch, n), (p,)) for n in ("reciprocal", "sqrt", "rsqrt", "exp", "log", "sin", "cos", "tanh", "erf", "sigmoid")),
    *((n, getattr(torch, n), (p,)) for n in ("expm1", "log1p")),
    ("logical_not", torch.logical_not, (mask(4),)),
    *((n, getattr(torch, n), (x, y)) for n in ("lt", "le", "gt", "ge", "eq", "ne", "minimum", "maximum", "logaddexp")),
    *((n, lambda a, n=n: getattr(torch, n)(a, 2), (ids(5, 7),)) for n in ("lt", "le", "gt", "ge", "eq", "ne")),
    ("logical_and", torch.logical_and, (mask(4), mask(4))),
    ("logical_or", torch.logical_or, (mask(4), mask(4))),
    ("bitwise_and", lambda a, b: a & b, (mask(4), mask(4))),
    ("bitwise_and", lambda a: (a - 3) & 3, (ids(9, 7),)),
    ("bitwise_right_shift", lambda a: A.bitwise_right_shift(a - 3, 1), (ids(9, 7),)),
    ("bitwise_left_shift", lambda a: A.bitwise_left_shift(a - 3, 2), (ids(9, 7),)),
    ("__rshift__", lambda a: A.__rshift__(a - 3, 1), (ids(9, 7),)),
    ("__lshift__", lambda a: A.__lshift__(a - 3, 2), (ids(9, 7),)),
    ("bitwise_or", lambda a, b: a | b, (mask(4), mask(4))),
    ("bitwise_not", lambda a: ~a, (mask(4),)),
    ("clamp", lambda a: a.clamp(-0.2, 0.3) + a.clamp(max=0.1) + a.clamp(min=0.1), (x,)),
    ("clamp_min", lambda a: A.clamp_min(a, 0.2), (x,)),
    ("clamp_max", lambda a: A.clamp_max(a, 0.2), (x,)),
    ("where", torch.where, (mask(2, 3), x, y)),
    ("lerp", lambda a, b: torch.lerp(a, b, 0.3), (x, y)),
    ("addcmul", lambda a, b, c: torch.addcmul(a, b, c, value=0.3), (x, y, p)),
    ("addcdiv", lambda a, b, c: torch.addcdiv(a, b, c, value=0.3), (x, y, p)),
    ("masked_fill", lambda a, m: a.masked_fill(m, 0.5), (x, mask(2, 3))),
    ("masked_fill", lambda a, m, v: a.masked_fill(m, v), (x, mask(2, 3), real())),
    ("tril", lambda a: a.tril(-1), (real(3, 4),)),
    ("triu", lambda a: a.triu(1), (real(3, 4),)),
    ("silu", F.silu, (x,)),
    ("silu_backward", A.silu_backward, (x, y)),
    ("gelu", lambda a: F.gelu(a) + F.gelu(a, approximate="tanh"), (x,)),
    ("gelu_backward", lambda g, a: A.gelu_backward(g, a) + A.gelu_backward(g, a, approximate="tanh"), (x, y)),
    ("softplus", lambda a: F.softplus(a, threshold=30.0), (x,)),
    ("threshold_backward", lambda g, a: A.threshold_backward(g, a, 0), (x, y)),
    ("sigmoid_backward", A.sigmoid_backward, (x, p)),
    ("tanh_backward", A.tanh_backward, (x, p)),
    ("zeros", lambda a: torch.zeros(2, 3, dtype=torch.float64) + a, (x,)),
    ("new_zeros", lambda a: a.new_zeros(4), (x,)),
    ("zeros_like", torch.zeros_like, (x,)),
    ("zero", lambda a: a.clone().zero_(), (x,)),
    ("zeros_like", lambda a: torch.zeros_like(a, dtype=torch.int64), (x,)),
    ("new_zeros", lambda a: a.new_zeros(4, dtype=torch.int64), (x,)),
    ("ones_like", lambda a: torch.ones_like(a, dtype=torch.bool), (x,)),
    ("new_ones", lambda a: a.new_ones(4, dtype=torch.int64), (x,)),
    ("full_like", lambda a: torch.full_like(a, 3, dtype=torch.int64), (x,)),
    ("new_full", lambda a: a.new_full((4,), 3, dtype=torch.int64), (x,)),
    ("arange", lambda a: torch.arange(2, 11, 3, dtype=torch.float64) + a.sum(), (x,)),
    ("embedding", lambda w, i: A.embedding(w, i, 1, True, True), (real(5, 3), ids(5, 2, 4))),
    ("gather", lambda a, i: A.gather(a, 1, i, sparse_grad=True), (x, ids(3, 2, 5))),
    ("index_add", lambda a, i, v: a.index_add(0, i, v, alpha=0.3), (x, ids(2, 5), real(5, 3))),
    ("sum", lambda a: a.sum(1, dtype=torch.int64), (x * 5,)),
    ("mean", lambda a: a.mean(1, keepdim=True, dtype=torch.float32), (ids(7, 3, 4),)),
    ("prod", lambda a: a.prod(1, dtype=torch.float64), (mask(3, 4),)),
    ("prod", lambda a: a.prod(1, dtype=torch.int64), (x * 5,)),
    ("cumsum", lambda a: a.cumsum(1, dtype=torch.int64), (x * 5,)),
    ("cumsum", lambda a: a.cumsum(1), (mask(3, 4),)),
    ("linalg_vector_norm", lambda a: torch.linalg.vector_norm(a, dtype=torch.float64), (x.float(),)),
    ("norm", lambda a: A.norm.ScalarOpt_dtype(a, 3, dtype=torch.float64), (x.float(),)),
    ("var", lambda a: A.var.dim(a, [1], False, True) + A.var.default(a, False), (x,)),
    ("topk", lambda a: a.topk(1, 1, sorted=False), (real(5, 3),)),
    ("topk", lambda a: (a.topk(1, 0), a.sum().topk(1, -1)), (real(5, 3),)),
    ("div", lambda a, b: A.div.Tensor_mode(a * 9, b, rounding_mode="trunc"), (x, y)),
    *((n, getattr(torch, n), (x * 7,)) for n in ("trunc", "frac", "ceil", "sinh", "cosh", "tan", "exp2", "erfc")),
    *((n, getattr(torch, n), (p,)) for n in ("log2", "log10")),
    *((n, lambda a, b, n=n: getattr(torch, n)(a * 9, b), (x, y)) for n in ("fmod", "remainder")),
    *((n, lambda a, n=n: getattr(torch, n)(a * 9, -0.7), (x,)) for n in ("fmod", "remainder")),
    ("clamp", lambda a, b: a.clamp(b * 0.2, b), (x, p)),
    ("clamp_min", lambda a, b: A.clamp_min.Tensor(a, b), (x, y)),
    ("clamp_max", lambda a, b: A.clamp_max.Tensor(a, b), (x, y)),
    ("softplus", lambda a: F.softplus(a, threshold=0.2) + F.softplus(a * 9, beta=3.0, threshold=1.5) + F.softplus(a * 30, beta=0.5), (x,)),
    ("threshold_backward", lambda g, a: A.threshold_backward(g, a, 0.3), (x, y)),
    ("var", lambda a: a.var(1, correction=0.5) + a.var(1, correction=2), (x,)),
    ("var_mean", lambda a: torch.var_mean(a, 1, correction=1.5), (x,)),
    (
        "linalg_vector_norm",
        lambda a: torch.linalg.vector_norm(torch.relu(a), 0, dim=1) + torch.linalg.vector_norm(a, -torch.inf, dim=1),
        (x,),
    ),
    ("norm", lambda a: A.norm.Scalar(torch.relu(a), 0) + A.norm.Scalar(a, -torch.inf), (x,)),
    ("cat", lambda a: torch.cat([a], 1), (x,)),
    ("constant_pad_nd", lambda a: A.constant_pad_nd(a, [], 0.5), (x,)),
    ("slice_backward", lambda g: A.slice_backward(g, [2, 3], 1, -9, 3, 1), (x,)),
    *((n, lambda a, n=n: getattr(torch, n)(a.sum(), 0), (x,)) for n in ("cumsum", "sum", "amax", "logsumexp")),
    ("_softmax", lambda a: a.sum().softmax(0), (x,)),
    ("_log_softmax", lambda a: a.sum().log_softmax(-1), (x,)),
    ("_softmax_backward_data", lambda g, a: A._softmax_backward_data(g.sum(), a.sum(), 0, torch.float64), (x, y)),
    ("_log_softmax_backward_data", lambda g, a: A._log_softmax_backward_data(g.sum(), a.sum(), -1, torch.float64), (x, y)),
    ("embedding_dense_backward", lambda g, i: A.embedding_dense_backward(g, i, 5, 1, False), (real(2, 4, 3), ids(5, 2, 4))),
    ("nll_loss_forward", lambda a, t: A.nll_loss_forward(a, t[0], None, 1, 2), (real(4), ids(4, 7))),
    ("nll_loss_backward", lambda a, t, g: A.nll_loss_backward(g, a, t[0], None, 0, 2, g), (real(4), ids(4, 7) * 0 + 1, real())),
    ("nll_loss_backward", lambda a, t, g, w: A.nll_loss_backward(g, a, t, None, 1, 2, w), (real(7, 4), ids(4, 7), real(), positive())),
    ("nll_loss_backward", lambda a, t, g: A.nll_loss_backward(g, a, t, None, 0, 2, g.sum()), (real(7, 4), ids(4, 7), real(7))),
    ("index_add", lambda a, i, v: a.index_add(1, i, v, alpha=0.3), (real(2, 3, 4), ids(3, 5), real(2, 5, 4))),
    ("index_select", lambda a, i: a.sum().index_select(0, i * 0), (x, ids(3, 1))),
    ("gather", lambda a, i: a.sum().gather(0, i * 0), (x, ids(3, 4))),
    ("scatter", lambda a, i: a.scatter(1, i, 0.5), (real(3, 4), ids(4, 3, 3))),
    ("scatter", lambda a, i: a.scatter(0, i, 0.5), (real(3, 4), ids(3, 2, 3))),
    ("scatter", lambda a, s: a.scatter(1, torch.tensor([[2, 0], [0, 1]]), s), (x, real(2, 2))),
    ("scatter", lambda a, s: a.scatter(1, a.topk(2, 1)[1], s), (x, real(2, 2))),
    ("index", lambda a, i, j: a[:, i, j], (real(2, 3, 4), ids(3, 5), ids(4, 2, 5))),
    ("_unsafe_index", lambda a, i, j: A._unsafe_index(a, [i, j]), (x, ids(2, 5), ids(3, 5))),
    ("index_put", lambda a, i, j, v: a.index_put((i, j), v, accumulate=True), (real(2, 3, 4), ids(2, 5), ids(3, 5), real(5, 4))),
    ("_unsafe_index_put", lambda a, i, v: A._unsafe_index_put(a, [None, i], v, True), (x, ids(3, 5), real(2, 5))),
    ("_index_put_impl", lambda a, i, v: A._index_put_impl(a, [i], v, True, True), (x, ids(2, 5), real(5, 3))),
    ("min", lambda a: a.min(1, keepdim=True)[0], (x,)),
    (
        "_scaled_dot_product_flash_attention_for_cpu",
        lambda q, k, v, m: A._scaled_dot_product_flash_attention_for_cpu(q, k, v, attn_mask=m, scale=0.3),
        (q4, q4 * 2, q4 + 1, real(5, 5)),
    ),
    ("all_gather_copy_in", lambda a, b: _copied_in(a, b), (x, z)),
    (
        "chunk_cat",
        lambda a, b: torch.ops.fsdp.chunk_cat([a, b], 0, 2, out=(made := torch.empty(2, 6).double())) or made,
        (real(3, 2), real(4)),
    ),
    ("split_with_sizes_copy", lambda a: _split_into(a), (real(2, 5),)),
    ("ones", lambda a: torch.ones(2, 3, dtype=torch.float64) + a, (x,)),
    ("new_ones", lambda a: a.new_ones(4), (x,)),
    ("ones_like", torch.ones_like, (x,)),
    ("full", lambda a: torch.full((2, 3), 0.7, dtype=torch.float64) + a, (x,)),
    ("new_full", lambda a: a.new_full((4,), 0.7), (x,)),
    ("full_like", lambda a: torch.full_like(a, 0.7), (x,)),
    ("fill", lambda a: a.clone().fill_(0.7), (x,)),
    ("fill", lambda a, b: a.clone().fill_(b), (x, real())),
    ("scalar_tensor", lambda a: A.scalar_tensor(3.0, dtype=torch.float64) + a, (x,)),
    ("arange", lambda a: torch.arange(1, 6, 2) * a, (ids(5, 3),)),
    ("clone", torch.clone, (x,)),
    ("_to_copy", lambda a: a.to(torch.float32) + a.to(torch.int64), (x * 5,)),
    ("_conj_physical", A._conj_physical, (x,)),
    ("lift_fresh_copy", A.lift_fresh_copy, (x,)),
    ("alias_copy", A.alias_copy, (x,)),
    ("copy", lambda a, b: a.clone().copy_(b), (x, z)),
    ("cat", lambda a, b: torch.cat([a, b, a], 1), (x, real(2, 4))),
    ("stack", lambda a, b: torch.stack([a, b], 1), (x, y)),
    ("repeat", lambda a: a.repeat(2, 1, 3), (x,)),
    ("flip", lambda a: a.flip(1), (x,)),
    ("roll", lambda a: a.roll((1, 2), (0, 1)), (x,)),
    ("constant_pad_nd", lambda a: F.pad(a, (1, 2, 0, 1), value=0.5), (x,)),
    ("slice_backward", lambda g: A.slice_backward(g, [2, 9], 1, 2, 5, 1), (x,)),
    ("slice_backward", lambda g: A.slice_backward(g, [2, 9], 1, 1, 8, 3), (x,)),
    ("select_backward", lambda g: A.select_backward(g, [2, 5, 3], 1, -2), (x,)),
    ("split_with_sizes_copy", lambda a: A.split_with_sizes_copy(a, [1, 2], 1), (x,)),
    ("view_copy", lambda a: A.view_copy(a, [3, 2]), (x,)),
    ("sum", lambda a: a.sum(), (x,)),
    ("sum", lambda a: a.sum(1, keepdim=True, dtype=torch.float32), (x,)),
    ("sum", lambda a: a.sum(0), (mask(4, 3),)),
    ("mean", lambda a: a.mean() + a.mean(1, keepdim=True), (x,)),
    ("var", lambda a: a.var(1, correction=0, keepdim=True) + a.var(), (x,)),
    ("var_mean", lambda a: torch.var_mean(a, 1, correction=0, keepdim=True), (x,)),
    *((n, lambda a, n=n: getattr(torch, n)(a, dim=1, keepdim=True), (x,)) for n in ("amax", "amin", "logsumexp")),
    *((n, lambda a, n=n: getattr(torch, n)(a, dim=1, keepdim=True), (mask(3, 4),)) for n in ("any", "all")),
    ("max", lambda a, b: (a.max(), a.max(0, keepdim=True)[0], torch.max(a, b)), (x, y)),
    ("min", lambda a, b: (a.min(), a.min(1)[0], torch.min(a, b)), (x, y)),
    ("prod", lambda a: a.prod(1, keepdim=True), (x,)),
    ("linalg_vector_norm", lambda a: torch.linalg.vector_norm(a, 3, dim=1, keepdim=True) + torch.linalg.vector_norm(a), (x,)),
    ("linalg_vector_norm", lambda a: torch.linalg.vector_norm(a, float("inf")), (x,)),
    ("norm", lambda a: A.norm.ScalarOpt_dim(a, 3, [1], True), (x,)),
    ("cumsum", lambda a: a.cumsum(1), (x,)),
    ("mm", torch.mm, (x, real(3, 5))),
    ("bmm", torch.bmm, (real(2, 3, 4), real(2, 4, 5))),
    ("mv", A.mv, (x, z)),
    ("dot", torch.dot, (z, real(3) * 2)),
    ("addmm", lambda a, b, c: torch.addmm(a, b, c, beta=0.5, alpha=3), (real(5), x, real(3, 5))),
    ("addmm", lambda a, b, c: torch.addmm(a, b, c, beta=0), (real(5), x, real(3, 5))),
    ("baddbmm", lambda a, b, c: torch.baddbmm(a, b, c, beta=0.5, alpha=3), (real(2, 3, 5), real(2, 3, 4), real(2, 4, 5))),
    ("baddbmm", lambda b, c: torch.baddbmm(torch.empty(2, 3, 5, dtype=b.dtype), b, c, beta=0), (real(2, 3, 4), real(2, 4, 5))),
    ("nll_loss_forward", lambda a, t: A.nll_loss_forward(a, t, None, 1, 2), (real(7, 4), ids(4, 7))),
    ("nll_loss_forward", lambda a, t: A.nll_loss_forward(a, t, None, 2, -100), (real(7, 4), ids(4, 7))),
    ("nll_loss_forward", lambda a, t, w: A.nll_loss_forward(a, t, w, 1, 2), (real(7, 4), ids(4, 7), positive(4))),
    (
        "nll_loss_backward",
        lambda a, t, g, w: A.nll_loss_backward(g, a, t, w, 1, 2, A.nll_loss_forward(a, t, w, 1, 2)[1]),
        (real(7, 4), ids(4, 7), real(), positive(4)),
    ),
    (
        "nll_loss_backward",
        lambda a, t, g: A.nll_loss_backward(g, a, t, None, 1, 2, A.nll_loss_forward(a, t, None, 1, 2)[1]),
        (real(7, 4), ids(4, 7), real()),
    ),
    ("mse_loss", lambda a, b: F.mse_loss(a, b) + F.mse_loss(a, b, reduction="sum"), (x, y)),
    ("mse_loss_backward", lambda a, b, g: A.mse_loss_backward(g, a, b, 2), (x, y, real())),
    ("binary_cross_entropy_with_logits", lambda a, b: F.binary_cross_entropy_with_logits(a, b, reduction="sum"), (x, p)),
    ("_softmax", lambda a: torch.softmax(a, 0), (x,)),
    ("_log_softmax", lambda a: torch.log_softmax(a, 0), (x,)),
    ("_softmax_backward_data", lambda g, a: A._softmax_backward_data(g, torch.softmax(a, 0), 0, torch.float64), (x, y)),
    ("_log_softmax_backward_data", lambda g, a: A._log_softmax_backward_data(g, torch.log_softmax(a, 0), 0, torch.float64), (x, y)),
    ("embedding", lambda w, i: F.embedding(i, w), (real(5, 3), ids(5, 2, 4))),
    ("embedding_dense_backward", lambda g, i: A.embedding_dense_backward(g, i, 5, -1, False), (real(2, 4, 3), ids(5, 2, 4))),
    ("native_layer_norm", lambda a, w, b: A.native_layer_norm(a, [3, 4], w, b, 0.1), (real(2, 3, 4), real(3, 4), real(3, 4))),
    (
        "native_layer_norm_backward",
        lambda g, a, w, b: A.native_layer_norm_backward(g, a, [4], *A.native_layer_norm(a, [4], w, b, 0.1)[1:], w, b, [True] * 3),
        (real(2, 3, 4), real(2, 3, 4) * 2, real(4), real(4)),
    ),
    (
        "_scaled_dot_product_flash_attention_for_cpu",
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True, scale=0.3),
        (q4, k4, v4),
    ),
    (
        "_scaled_dot_product_flash_attention_for_cpu_backward",
        lambda g, q, k, v: attention_backward(g, q, k, v),
        (real(2, 4, 5, 6), q4, k4, v4),
    ),
    (
        "_scaled_dot_product_flash_attention_for_cpu_backward",
        lambda g, q, m: A._scaled_dot_product_flash_attention_for_cpu_backward(
            g, q, q, q, *A._scaled_dot_product_flash_attention_for_cpu(q, q, q, attn_mask=m), 0.0, False, attn_mask=m
        ),
        (real(2, 4, 5, 6), q4, real(5, 5)),
    ),
    ("floor_divide", lambda a: a[torch.arange(6) // 3], (real(5, 3),)),
    ("remainder", lambda a: a[torch.arange(6) % 3], (real(5, 3),)),
    ("gather", lambda a, i: a.gather(1, i), (x, ids(3, 2, 5))),
    ("index_select", lambda a, i: a.index_select(1, i), (x, ids(3, 4))),
    ("scatter_add", lambda a, i, s: a.scatter_add(1, i, s), (x, ids(3, 2, 5), real(2, 5))),
    ("scatter", lambda a, s: a.scatter(1, torch.tensor([[2], [0]]), s), (x, real(2, 1))),
    ("scatter", lambda a: a.scatter(1, torch.tensor([[2], [0]]), 0.5), (x,)),
    ("index", lambda a, i: a[:, i], (x, ids(3, 4, 2))),
    ("index", lambda a, i: a[torch.arange(5), i], (real(5, 3), ids(3, 5))),
    ("index_put", lambda a, m: a.clone().index_put_((m,), torch.tensor(0.5, dtype=torch.float64)), (x, mask(2, 3))),
    ("index_put", lambda a, i, v: a.index_put((i,), v, accumulate=True), (x, ids(2, 5), real(5, 3))),
    ("index_put", lambda a, i, v: a.index_put((torch.arange(5), i), v), (real(5, 3), ids(3, 5), real(5))),
    ("index_put", lambda i, v: torch.zeros(5, 3, dtype=torch.float64).index_put((torch.arange(5), i), v), (ids(3, 5), real(5))),
    ("index_add", lambda a, i, v: a.index_add(0, i, v), (x, ids(2, 5), real(5, 3))),
    ("topk", lambda a: a.topk(2, 0, largest=False), (real(5, 3),)),
    ("_chunk_cat", lambda a, b: A._chunk_cat([a, b], 0, 2), (real(3, 2), real(4))),
    ("index_put", lambda a, v: A.index_put(a, [None, torch.tensor([[3, 0], [1, 4]])], v), (real(2, 5, 3), real(2, 1, 2, 3))),
    ("index_put", lambda a, v: a.index_put((torch.tensor([1, 1]), torch.tensor([4, 2])), v), (real(2, 5, 3), real(3))),
    ("isnan", lambda a, i: (torch.log(a).isnan(), A.isnan(i)), (x, ids(5, 3))),
    *((n, getattr(torch, n), (x,)) for n in ("asinh", "atanh")),
    ("acosh", torch.acosh, (p + 1.5,)),
    ("lerp", torch.lerp, (x, y, p)),
    ("addbmm", lambda c, a, b: torch.addbmm(c, a, b, beta=0.3, alpha=0.7), (real(2, 5), real(3, 2, 4), real(3, 4, 5))),
    ("floor_divide", lambda i: i // 3, (ids(20, 3, 4) - 10,)),
    ("floor_divide", lambda a, b: A.floor_divide(a * 9, b), (x, y)),
    ("remainder", lambda i: i % 3, (ids(20, 3, 4) - 10,)),
    ("_efficientzerotensor", lambda a: A._efficientzerotensor([2, 3], dtype=torch.float64) + a, (x,)),
    *(
        ("binary_cross_entropy_with_logits", lambda a, t, w, v, r=r: A.binary_cross_entropy_with_logits(a, t, w, v, r), given)
        for r, given in enumerate(((x, p, positive(3), positive(2, 3)), (x * 9, p, p, positive(3)), (x, p, positive(2, 1), positive(3))))
    ),
    ("binary_cross_entropy_with_logits", lambda a, t, w: A.binary_cross_entropy_with_logits(a, t, None, w), (x, p, positive(3))),
    ("binary_cross_entropy_with_logits", lambda a, t, w: A.binary_cross_entropy_with_logits(a, t, w, None, 2), (x, p, positive(3))),
    ("linalg_vector_norm", lambda a: [torch.linalg.vector_norm(b, -1.5, dim=1) for b in (a, torch.relu(a))], (x,)),
    ("norm", lambda a: A.norm.ScalarOpt_dim(a, -2, [1], True), (x,)),
    ("prod", lambda a: (a[:, :0].prod(1), a[:0].prod()), (x,)),
    ("scatter_add", lambda a, i, s: a.scatter_add(1, i[:, :0], s), (x, ids(3, 2, 5), real(2, 5))),
    *((n, lambda a, n=n: [getattr(torch, n)(a, 1, k) for k in (False, True)], (TIED,)) for n in ("argmax", "argmin")),
    *((n, lambda a, n=n: [t for k in (False, True) for t in getattr(torch, n)(a, 1, k)], (TIED,)) for n in ("max", "min")),
    *(
        (n, lambda a, n=n: (getattr(A, n)(a), getattr(A, n)(a, None, True), getattr(A, n)(a[0, 0], 0)), (TIED,))
        for n in ("argmax", "argmin")
    ),
    ("max", lambda a: tuple((a > 0).max(0)), (TIED,)),
    ("sort", lambda a: (*a.sort(0, descending=True), *a[0, 0].sort()), (real(5, 3),)),
    ("sort", lambda a: tuple(a.sort(dim=1, stable=True, descending=True)), (TIED,)),
    ("kthvalue", lambda a: (*a.kthvalue(2, 0), *a.kthvalue(3, 1, True), *a[0, 0].kthvalue(1)), (real(5, 3),)),
    ("median", lambda a: (a.median(), *a.median(0), *a.median(1, True), a[0, :2].median()), (real(6, 3),)),
    *(("convolution", lambda a, w, b, o=o: A.convolution(a, w, b, *o), given) for o, *given in CONVOLUTIONS),
    *(("convolution_backward", lambda a, w, b, o=o: convolution_backward(a, w, b, o), given) for o, *given in CONVOLUTIONS),
    ("convolution", lambda a, w: A.convolution(a, w, None, [2], [1], [3], True, [2], 1), (real(2, 3, 5), real(3, 4, 2))),
    ("_amp_foreach_non_finite_check_and_unscale", lambda a, b: _unscaled([a, b], torch.tensor(0.25)), (x.float(), real(5).float())),
    ("_amp_foreach_non_finite_check_and_unscale", lambda a, s: _unscaled([a], s), (x.float(), real(1).float())),
]


@pytest.mark.parametrize(("name", "fn", "inputs"), [pytest.param(*c, id=f"{c[0]}-{i}") for i, c in enumerate(CASES)])
def test_row(name: str, fn: Callable[..., Any], inputs: tuple[Any, ...]) -> None:
    translator = agree(fn, *inputs)
    called = {n.partition("::")[2] for n in translator.calls}
    assert {name, f"{name}_"} & called


UNARY = ("sqrt", "rsqrt", "reciprocal", "neg", "abs", "exp", "log", "sign", "sigmoid", "tanh", "erf")
FOREACH_CASES: list[tuple[str, Callable[..., Any]]] = [
    ("_foreach_add", lambda a, b: torch._foreach_add([a, b], [b, a], alpha=3)),
    ("_foreach_add", lambda a, b: torch._foreach_add([a, b], 0.3)),
    ("_foreach_sub", lambda a, b: torch._foreach_sub([a, b], [0.3, 0.7])),
    ("_foreach_mul", lambda a, b: torch._foreach_mul([a, b], [0.3, 0.7])),
    ("_foreach_div", lambda a, b: torch._foreach_div([a, b], [b, a])),
    ("_foreach_pow", lambda a, b: torch._foreach_pow([a, b], 3)),
    ("_foreach_pow", lambda a, b: torch._foreach_pow([a, b], [3, 0.5])),
    ("_foreach_sub", lambda a, b: torch._foreach_sub([a, b], [b, a], alpha=3)),
    ("_foreach_div", lambda a, b: torch._foreach_div([a, b], [0.3, 0.7])),
    ("_foreach_mul", lambda a, b: torch._foreach_mul([a, b], torch.tensor(0.3, dtype=torch.float64))),
    ("_foreach_maximum", lambda a, b: torch._foreach_maximum([a, b], [0.3, 0.7])),
    ("_foreach_minimum", lambda a, b: torch._foreach_minimum([a, b], 0.5)),
    ("_foreach_addcdiv", lambda a, b: torch._foreach_addcdiv([a, b], [b, a], [a, a], [0.3, 0.7])),
    ("_foreach_norm", lambda a, b: torch._foreach_norm([a.float(), b.float()], 2, dtype=torch.float64)),
    ("_foreach_lerp", lambda a, b: torch._foreach_lerp([a, b], [b, a], [0.3, 0.7])),
    ("_foreach_maximum", lambda a, b: torch._foreach_maximum([a], [b])),
    ("_foreach_minimum", lambda a, b: torch._foreach_minimum([a], [b])),
    ("_foreach_clamp_max", lambda a, b: torch._foreach_clamp_max([a, b], 0.3)),
    ("_foreach_clamp_min", lambda a, b: torch._foreach_clamp_min([a, b], 0.3)),
    ("_foreach_lerp", lambda a, b: torch._foreach_lerp([a, b], [b, a], 0.3)),
    ("_foreach_addcmul", lambda a, b: torch._foreach_addcmul([a, b], [b, a], [a, a], [0.3, 0.7])),
    ("_foreach_addcdiv", lambda a, b: torch._foreach_addcdiv([a, b], [b, a], [a, a], 0.3)),
    ("_foreach_norm", lambda a, b: torch._foreach_norm([a, b], 3)),
    ("_foreach_copy", lambda a, b: torch._foreach_copy_([a.clone()], [b])),
    ("_foreach_zero", lambda a, b: [c := a.clone(), torch._foreach_zero_([c])][:1]),
    *((f"_foreach_{n}", lambda a, b, n=n: getattr(torch, f"_foreach_{n}")([a, b])) for n in UNARY),
]


def test_every_foreach_op_is_compared() -> None:
    assert {name for name, _ in FOREACH_CASES} == set(FOREACH)


@pytest.mark.parametrize(("name", "fn"), FOREACH_CASES)
def test_foreach(name: str, fn: Callable[..., Any]) -> None:
    translator = agree(fn, positive(2, 3), positive(2, 3) + 0.2)
    assert any(n.startswith(f"aten::{name}") for n in translator.calls)


ADAM = {"lr": 0.1, "beta1": 0.7, "beta2": 0.8, "weight_decay": 0.2, "eps": 0.01, "amsgrad": False, "maximize": False}
SGD = {"weight_decay": 0.2, "momentum": 0.6, "lr": 0.1, "dampening": 0.3, "nesterov": False, "maximize": False, "is_first_step": False}


@pytest.mark.parametrize("more", [{}, {"amsgrad": True, "maximize": True}, {"weight_decay": 0.0}, {"lr": torch.tensor(0.3)}])
@pytest.mark.parametrize("scaled", [None, 0.0, 1.0])
@pytest.mark.parametrize("name", ["_fused_adam", "_fused_adamw"])
def test_fused_adam(name: str, scaled: float | None, more: dict[str, Any]) -> None:
    """Two tensors of different sizes and step counts; `scaled` is found_inf."""

    def update(a: Any, b: Any, *state: Any) -> None:
        g, m, v, top = (list(state[i : i + 2]) for i in (0, 2, 4, 6))
        steps = [torch.tensor(3.0), torch.tensor(5.0)]
        extra = {} if scaled is None else {"grad_scale": torch.tensor(4.0), "found_inf": torch.tensor(scaled)}
        options = {**ADAM, **more, **extra}
        getattr(A, f"{name}_")([a, b], g, m, v, top if options["amsgrad"] else [], steps, **options)

    given = [t.float() for t in (real(2, 3), real(5), real(2, 3) * 2, real(5) * 3, real(2, 3) * 4, real(5) + 1)]
    given += [t.float() for t in (positive(2, 3), positive(5), positive(2, 3) / 2, positive(5) * 2)]
    translator = agree(update, *given, also=range(len(given)))
    assert f"aten::{name}_" in translator.calls


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"nesterov": True, "maximize": True, "dampening": 0.0},
        {"weight_decay": 0.0},
        {"momentum": 0.0},
        {"is_first_step": True},
        {"lr": torch.tensor(0.3)},
    ],
)
@pytest.mark.parametrize("scaled", [None, 0.0, 1.0])
def test_fused_sgd(scaled: float | None, more: dict[str, Any]) -> None:
    def update(a: Any, b: Any, *state: Any) -> None:
        g, m = list(state[:2]), list(state[2:])
        extra = {} if scaled is None else {"grad_scale": torch.tensor(4.0), "found_inf": torch.tensor(scaled)}
        if "is_first_step" in more:
            extra.pop("found_inf", None)
        options = {**SGD, **more, **extra}
        A._fused_sgd_([a, b], g, m if options["momentum"] else [], **options)

    given = [t.float() for t in (real(2, 3), real(5), real(2, 3) * 2, real(5) * 3, real(2, 3) * 4, real(5) + 1)]
    translator = agree(update, *given, also=range(len(given)))
    assert "aten::_fused_sgd_" in translator.calls


def refused(fn: Callable[..., Any], *inputs: Any) -> str:
    translator, _ = traced(fn, inputs)
    assert len(translator.missing) == 1
    return next(iter(translator.missing.values())).reason


@pytest.mark.parametrize("tied", [torch.relu, lambda a: a.clamp(min=0.1), lambda a: (a > 0).float(), torch.floor, lambda a: a.long()])
def test_positions_where_elements_may_be_equal_have_no_meaning(tied: Callable[[Any], Any]) -> None:
    """UNKNOWN: of equal elements PyTorch may choose any; their values are the same."""
    translator, results = traced(lambda a: tied(a).topk(2, 1), (x,))
    values, positions = (translator.read(t) for t in results)
    assert isinstance(values, str)
    assert "equal ones" in str(positions)


@pytest.mark.parametrize("ordered", [lambda a: a.sort(1), lambda a: a.median(1), lambda a: a.kthvalue(2, 1)])
def test_positions_of_equal_elements_in_order_have_no_meaning(ordered: Callable[[Any], Any]) -> None:
    translator, results = traced(lambda a: ordered(torch.relu(a)), (x,))
    values, positions = (translator.read(t) for t in results)
    assert isinstance(values, str)
    assert "equal ones" in str(positions)


FIRST_STEP = {**SGD, "is_first_step": True, "found_inf": torch.tensor(0.0)}
NEGATIVE = ids(3, 4) - 3
REFUSED: list[tuple[str, str, str, Callable[..., Any], tuple[Any, ...]]] = [  # op, argument, what is said, call
    (
        "embedding_dense_backward",
        "scale_grad_by_freq",
        "frequency",
        lambda g, i: A.embedding_dense_backward(g, i, 5, -1, True),
        (real(4, 3), ids(5, 4)),
    ),
    ("erfinv", "self", "no mapping", torch.erfinv, (x,)),
    (
        "_fused_sgd",
        "is_first_step",
        "first step",
        lambda a, g, m: A._fused_sgd_([a], [g], [m], **FIRST_STEP),
        tuple(real(3).float() for _ in range(3)),
    ),
    ("index", "indices", "negative", lambda a, i: a[i], (real(5, 2), NEGATIVE)),
    ("index", "indices", "negative", lambda a, i: a[:, i - 1], (real(2, 5), ids(3, 4))),
    ("index_put", "indices", "negative", lambda a, i, v: a.index_put((i,), v, accumulate=True), (real(5, 2), NEGATIVE, real(4, 2))),
    ("index_put", "indices", "negative", lambda a, i, v: a.index_put((torch.arange(4), i), v), (real(4, 5), NEGATIVE, real(4))),
    *(
        ("index_put", "indices", "several", lambda a, i, v, rows=rows: a.index_put((rows, i), v), (real(9, 5), ids(3, 4), real(4)))
        for rows in (torch.arange(1, 5), torch.arange(0, 8, 2), ids(3, 4))
    ),
    ("bitwise_not", "self", "bits", lambda a: ~a, (ids(5, 4),)),
    ("bitwise_and", "other", "bits", lambda a, b: a & b, (ids(5, 4), ids(5, 4))),
    ("pow", "exponent", "exponent is a tensor", lambda a, b: a**b, (p, y)),
    ("arange", "step", "fractions", lambda a: torch.arange(0, 1, 0.25, dtype=torch.float64) + a, (real(4),)),
    ("scatter", "reduce", "reduce", lambda a, s: A.scatter.reduce(a, 1, torch.tensor([[2], [0]]), s, reduce="add"), (x, real(2, 1))),
    ("topk", "sorted", "any order", lambda a: a.topk(2, 1, sorted=False), (real(5, 3),)),
    ("scatter", "src", "may be equal", lambda a, i, v: a.scatter(1, i, v), (x, ids(3, 2, 2), real(2, 2))),
    ("scatter", "src", "may be equal", lambda a, v: a.scatter(1, torch.tensor([[2, 2], [0, 1]]), v), (x, real(2, 2))),
    ("logsumexp", "self", "infinite", lambda a, m: a.masked_fill(m, -torch.inf).logsumexp(1), (x, mask(2, 3))),
    ("var", "correction", "of 3 elements", lambda a: a.var(1, correction=3), (x,)),
    ("index", "indices", "no neighbours", lambda a, i: a[i, :, i], (real(2, 3, 4), ids(2, 5))),
    ("pow", "exponent", "exponent is a tensor", lambda a: 2**a, (ids(5, 3),)),
    ("view_copy", "dtype", "dtype", lambda a: A.view_copy.dtype(a, torch.int64), (x,)),
    ("roll", "dims", "flattened", lambda a: a.roll(1), (x,)),
    ("_chunk_cat", "dim", "dim=1", lambda a: A._chunk_cat([a, a], 1, 2), (real(3, 2),)),
    ("floor_divide", "other", "data decide on", lambda i, j: i // j, (ids(9, 4), ids(3, 4) + 1)),
    ("remainder", "other", "data decide on", lambda i: i % -3, (ids(9, 4),)),
]


@pytest.mark.parametrize(
    ("name", "argument", "text", "fn", "inputs"), [pytest.param(*c, id=f"{c[0]}-{c[1]}-{i}") for i, c in enumerate(REFUSED)]
)
def test_refused(name: str, argument: str, text: str, fn: Callable[..., Any], inputs: tuple[Any, ...]) -> None:
    """UNKNOWN, with the argument: an argument that a row does not take is never dropped."""
    assert text in refused(fn, *inputs)


# Arguments about memory, devices and random numbers, and those of overloads that CPU tensors never reach.
ELSEWHERE = {"device", "layout", "pin_memory", "memory_format", "non_blocking", "generator", "out_dtype", "half_to_float"}
WITHOUT_VALUE = {*RANDOM, "empty", "new_empty", "empty_like", "new_empty_strided", "empty_strided"}
FUSED = {"_fused_adam", "_fused_adamw", "_fused_sgd"}  # test_fused_…
UNREACHED = {  # refused by the kernel itself, or made of other ops before it is recorded
    ("_scaled_dot_product_flash_attention_for_cpu", "dropout_p"),
    *(("__and__", n) for n in ("self", "other")),
    *(("__or__", n) for n in ("self", "other")),
    *(("max", "other"), ("min", "other"), ("var", "unbiased"), ("var_mean", "unbiased"), ("copy", "other")),
}


def arguments_of(name: str) -> set[str]:
    """Arguments of all overloads on tensors, in-place ones too, without those that only receive results."""
    space, short = name.split("::")
    found: set[str] = set()
    for spelled in (short, f"{short}_"):
        packet = getattr(getattr(torch.ops, space), spelled, None)
        for overload in packet.overloads() if packet is not None else ():
            schema = getattr(packet, overload)._schema
            made = any("Tensor" in str(r.type) for r in schema.returns) or space == "fsdp"
            if made and not any("Dimname" in str(a.type) or "Dict" in str(a.type) for a in schema.arguments):
                found |= {a.name for a in schema.arguments if not (a.kwarg_only and a.alias_info is not None and a.alias_info.is_write)}
    return found


def test_every_argument_of_every_row_is_compared_or_refused() -> None:
    """A row without a sample, or with an argument that no sample gives another value than its default, is not tested."""
    given: dict[str, set[str]] = {}
    for _, fn, inputs in CASES:
        for name, names in agree(fn, *inputs).given.items():
            given.setdefault(name if name.endswith("__") else name.removesuffix("_"), set()).update(names)
    missing = {}
    for name in MAPPINGS:
        short = name.partition("::")[2]
        if short in WITHOUT_VALUE | FUSED:
            continue
        refused_here = {argument for n, argument, *_ in REFUSED if n == short}
        left = arguments_of(name) - given.get(name, set()) - refused_here - ELSEWHERE
        left -= {argument for n, argument in UNREACHED if n == short}
        if left:
            missing[name] = left
    assert missing == {}
