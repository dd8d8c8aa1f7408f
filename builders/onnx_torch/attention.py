"""ONNX's attention and rotary embedding (opset 23 and later)."""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from builders.onnx_torch.reading import DTYPES
from builders.onnx_torch.table import must, operator


@operator("Attention")
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    past_key: Tensor | None = None,
    past_value: Tensor | None = None,
    filled: Tensor | None = None,
    *,
    is_causal: int = 0,
    kv_num_heads: int | None = None,
    left_window_size: int = -1,
    q_num_heads: int | None = None,
    qk_matmul_output_mode: int = 0,
    right_window_size: int = -1,
    scale: float | None = None,
    softcap: float = 0.0,
    softmax_precision: int | None = None,
    outputs: int,
) -> tuple[Tensor | None, ...]:
    """[batch, heads, length, size], or heads and size in one axis. A row that attends to nothing is zero.

    filled: how many keys of each sample are no padding, where the cache is kept outside.
    """
    flat = q.dim() == 3
    if flat:
        must(bool(q_num_heads and kv_num_heads), "its inputs have 3 axes and it does not say how many heads there are")
        q, k, v = (_heads(x, n or 1) for x, n in ((q, q_num_heads), (k, kv_num_heads), (v, kv_num_heads)))
    k = k if past_key is None else torch.cat([past_key, k], 2)
    v = v if past_value is None else torch.cat([past_value, v], 2)
    groups = q.shape[1] // k.shape[1]
    wide_k, wide_v = (x if groups == 1 else x.repeat_interleave(groups, 1) for x in (k, v))
    window = _Window(bool(is_causal), left_window_size, right_window_size)
    bias = _bias(q, k, mask, 0 if past_key is None else past_key.shape[2], filled, window)
    factor = scale if scale is not None else 1 / math.sqrt(q.shape[-1])
    if bias is None and not softcap and outputs < 4 and softmax_precision in (None, 1):
        made, scores = F.scaled_dot_product_attention(q, wide_k, wide_v, scale=factor), None
    else:
        root = math.sqrt(factor)
        stages = _weights(torch.matmul(q * root, (wide_k * root).transpose(2, 3)), bias, softcap, softmax_precision)
        made, scores = torch.matmul(stages[-1], wide_v), stages[qk_matmul_output_mode]
    if flat:
        made = made.transpose(1, 2).reshape([made.shape[0], made.shape[2], -1])
    return (made, k, v, scores)[:outputs]


def _weights(scores: Tensor, bias: Tensor | None, softcap: float, precision: int | None) -> tuple[Tensor, ...]:
    """The product of queries and keys, capped, with the bias, and as weights: what `qk_matmul_output_mode` counts."""
    capped = softcap * torch.tanh(scores / softcap) if softcap else scores
    biased = capped if bias is None else capped + bias
    wide = biased.to(DTYPES[precision]) if precision else biased
    weights = torch.softmax(wide, -1)
    if bias is not None:
        nothing = bias.amax(-1, keepdim=True) == -math.inf
        weights = torch.where(nothing, torch.zeros_like(weights), weights)
    # Mode 0 is documented as the bare product, and the reference gives it capped.
    return capped, capped, biased, weights.to(scores.dtype)


def _heads(x: Tensor, heads: int) -> Tensor:
    return x.reshape([x.shape[0], x.shape[1], heads, -1]).transpose(1, 2)


class _Window(NamedTuple):
    """Which keys a query sees. left, right: how far from its own place; -1 is without end."""

    causal: bool
    left: int
    right: int


def _bias(
    q: Tensor, k: Tensor, mask: Tensor | None, past: int, filled: Tensor | None, window: _Window
) -> Tensor | None:
    """What is added to the scores: 0 or a mask's values where a query attends, -inf where not; None for nothing."""
    none = torch.full((), -math.inf, dtype=q.dtype, device=q.device)
    zero = torch.zeros((), dtype=q.dtype, device=q.device)
    bias: Tensor | None = None
    if mask is not None:
        bias = torch.where(mask, zero, none) if mask.dtype == torch.bool else mask
        missing = k.shape[2] - mask.shape[-1]
        bias = F.pad(bias, [0, missing], value=-math.inf) if not isinstance(missing, int) or missing else bias
    keys = torch.arange(k.shape[2], device=q.device)
    places = torch.arange(q.shape[2], device=q.device).unsqueeze(1) + past
    if filled is not None and not past:
        places = places + (filled.reshape([-1, 1, 1, 1]) - q.shape[2])
    seen: list[Tensor] = [keys < filled.reshape([-1, 1, 1, 1])] if filled is not None else []
    seen += [keys <= places] if window.causal else []
    seen += [keys >= places - window.left] if window.left >= 0 else []
    seen += [keys <= places + window.right] if window.right >= 0 else []
    for allowed in seen:
        bias = torch.where(allowed, zero if bias is None else bias, none)
    return bias


@operator("RotaryEmbedding")
def rotary_embedding(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None = None,
    *,
    interleaved: int = 0,
    num_heads: int | None = None,
    rotary_embedding_dim: int = 0,
) -> Tensor:
    """[batch, heads, length, size], or [batch, length, heads * size] with `num_heads`."""
    flat = x.dim() == 3
    must(not flat or bool(num_heads), "its input has 3 axes and it does not say how many heads there are")
    parts = x.reshape([x.shape[0], x.shape[1], num_heads or 1, -1]) if flat else x.transpose(1, 2)
    turned = rotary_embedding_dim or parts.shape[-1]
    head, rest = parts[..., :turned], parts[..., turned:]
    if positions is not None:
        cos, sin = F.embedding(positions, cos), F.embedding(positions, sin)
    cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
    a, b = (head[..., 0::2], head[..., 1::2]) if interleaved else head.chunk(2, -1)
    real, imaginary = cos * a - sin * b, sin * a + cos * b
    joined = torch.stack([real, imaginary], -1).flatten(-2) if interleaved else torch.cat([real, imaginary], -1)
    made = torch.cat([joined, rest], -1)
    return made.reshape(x.shape) if flat else made.transpose(1, 2)
