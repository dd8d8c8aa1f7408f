"""Resize: each axis by itself, as a weighted sum of neighbours.

One form for all of ONNX's coordinate rules, with sizes that may be symbolic. Antialiasing is refused.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from builders.onnx_torch.table import Numbers, must, operator


class _Axis(NamedTuple):
    """One axis to be resized. scale: output over input; start, end: of the region of interest, in 0..1."""

    axis: int
    size: int
    made: int
    scale: float
    start: float
    end: float


@operator("Resize")
def resize(
    x: Tensor,
    roi: Numbers | None = None,
    scales: Numbers | None = None,
    sizes: Numbers | None = None,
    *,
    antialias: int = 0,
    axes: list[int] | None = None,
    coordinate_transformation_mode: str = "half_pixel",
    cubic_coeff_a: float = -0.75,
    exclude_outside: int = 0,
    extrapolation_value: float = 0.0,
    keep_aspect_ratio_policy: str = "stretch",
    mode: str = "nearest",
    nearest_mode: str = "round_prefer_floor",
) -> Tensor:
    """Nearest, linear and cubic, with ONNX's coordinate rules."""
    must(not antialias, "it asks for antialiasing; leave that out, or use the backend onnxruntime")
    must(coordinate_transformation_mode in _RULES, f"coordinate rule {coordinate_transformation_mode!r} is not known")
    rule = _RULES[coordinate_transformation_mode]
    cropped = coordinate_transformation_mode == "tf_crop_and_resize"
    outside: Tensor | None = None
    for each in _axes(x, roi if cropped else None, scales, sizes, axes, keep_aspect_ratio_policy):
        if not cropped and _unchanged(each):
            continue
        at = rule(torch.arange(each.made, device=x.device).to(torch.float32), each)
        if mode == "nearest":
            x = x.index_select(each.axis, _nearest(at, nearest_mode).clamp(0, each.size - 1).to(torch.int64))
        else:
            x = _weighted(x, each, at, mode, cubic_coeff_a, bool(exclude_outside))
        if cropped:
            beyond = ((at < 0) | (at > each.size - 1)).reshape([-1, *[1] * (x.dim() - 1 - each.axis)])
            outside = beyond if outside is None else outside | beyond
    return x if outside is None else torch.where(outside, torch.full_like(x, extrapolation_value), x)


def _axes(
    x: Tensor, roi: Numbers | None, scales: Numbers | None, sizes: Numbers | None, axes: list[int] | None, policy: str
) -> list[_Axis]:
    along = [axis % x.dim() for axis in axes] if axes is not None else list(range(x.dim()))
    have = [x.shape[axis] for axis in along]
    if sizes:
        factors = [size / own for size, own in zip(sizes, have, strict=True)]
        if policy != "stretch":
            one = min(factors) if policy == "not_larger" else max(factors)
            factors = [one] * len(factors)
            sizes = [math.floor(one * own + 0.5) for own in have]
    else:
        must(bool(scales), "it has neither scales nor sizes")
        factors = list(scales or ())
        sizes = [_scaled(own, factor) for own, factor in zip(have, factors, strict=True)]
    count = len(along)
    starts, ends = (roi[:count], roi[count:]) if roi else ([0.0] * count, [1.0] * count)
    return [_Axis(*found) for found in zip(along, have, sizes, factors, starts, ends, strict=True)]


def _scaled(size: Any, factor: Any) -> Any:
    """floor(size * factor), in integers where the factor is one."""
    if isinstance(factor, float) and factor.is_integer():
        return size * int(factor)
    return math.floor(size * factor)


def _unchanged(each: _Axis) -> bool:
    return isinstance(each.scale, (int, float)) and each.scale == 1


Rule = Callable[[Tensor, _Axis], Tensor]


def _half_pixel(at: Tensor, each: _Axis) -> Tensor:
    return (at + 0.5) / each.scale - 0.5


def _half_pixel_symmetric(at: Tensor, each: _Axis) -> Tensor:
    adjusted = each.made / (each.size * each.scale)
    centre = each.size / 2
    return centre * (1 - adjusted) + (at + 0.5) / each.scale - 0.5


def _pytorch_half_pixel(at: Tensor, each: _Axis) -> Tensor:
    return _half_pixel(at, each) if each.made > 1 else at * 0.0


def _align_corners(at: Tensor, each: _Axis) -> Tensor:
    return at * ((each.size - 1) / (each.made - 1)) if each.made > 1 else at * 0.0


def _asymmetric(at: Tensor, each: _Axis) -> Tensor:
    return at / each.scale


def _crop(at: Tensor, each: _Axis) -> Tensor:
    if each.made > 1:
        return each.start * (each.size - 1) + at * (each.end - each.start) * ((each.size - 1) / (each.made - 1))
    return at * 0.0 + 0.5 * (each.start + each.end) * (each.size - 1)


_RULES: dict[str, Rule] = {
    "half_pixel": _half_pixel,
    "half_pixel_symmetric": _half_pixel_symmetric,
    "pytorch_half_pixel": _pytorch_half_pixel,
    "align_corners": _align_corners,
    "asymmetric": _asymmetric,
    "tf_crop_and_resize": _crop,
}


def _nearest(at: Tensor, mode: str) -> Tensor:
    if mode == "round_prefer_floor":
        return torch.ceil(at - 0.5)
    if mode == "round_prefer_ceil":
        return torch.floor(at + 0.5)
    must(mode in ("floor", "ceil"), f"nearest_mode {mode!r} is none of ONNX's; use floor, ceil or round_prefer_floor")
    return torch.floor(at) if mode == "floor" else torch.ceil(at)


def _weighted(x: Tensor, each: _Axis, at: Tensor, mode: str, cubic: float, exclude: bool) -> Tensor:
    """The sum over neighbours (2 of 'linear', 4 of 'cubic'); those outside are the edge's, or left out."""
    base = torch.floor(at)
    offset = at - base
    taps = (0, 1) if mode == "linear" else (-1, 0, 1, 2)
    weights = [_linear(offset - tap) if mode == "linear" else _cubic(offset - tap, cubic) for tap in taps]
    places = [base + tap for tap in taps]
    if exclude:
        inside = [((place >= 0) & (place <= each.size - 1)).to(torch.float32) for place in places]
        weights = [weight * mask for weight, mask in zip(weights, inside, strict=True)]
        total = sum(weights[1:], weights[0])
        weights = [weight / total for weight in weights]
    shape = [-1, *[1] * (x.dim() - 1 - each.axis)]
    wide = x if x.is_floating_point() else x.to(torch.float32)
    parts = [
        wide.index_select(each.axis, place.clamp(0, each.size - 1).to(torch.int64))
        * weight.reshape(shape).to(wide.dtype)
        for place, weight in zip(places, weights, strict=True)
    ]
    made = sum(parts[1:], parts[0])
    return made if x.is_floating_point() else torch.round(made).to(x.dtype)


def _linear(distance: Tensor) -> Tensor:
    return 1 - distance.abs()


def _cubic(distance: Tensor, a: float) -> Tensor:
    """Keys' kernel (IEEE Trans. ASSP 29, 1981) with parameter a."""
    d = distance.abs()
    near = ((a + 2) * d - (a + 3)) * d * d + 1
    far = ((a * d - 5 * a) * d + 8 * a) * d - 4 * a
    return torch.where(d <= 1, near, torch.where(d < 2, far, torch.zeros_like(d)))
