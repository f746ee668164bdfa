"""Softmax, norms, embeddings, attention and their derivatives."""

from __future__ import annotations

import math

from trainverify.torch.mappings.table import Arguments, rows
from trainverify.torch.values import Unmapped

ROWS, row = rows()


def _along(a: Arguments, name: str) -> str:
    """A function along a dimension; a tensor without dimensions has one element."""
    a.ignore("half_to_float")  # of the result's dtype
    x, dim = a.tensor("self"), a.integer("dim")
    if a.e.shape(x):
        return a.e.op(name, (x,), {"dim": dim})
    return a.e.reshape(a.e.op(name, (a.e.reshape(x, (1,)),), {"dim": 0}), ())


def _over(a: Arguments, x: str, dim: int) -> str:
    """Sums along a dimension, which is kept; of a tensor without dimensions its element."""
    return a.e.op("sum", (x,), {"dim": dim, "keepdim": True}) if a.e.shape(x) else x


@row("aten::_softmax")
def softmax(a: Arguments) -> str:
    return _along(a, "softmax")


@row("aten::_log_softmax")
def log_softmax(a: Arguments) -> str:
    return _along(a, "log_softmax")


@row("aten::_softmax_backward_data")
def softmax_backward(a: Arguments) -> str:
    """y·(g − Σ g·y)."""
    a.ignore("input_dtype")
    g, y, dim = a.tensor("grad_output"), a.tensor("output"), a.integer("dim")
    total = _over(a, a.e.op("mul", (g, y)), dim)
    return a.e.op("mul", (y, a.e.op("sub", (g, total))))


@row("aten::_log_softmax_backward_data")
def log_softmax_backward(a: Arguments) -> str:
    """g − exp(y)·Σ g."""
    a.ignore("input_dtype")
    g, y, dim = a.tensor("grad_output"), a.tensor("output"), a.integer("dim")
    total = _over(a, g, dim)
    return a.e.op("sub", (g, a.e.op("mul", (a.e.op("exp", (y,)), total))))


@row("aten::embedding")
def embedding(a: Arguments) -> str:
    a.ignore("padding_idx", "scale_grad_by_freq", "sparse")  # of the backward pass, which has its own
    return a.e.op("embedding", (a.tensor("indices"), a.tensor("weight")))


@row("aten::embedding_dense_backward")
def embedding_backward(a: Arguments) -> str:
    """Σ over tokens of one_hot(id)·g."""
    if a.flag("scale_grad_by_freq"):
        raise Unmapped("gradients scaled by frequency")
    g, ids, rows_ = a.tensor("grad_output"), a.tensor("indices"), a.integer("num_weights")
    if (padding := a.integer("padding_idx")) >= 0:  # rows that get no gradient
        unused = a.e.op("eq", (ids,), {"value": padding})
        g = a.e.op("where", (a.e.reshape(unused, (*a.e.shape(ids), 1)), a.e.full((), 0, a.e.tensors[g].dtype), g))
    hot = a.e.cast(a.e.op("one_hot", (ids,), {"num_classes": rows_}), a.e.tensors[g].dtype)
    letters = "abcdefgh"[: len(a.e.shape(ids))]
    return a.e.op("einsum", (hot, g), {"spec": f"{letters}v,{letters}x->vx"})


def _mean_and_rstd(a: Arguments, x: str, count: int, eps: object) -> tuple[str, str]:
    over = {"dim": tuple(range(-count, 0)), "keepdim": True}
    mean = a.e.op("mean", (x,), over)
    variance = a.e.op("var", (x,), {**over, "correction": 0})
    return mean, a.e.op("rsqrt", (a.e.op("add", (variance,), {"value": eps}),))


@row("aten::native_layer_norm")
def layer_norm(a: Arguments) -> tuple[str, str, str]:
    shape, eps = a.ints("normalized_shape"), a.number("eps")
    assert shape is not None
    x, weight, bias = a.tensor("input"), a.optional("weight"), a.optional("bias")
    mean, rstd = _mean_and_rstd(a, x, len(shape), eps)
    y = a.e.op("layer_norm", (x, weight, bias), {"dims": len(shape), "eps": eps})
    return y, mean, rstd


@row("aten::native_layer_norm_backward")
def layer_norm_backward(a: Arguments) -> tuple[str | None, str | None, str | None]:
    """From the saved mean and 1/deviation: x̂ = (x − mean)·rstd, dx = rstd·(ĝ − mean ĝ − x̂·mean(ĝ·x̂)) with ĝ = g·weight."""
    a.ignore("bias")
    g, x, shape, mask = a.tensor("grad_out"), a.tensor("input"), a.ints("normalized_shape"), a.raw("output_mask")
    mean, rstd, weight = a.tensor("mean"), a.tensor("rstd"), a.optional("weight")
    assert shape is not None
    e, inner = a.e, tuple(range(-len(shape), 0))
    normal = e.op("mul", (e.op("sub", (x, mean)), rstd))
    outer = tuple(range(len(e.shape(x)) - len(shape)))
    of_x = of_weight = of_bias = None
    if mask[0]:
        weighted = g if weight is None else e.op("mul", (g, weight))
        over: dict[str, object] = {"dim": inner, "keepdim": True}
        first = e.op("mean", (weighted,), over)
        second = e.op("mul", (normal, e.op("mean", (e.op("mul", (weighted, normal)),), over)))
        of_x = e.op("mul", (rstd, e.op("sub", (e.op("sub", (weighted, first)), second))))
    if mask[1]:
        product = e.op("mul", (g, normal))
        of_weight = e.op("sum", (product,), {"dim": outer}) if outer else product
    if mask[2]:
        of_bias = e.op("sum", (g,), {"dim": outer}) if outer else g
    return of_x, of_weight, of_bias


# -- attention ------------------------------------------------------------------------------------------------------------


def _scale(a: Arguments, q: str) -> dict[str, object]:
    value = a.raw("scale")
    if value is None or value == 1 / math.sqrt(a.e.shape(q)[-1]):
        return {}
    return {"scale": a.literal(float(value))}


def _attention(a: Arguments, mask_name: str | None) -> tuple[tuple[str, str, str], str | None, dict[str, object]]:
    if a.number("dropout_p") != 0:
        raise Unmapped("attention with dropout")
    q, k, v = a.tensor("query"), a.tensor("key"), a.tensor("value")
    mask = None if mask_name is None else a.optional(mask_name)
    attrs: dict[str, object] = {"is_causal": a.flag("is_causal"), **_scale(a, q)}
    return (q, k, v), mask, attrs


@row("aten::_scaled_dot_product_flash_attention_for_cpu")
def flash_attention_cpu(a: Arguments) -> tuple[str, str]:
    qkv, mask, attrs = _attention(a, "attn_mask")
    y, logsumexp = a.e.several("attention", (*qkv, mask), attrs)
    return y, logsumexp


@row("aten::_scaled_dot_product_flash_attention_for_cpu_backward")
def flash_attention_cpu_backward(a: Arguments) -> tuple[str, str, str]:
    qkv, mask, attrs = _attention(a, "attn_mask")
    g, y, logsumexp = a.tensor("grad_out"), a.tensor("out"), a.tensor("logsumexp")
    delta = a.e.op("sum", (a.e.op("mul", (g, y)),), {"dim": -1})
    q, k, v = qkv
    of_q, of_k, of_v = a.e.several("attention_backward", (g, q, k, v, logsumexp, delta, *([] if mask is None else [mask])), attrs)
    return of_q, of_k, of_v
