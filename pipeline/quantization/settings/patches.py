"""Convolutions as products: what one output value reads of the activation, as one row of a matrix (im2col).

A row of one output position has groups x (channels in a group x kernel size) values, in the order of the weight's own
axes, so that the weight of a group is a (values, output channels) matrix beside it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import NodeProto, helper

from pipeline.quantization.settings.groups import Floats


@dataclass(frozen=True)
class Window:
    """How a convolution moves over its activation; all by spatial axis. pads: (before, after), None where `same` says.

    same: 'upper' or 'lower' for ONNX's auto_pad, whose padding depends on the size of the activation.
    """

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    pads: tuple[tuple[int, int], ...] | None
    groups: int
    same: str | None = None

    @classmethod
    def of(cls, node: NodeProto, shape: Sequence[int]) -> "Window":
        """The window of a Conv node whose weight has this shape."""
        given: dict[str, Any] = {item.name: helper.get_attribute_value(item) for item in node.attribute}
        kernel, rank = tuple(shape[2:]), len(shape) - 2
        ones, padding = [1] * rank, given.get("auto_pad", b"NOTSET")
        pads = given.get("pads", [0] * 2 * rank) if padding == b"NOTSET" else [0] * 2 * rank
        same = padding[5:].decode().lower() if padding.startswith(b"SAME") else None
        return cls(
            kernel,
            tuple(given.get("strides", ones)),
            tuple(given.get("dilations", ones)),
            None if same else tuple(zip(pads[:rank], pads[rank:], strict=True)),
            given.get("group", 1),
            same,
        )

    def padding(self, sizes: Sequence[int]) -> tuple[tuple[int, int], ...]:
        """(before, after) for an activation of these spatial sizes."""
        if self.pads is not None:
            return self.pads
        found = []
        for size, reach, stride in zip(sizes, self.reaches, self.strides, strict=True):
            total = max(0, (math.ceil(size / stride) - 1) * stride + reach - size)
            less, more = total // 2, total - total // 2
            found.append((less, more) if self.same == "upper" else (more, less))
        return tuple(found)

    @property
    def reaches(self) -> tuple[int, ...]:
        """How many values the dilated kernel spans."""
        return tuple((size - 1) * step + 1 for size, step in zip(self.kernel, self.dilations, strict=True))

    def places(self, shape: Sequence[int]) -> tuple[int, ...]:
        """(samples, *output sizes) for an activation of this shape."""
        pads = self.padding(shape[2:])
        sizes = zip(shape[2:], pads, self.reaches, self.strides, strict=True)
        return (shape[0], *(max(0, (n + sum(pad) - reach) // stride + 1) for n, pad, reach, stride in sizes))


def patches(values: Floats, window: Window, places: NDArray[np.int64]) -> Floats:
    """The rows at `places`, flat indices into `window.places`: (places, groups, values of a group)."""
    rank, channels = values.ndim - 2, values.shape[1]
    pads = window.padding(values.shape[2:])
    sample, *position = np.unravel_index(places, window.places(values.shape))
    padded = np.pad(values, ((0, 0), (0, 0), *pads)) if any(map(any, pads)) else values
    index: list[Any] = [sample.reshape(-1, *[1] * (rank + 1)), np.arange(channels).reshape(1, -1, *[1] * rank)]
    for axis in range(rank):
        steps = np.arange(window.kernel[axis]) * window.dilations[axis]
        steps = steps.reshape(*[-1 if other == axis + 2 else 1 for other in range(rank + 2)])
        index.append(position[axis].reshape(-1, *[1] * (rank + 1)) * window.strides[axis] + steps)
    return np.asarray(padded[tuple(index)].reshape(len(places), window.groups, -1))


def as_matrices(weight: Floats, groups: int) -> Floats:
    """A convolution's weight (out, in, *kernel) as (groups, in x kernel, out of a group)."""
    return weight.reshape(groups, weight.shape[0] // groups, -1).swapaxes(1, 2)


def as_weight(matrices: Floats, shape: Sequence[int]) -> Floats:
    """What `as_matrices` made of a weight, in its own shape again."""
    return np.ascontiguousarray(matrices.swapaxes(1, 2).reshape(shape), np.float32)
