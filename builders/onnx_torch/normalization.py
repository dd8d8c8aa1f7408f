"""Normalizations, and softmax."""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from builders.onnx_torch.reading import DTYPES
from builders.onnx_torch.table import must, operator


@operator("Softmax")
def softmax(x: Tensor, *, axis: int = -1) -> Tensor:
    """Torch's."""
    return torch.softmax(x, axis)


@operator("LogSoftmax")
def log_softmax(x: Tensor, *, axis: int = -1) -> Tensor:
    """Torch's."""
    return torch.log_softmax(x, axis)


@operator("BatchNormalization")
def batch_normalization(
    x: Tensor,
    scale: Tensor,
    bias: Tensor,
    mean: Tensor,
    variance: Tensor,
    *,
    epsilon: float = 1e-5,
    momentum: float = 0.9,
    training_mode: int = 0,
) -> Tensor:
    """Of inference."""
    del momentum
    must(not training_mode, "it is in training mode; export the model for inference")
    mean, variance, scale, bias = (part.to(x.dtype) for part in (mean, variance, scale, bias))
    return F.batch_norm(x, mean, variance, scale, bias, False, 0.0, epsilon)


@operator("LayerNormalization")
def layer_normalization(
    x: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    *,
    axis: int = -1,
    epsilon: float = 1e-5,
    stash_type: int = 1,
    outputs: int,
) -> Tensor | tuple[Tensor, ...]:
    """Over the axes from `axis` on; torch's own where it does the same."""
    axis = axis % x.dim()
    sizes = list(x.shape[axis:])
    plain = all(isinstance(size, int) for size in sizes) and list(scale.shape) == sizes
    if outputs == 1 and plain and (bias is None or list(bias.shape) == sizes):
        return F.layer_norm(x, sizes, scale, bias, epsilon)
    wide = x.to(DTYPES.get(stash_type, torch.float32))
    axes = list(range(axis, x.dim()))
    mean = wide.mean(axes, keepdim=True)
    centred = wide - mean
    inverse = torch.rsqrt((centred * centred).mean(axes, keepdim=True) + epsilon)
    made = (centred * inverse).to(x.dtype) * scale
    return (made if bias is None else made + bias, mean, inverse)[:outputs]


@operator("RMSNormalization")
def rms_normalization(
    x: Tensor, scale: Tensor, *, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1
) -> Tensor:
    """By the root of the mean square over the axes from `axis` on."""
    wide = x.to(DTYPES.get(stash_type, torch.float32))
    axes = list(range(axis % x.dim(), x.dim()))
    inverse = torch.rsqrt((wide * wide).mean(axes, keepdim=True) + epsilon)
    return (wide * inverse).to(x.dtype) * scale


@operator("InstanceNormalization")
def instance_normalization(x: Tensor, scale: Tensor, bias: Tensor, *, epsilon: float = 1e-5) -> Tensor:
    """Each channel of each sample."""
    return _by_groups(x, x.shape[1], epsilon) * _channels(scale, x) + _channels(bias, x)


@operator("GroupNormalization")
def group_normalization(
    x: Tensor,
    scale: Tensor,
    bias: Tensor,
    *,
    num_groups: int,
    epsilon: float = 1e-5,
    stash_type: int = 1,
    opset: int,
) -> Tensor:
    """Scale and bias are per group up to opset 20, per channel from 21 on."""
    normal = _by_groups(x.to(DTYPES.get(stash_type, torch.float32)), num_groups, epsilon).to(x.dtype)
    if opset < 21:
        each = x.shape[1] // num_groups
        scale, bias = scale.repeat_interleave(each), bias.repeat_interleave(each)
    return normal * _channels(scale, x) + _channels(bias, x)


def _by_groups(x: Tensor, groups: int, epsilon: float) -> Tensor:
    parts = x.reshape([x.shape[0], groups, -1])
    centred = parts - parts.mean(2, keepdim=True)
    return (centred * torch.rsqrt((centred * centred).mean(2, keepdim=True) + epsilon)).reshape(x.shape)


def _channels(scale: Tensor, x: Tensor) -> Tensor:
    """A value per channel, laid along axis 1."""
    return scale.reshape([-1, *[1] * (x.dim() - 2)])


@operator("LRN")
def local_response(x: Tensor, *, size: int, alpha: float = 1e-4, beta: float = 0.75, bias: float = 1.0) -> Tensor:
    """By the mean square of neighbouring channels; of an even number, the odd one out comes after."""
    squares = F.pad(x * x, [0, 0] * (x.dim() - 2) + [(size - 1) // 2, size // 2])
    total = sum((squares.narrow(1, start, x.shape[1]) for start in range(1, size)), squares.narrow(1, 0, x.shape[1]))
    return x / torch.pow(bias + alpha / size * total, beta)


@operator("LpNormalization")
def lp_normalization(x: Tensor, *, axis: int = -1, p: int = 2) -> Tensor:
    """By the norm along an axis; where that is zero, zero."""
    norm = x.abs().sum(axis, keepdim=True) if p == 1 else torch.sqrt((x * x).sum(axis, keepdim=True))
    return torch.where(norm == 0, torch.zeros_like(x), x / norm)


@operator("MeanVarianceNormalization")
def mean_variance(x: Tensor, *, axes: list[int] | None = None) -> Tensor:
    """To mean 0 and deviation 1, with the 1e-9 that ONNX's function has."""
    along = [0, 2, 3] if axes is None else axes
    deviation = torch.sqrt((x * x).mean(along, keepdim=True) - x.mean(along, keepdim=True) ** 2)
    return (x - x.mean(along, keepdim=True)) / (deviation + 1e-9)
