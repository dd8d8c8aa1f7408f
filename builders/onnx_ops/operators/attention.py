"""ONNX's attention and rotary embedding (opset 23 and later)."""

import math
from typing import NamedTuple

from onnx.helper import tensor_dtype_to_np_dtype

from builders.onnx_ops.library import Array, ArrayLibrary
from builders.onnx_ops.table import must, operator


@operator("Attention")
def attention(
    xp: ArrayLibrary, q: Array, k: Array, v: Array, mask: Array | None = None, past_key: Array | None = None,
    past_value: Array | None = None, filled: Array | None = None,
    *, is_causal: int = 0, kv_num_heads: int | None = None, left_window_size: int = -1, q_num_heads: int | None = None,
    qk_matmul_output_mode: int = 0, right_window_size: int = -1, scale: float | None = None, softcap: float = 0.0,
    softmax_precision: int | None = None, outputs: int,
) -> tuple[Array | None, ...]:  # fmt: skip
    """Attention of [batch, heads, length, size] or [batch, length, heads * size]; 0 for a query without keys.

    filled: how many keys of each sample are no padding, where the caller keeps the cache.
    """
    flat = q.ndim == 3
    if flat:
        must(bool(q_num_heads and kv_num_heads), "its inputs have 3 axes and it does not say how many heads there are")
        heads = ((q, q_num_heads or 1), (k, kv_num_heads or 1), (v, kv_num_heads or 1))
        q, k, v = (xp.swapaxes(x.reshape((x.shape[0], x.shape[1], n, -1)), 1, 2) for x, n in heads)
    k = k if past_key is None else xp.concat([past_key, k], 2)
    v = v if past_value is None else xp.concat([past_value, v], 2)
    groups = q.shape[1] // k.shape[1]
    wide_k, wide_v = (x if groups == 1 else xp.repeat_interleave(x, groups, 1) for x in (k, v))
    window = _Window(bool(is_causal), left_window_size, right_window_size)
    bias = _bias(xp, q, k, mask, 0 if past_key is None else past_key.shape[2], filled, window)
    factor = scale if scale is not None else 1 / math.sqrt(q.shape[-1])
    scores: Array | None = None
    if bias is None and not softcap and outputs < 4 and softmax_precision in (None, 1):
        made = xp.attention(q, wide_k, wide_v, factor)
    else:
        root = math.sqrt(factor)
        product = xp.matmul(q * root, xp.swapaxes(wide_k * root, 2, 3))
        stages = _weights(xp, product, bias, softcap, softmax_precision)
        made, scores = xp.matmul(stages[-1], wide_v), stages[qk_matmul_output_mode]
    if flat:
        made = xp.swapaxes(made, 1, 2).reshape((made.shape[0], made.shape[2], -1))
    return (made, k, v, scores)[:outputs]


def _weights(
    xp: ArrayLibrary, scores: Array, bias: Array | None, softcap: float, precision: int | None
) -> tuple[Array, ...]:
    """The scores at the four stages that `qk_matmul_output_mode` names: twice capped, with the bias, as weights."""
    capped = softcap * xp.tanh(scores / softcap) if softcap else scores
    biased = capped if bias is None else capped + bias
    wide = xp.astype(biased, xp.dtype(tensor_dtype_to_np_dtype(precision))) if precision else biased
    weights = xp.softmax(wide, -1)
    if bias is not None:
        nothing = xp.amax(bias, axis=(-1,), keepdims=True) == -math.inf
        weights = xp.where(nothing, xp.zeros_like(weights), weights)
    # Mode 0 is documented as the bare product, and the reference gives it capped.
    return capped, capped, biased, xp.astype(weights, scores.dtype)


class _Window(NamedTuple):
    """Which keys a query sees. left, right: how far from its own place; -1 is without end."""

    causal: bool
    left: int
    right: int


def _bias(
    xp: ArrayLibrary, q: Array, k: Array, mask: Array | None, past: int, filled: Array | None, window: _Window
) -> Array | None:
    """What is added to the scores: 0 or a mask's values where a query attends, -inf where not; None for nothing."""
    none, zero = xp.full((), -math.inf, dtype=q.dtype), xp.zeros((), dtype=q.dtype)
    bias: Array | None = None
    if mask is not None:
        bias = xp.where(mask, zero, none) if mask.dtype == xp.bool else mask
        missing = k.shape[2] - mask.shape[-1]
        if not isinstance(missing, int) or missing:
            bias = xp.pad_axes(bias, [(0, 0)] * (bias.ndim - 1) + [(0, missing)], -math.inf)
    keys = xp.arange(k.shape[2])
    places = xp.unsqueeze(xp.arange(q.shape[2]), 1) + past
    ends = None if filled is None else filled.reshape((-1, 1, 1, 1))
    if ends is not None and not past:
        places = places + (ends - q.shape[2])
    seen = [keys < ends] if ends is not None else []
    seen += [keys <= places] if window.causal else []
    seen += [keys >= places - window.left] if window.left >= 0 else []
    seen += [keys <= places + window.right] if window.right >= 0 else []
    for allowed in seen:
        bias = xp.where(allowed, zero if bias is None else bias, none)
    return bias


@operator("RotaryEmbedding")
def rotary_embedding(
    xp: ArrayLibrary, x: Array, cos: Array, sin: Array, positions: Array | None = None,
    *, interleaved: int = 0, num_heads: int | None = None, rotary_embedding_dim: int = 0,
) -> Array:  # fmt: skip
    """Rotary positions of [batch, heads, length, size], or of [batch, length, heads * size] with `num_heads`."""
    flat = x.ndim == 3
    must(not flat or bool(num_heads), "its input has 3 axes and it does not say how many heads there are")
    parts = x.reshape((x.shape[0], x.shape[1], num_heads or 1, -1)) if flat else xp.swapaxes(x, 1, 2)
    turned = rotary_embedding_dim or parts.shape[-1]
    head, rest = parts[..., :turned], parts[..., turned:]
    if positions is not None:
        cos, sin = xp.take(cos, positions, 0), xp.take(sin, positions, 0)
    cos, sin = xp.unsqueeze(cos, 2), xp.unsqueeze(sin, 2)
    half = turned // 2
    a, b = (head[..., 0::2], head[..., 1::2]) if interleaved else (head[..., :half], head[..., half:])
    pair = [cos * a - sin * b, sin * a + cos * b]
    joined = xp.stack(pair, -1).reshape(head.shape) if interleaved else xp.concat(pair, -1)
    made = xp.concat([joined, rest], -1)
    return made.reshape(x.shape) if flat else xp.swapaxes(made, 1, 2)
