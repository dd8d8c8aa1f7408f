"""Resize: nearest, linear and cubic, one axis after the other, at sizes that are known while tracing."""

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from builders.onnx_jax.arrays import axes_of, data, known, numbers
from builders.onnx_jax.nodes import Node, Value, op

_ROUND: dict[str, Callable[[Any], Any]] = {
    "round_prefer_floor": lambda at: np.ceil(at - 0.5),
    "round_prefer_ceil": lambda at: np.floor(at + 0.5),
    "floor": np.floor,
    "ceil": np.ceil,
}


@op("Resize", "Upsample")
def _resize(node: Node, x: Value, roi: Value = None, scales: Value = None, target: Value = None) -> Value:
    if node.op == "Upsample" or node.opset < 11:
        roi, scales = None, (roi if roi is not None else np.asarray(node.attr("scales"), np.float32))
    if node.attr("antialias", 0) or node.attr("keep_aspect_ratio_policy", "stretch") != "stretch":
        raise node.refused("antialias and keep_aspect_ratio_policy are not supported")
    if (form := _form(node)) not in _FORMS:
        raise node.refused(f"coordinate_transformation_mode {form!r} is not supported")
    taken = data(x)
    axes = axes_of(node, None, taken.ndim) or list(range(taken.ndim))
    for at, axis in enumerate(axes):
        size = taken.shape[axis]
        if target is not None and target.size:
            wanted = numbers(node, target, "sizes")[at]
            factor = None
        else:
            factor = float(known(node, scales, "scales").ravel()[at])
            wanted = None if factor == 1 else math.floor(size * factor)
        if wanted is None or wanted is size or wanted == size:
            continue
        if not isinstance(size, int) or not isinstance(wanted, int):
            raise node.refused(f"axis {axis} has no fixed size")
        if factor is not None and form == "align_corners" and wanted != size * factor:
            raise node.refused("runtimes disagree on align_corners with a scale that gives no whole size")
        taken = _along(node, taken, axis, (size, wanted, factor if factor is not None else wanted / size))
    return taken


def _form(node: Node) -> str:
    if node.op == "Upsample" or node.opset < 11:
        return "asymmetric"
    return str(node.attr("coordinate_transformation_mode", "half_pixel"))


_FORMS = ("half_pixel", "half_pixel_symmetric", "pytorch_half_pixel", "align_corners", "asymmetric")


def _places(form: str, size: int, wanted: int, scale: float) -> Any:
    """Where in the input each element of the output lies."""
    at = np.arange(wanted, dtype=np.float64)
    if form == "align_corners":
        return at * (size - 1) / (wanted - 1) if wanted > 1 else np.zeros(wanted)
    if form == "asymmetric":
        return at / scale
    if form == "pytorch_half_pixel" and wanted == 1:
        return np.zeros(wanted)
    places = (at + 0.5) / scale - 0.5
    if form == "half_pixel_symmetric":
        adjusted = wanted / (scale * size)
        places += size / 2 * (1 - adjusted)
    return places


def _along(node: Node, x: Any, axis: int, sizes: tuple[int, int, float]) -> Any:
    size, wanted, scale = sizes
    places = _places(_form(node), size, wanted, scale)
    mode = node.attr("mode", "nearest")
    if mode == "nearest":
        rounding = node.attr("nearest_mode", "round_prefer_floor" if node.opset >= 11 else "floor")
        return _taken(x, _ROUND[rounding](places), size, axis)
    if mode == "cubic":
        return _weighed(x, axis, size, _cubic(node, places, size))
    low = np.floor(places)
    share = places - low
    return _weighed(x, axis, size, [(low, 1 - share), (low + 1, share)])


def _cubic(node: Node, places: Any, size: int) -> list[tuple[Any, Any]]:
    a, low = node.attr("cubic_coeff_a", -0.75), np.floor(places)
    share = places - low

    def near(d: Any) -> Any:
        return ((a + 2) * d - (a + 3)) * d * d + 1

    def far(d: Any) -> Any:
        return ((a * d - 5 * a) * d + 8 * a) * d - 4 * a

    taps = [(low - 1, far(share + 1)), (low, near(share)), (low + 1, near(1 - share)), (low + 2, far(2 - share))]
    if not node.attr("exclude_outside", 0):
        return taps
    inside = [(at, np.where((at < 0) | (at >= size), 0, weight)) for at, weight in taps]
    total = sum(weight for _, weight in inside)
    return [(at, weight / total) for at, weight in inside]


def _weighed(x: Any, axis: int, size: int, taps: list[tuple[Any, Any]]) -> Any:
    shape = [-1 if at == axis else 1 for at in range(x.ndim)]
    parts = [_taken(x, at, size, axis) * weight.astype(x.dtype).reshape(shape) for at, weight in taps]
    return sum(parts[1:], parts[0])


def _taken(x: Any, at: Any, size: int, axis: int) -> Any:
    return jnp.take(x, np.clip(at, 0, size - 1).astype(np.int64), axis=axis)
