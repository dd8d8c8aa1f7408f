"""Mean and covariance of what convolutions read, from patches that are drawn evenly over samples and positions.

A layer's patches are many and overlap, and its covariance costs (values in a patch)^2 for each: only as many are drawn
as tell the covariance, a few for each of its values. Layers are taken together as far as their matrices fit
`MOST_BYTES`; a pass over the samples, up to the last of them, is made for each such batch.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto

from pipeline.graphs.graph import constants
from pipeline.quantization.insertion.insertion_points import Site
from pipeline.quantization.ranges import Ranges
from pipeline.quantization.settings.fit import rounded_activation
from pipeline.quantization.settings.groups import Floats
from pipeline.quantization.settings.patches import Window, patches
from pipeline.quantization.settings.runs import Run
from pipeline.quantization.settings.sessions import SessionRunner, tail, with_outputs

MOST_BYTES = 128 << 20
# Patches drawn for each value in one, and at least. On ResNet-50, `docs/concepts/choice.md` has what they give.
PATCHES_PER_VALUE = 3
LEAST_PATCHES = 8192
# Values of patches that are held before they are multiplied; and drawn at once.
HELD_VALUES = 1 << 21


@dataclass
class Moments:
    """Of the patches of one convolution, (groups, values). lost: what quantizing the activation adds to a patch.

    held: patches whose products are not in `second` yet; one product of many is cheaper than many of few.
    """

    count: int = 0
    origin: Floats = field(default_factory=lambda: np.empty(0, np.float32))
    first: NDArray[np.float64] = field(default_factory=lambda: np.empty(0))
    second: Floats = field(default_factory=lambda: np.empty(0, np.float32))
    lost: NDArray[np.float64] = field(default_factory=lambda: np.empty(0))
    held: list[Floats] = field(default_factory=list)

    def add(self, rows: Floats, rounded: Floats) -> None:
        """Take in patches (rows, groups, values), as they are and as int8 holds them."""
        if not len(rows):
            return
        if not self.count:
            # Sums about a point near the mean keep their digits in float32.
            self.origin = rows.mean(axis=0)
            self.first, self.lost = np.zeros(self.origin.shape), np.zeros(self.origin.shape)
            self.second = np.zeros((*self.origin.shape, self.origin.shape[-1]), np.float32)
        centred = rows - self.origin
        self.first += centred.sum(axis=0, dtype=np.float64)
        self.lost += (rounded - rows).sum(axis=0, dtype=np.float64)
        self.count += len(rows)
        self.held.append(centred)
        if sum(part.size for part in self.held) >= HELD_VALUES:
            self._multiply()

    def _multiply(self) -> None:
        if self.held:
            turned = np.concatenate(self.held).transpose(1, 2, 0)
            for group, part in enumerate(turned):
                self.second[group] += part @ part.T
            self.held = []

    @property
    def mean(self) -> NDArray[np.float64]:
        """Mean patch."""
        return np.asarray(self.origin + self.first / self.count)

    @property
    def covariance(self) -> Floats:
        """Covariance of the values of a patch, by group."""
        self._multiply()
        offset = (self.first / self.count).astype(np.float32)
        return self.second / np.float32(self.count) - offset[:, :, None] * offset[:, None, :]

    @property
    def about_zero(self) -> Floats:
        """Mean of x x', by group."""
        mean = self.mean.astype(np.float32)
        return self.covariance + mean[:, :, None] * mean[:, None, :]

    @property
    def mean_lost(self) -> NDArray[np.float64]:
        """What quantizing the activation adds to a patch on average."""
        return self.lost / self.count


@dataclass(frozen=True)
class Layer:
    """A convolution to take the moments of. low, high: range of its activation."""

    site: Site
    window: Window
    values: int
    low: float
    high: float

    @property
    def wanted(self) -> int:
        """How many patches tell its covariance."""
        return max(PATCHES_PER_VALUE * self.values, LEAST_PATCHES)

    @property
    def bytes(self) -> int:
        """Size of its covariance."""
        return 4 * self.window.groups * self.values**2


def layers(model: ModelProto, sites: Iterable[Site], ranges: Ranges) -> list[Layer]:
    """The convolutions among the sites of a prepared model."""
    given, nodes, found = constants(model.graph), {node.name: node for node in model.graph.node}, []
    for site in sites:
        if site.op_type == "Conv":
            shape = given[site.weight].dims
            window = Window.of(nodes[site.node], shape)
            found.append(Layer(site, window, math.prod(shape[1:]), *ranges.tensors[site.activation]))
    return found


def batches(layers: Sequence[Layer], most: int = MOST_BYTES) -> Iterator[tuple[Layer, ...]]:
    """Consecutive layers whose matrices take at most so many bytes together."""
    held: list[Layer] = []
    for layer in layers:
        if held and sum(other.bytes for other in held) + layer.bytes > most:
            yield tuple(held)
            held = []
        held.append(layer)
    if held:
        yield tuple(held)


def moments_of(
    model: ModelProto, batch: Sequence[Layer], runs: Sequence[Run], activation: Literal["int8", "uint8"]
) -> dict[str, Moments]:
    """Moments by node, from one pass over the runs that computes no more of the model than these layers read."""
    names = list(dict.fromkeys(layer.site.activation for layer in batch))
    runner = _open_session(model, names)
    found = {layer.site.node: Moments() for layer in batch}
    samples, seen = sum(count for count, _ in runs), 0
    for index, (count, inputs) in enumerate(runs):
        values = {**inputs, **(runner.run(inputs) if runner else {})}
        for layer in batch:
            # As many so far as this share of the samples calls for: no rounding adds up.
            quota = layer.wanted * (seen + count) // samples - layer.wanted * seen // samples
            for rows in _draw(values[layer.site.activation], layer, quota, index):
                rounded = rounded_activation(rows, layer.low, layer.high, activation)
                found[layer.site.node].add(rows, rounded)
        seen += count
    return found


def _open_session(model: ModelProto, names: Sequence[str]) -> SessionRunner | None:
    """A session for these tensors; None when all of them are inputs of the model."""
    inner = [name for name in names if name not in {value.name for value in model.graph.input}]
    return SessionRunner(tail(with_outputs(model, dict.fromkeys(inner, TensorProto.FLOAT)), {})) if inner else None


def _draw(values: Floats, layer: Layer, quota: int, seed: int) -> Iterator[Floats]:
    """That many patches, or all there are, from places drawn evenly."""
    total = math.prod(layer.window.places(values.shape))
    if quota >= total:
        places = np.arange(total)
    else:
        places = np.sort(np.random.default_rng(seed).choice(total, quota, replace=False))
    at_once = max(1, HELD_VALUES // (layer.window.groups * layer.values))
    for start in range(0, len(places), at_once):
        yield patches(values, layer.window, places[start : start + at_once])
