"""The inputs of convolutions: patches as rows of a matrix (im2col), with their mean and covariance over samples.

A patch contains the values that one output position reads: groups x (channels in a group x kernel size), in the order
of the weight's own axes. So the weight of a group is a [values, output channels] matrix.

A layer's patches are many and overlap, and its covariance costs (values in a patch)^2 for each: only a few per value
of a patch are drawn, evenly over samples and positions. One pass over the samples serves a batch of layers whose
matrices together fit `MOST_BYTES`, and computes the model up to the last of them. Late layers, whose activations are
small, need all samples: their passes begin at an earlier narrow tensor (`waists`), with its values from the pass
before.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto

from enginesmith.arrays import Array
from pipeline.quantization.graph import attribute_of, constants
from pipeline.quantization.insertion_points import Site
from pipeline.quantization.settings.groups import Floats, rounded_activation
from pipeline.quantization.settings.runs import Run, SessionRunner, set_ranks, tail


class ActivationRange(NamedTuple):
    """The int8 form of an activation: symmetric (int8) or asymmetric (uint8) in [low, high]."""

    activation: Literal["int8", "uint8"]
    low: float
    high: float


@dataclass(frozen=True)
class Window:
    """The window of a convolution; all fields by spatial axis. pads: (before, after); None with `same`.

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
        rank, padding = len(shape) - 2, attribute_of(node, "auto_pad", b"NOTSET")
        zeros = [0] * 2 * rank
        pads = attribute_of(node, "pads", zeros) if padding == b"NOTSET" else zeros
        same_mode = padding[5:].decode().lower() if padding.startswith(b"SAME") else None
        return cls(
            tuple(shape[2:]),
            tuple(attribute_of(node, "strides", [1] * rank)),
            tuple(attribute_of(node, "dilations", [1] * rank)),
            None if same_mode else tuple(zip(pads[:rank], pads[rank:], strict=True)),
            attribute_of(node, "group", 1),
            same_mode,
        )

    def padding(self, sizes: Sequence[int]) -> tuple[tuple[int, int], ...]:
        """(before, after) for an activation of these spatial sizes."""
        if self.pads is not None:
            return self.pads
        pads = []
        for size, extent, stride in zip(sizes, self.reaches, self.strides, strict=True):
            total = max(0, (math.ceil(size / stride) - 1) * stride + extent - size)
            small_pad, large_pad = total // 2, total - total // 2
            pads.append((small_pad, large_pad) if self.same == "upper" else (large_pad, small_pad))
        return tuple(pads)

    @property
    def reaches(self) -> tuple[int, ...]:
        """The number of values that the dilated kernel spans, by axis."""
        return tuple((size - 1) * dilation + 1 for size, dilation in zip(self.kernel, self.dilations, strict=True))

    def places(self, shape: Sequence[int]) -> tuple[int, ...]:
        """(samples, *output sizes) for an activation of this shape."""
        pads = self.padding(shape[2:])
        sizes = zip(shape[2:], pads, self.reaches, self.strides, strict=True)
        return (shape[0], *(max(0, (size + sum(pad) - extent) // stride + 1) for size, pad, extent, stride in sizes))


def patches(values: Floats, window: Window, places: NDArray[np.int64]) -> Floats:
    """The rows [places, groups, values of a group] of an activation [n, channels, *sizes] at flat indices into
    `window.places`."""
    pads = window.padding(values.shape[2:])
    padded_values = np.pad(values, ((0, 0), (0, 0), *pads)) if any(map(any, pads)) else values
    # [n, channels, *starts, *reaches]: the values inside the window at each start position.
    spans = sliding_window_view(padded_values, window.reaches, axis=tuple(range(2, values.ndim)))
    # The kernel reads all of these values; with dilation 2, every second one.
    kernel_index: list[Any] = [..., *(slice(None, None, dilation) for dilation in window.dilations)]
    sample, *position = np.unravel_index(places, window.places(values.shape))
    offsets = [index * stride for index, stride in zip(position, window.strides, strict=True)]
    origins: list[Any] = [sample, slice(None), *offsets]
    return np.asarray(spans[tuple(kernel_index)][tuple(origins)].reshape(len(places), window.groups, -1))


def as_matrices(weight: Floats, groups: int) -> Floats:
    """A convolution's weight [out, in, *kernel] as [groups, in x kernel, out of a group]."""
    return weight.reshape(groups, weight.shape[0] // groups, -1).swapaxes(1, 2)


def as_weight(matrices: Floats, shape: Sequence[int]) -> Floats:
    """The result of `as_matrices` in the weight's own shape again."""
    return np.ascontiguousarray(matrices.swapaxes(1, 2).reshape(shape), np.float32)


MOST_BYTES = 128 << 20
# Maximum number of layers of one pass. Their activations are in memory together; those of the first layers are large.
MOST_LAYERS = 8
# Maximum size in bytes, over all runs, of a tensor at which a later pass starts.
MOST_HELD = 96 << 20
# Number of patches per value of a patch, and its minimum. `benchmarks/bench_calibration.py` measures their effect.
PATCHES_PER_VALUE = 3
LEAST_PATCHES = 8192
# Maximum number of patches from one sample, if there are enough samples.
PATCHES_PER_SAMPLE = 256
# Number of patches that are multiplied together: one large product is cheaper than many small ones.
HELD_PATCHES = 512
# Values of patches that are drawn at once.
DRAWN_VALUES = 1 << 21


@dataclass
class Moments:
    """Moments of the patches of one convolution, each [groups, values].

    origin: a point near the mean.  first_moment, second_moment: sums of the patches less `origin`, and of their
    outer products.  lost: for each int8 form of the activation, the sum of its errors.  held_patches: patches whose
    products are not in `second_moment` yet.
    """

    count: int = 0
    origin: Floats = field(default_factory=lambda: np.empty(0, np.float32))
    first_moment: NDArray[np.float64] = field(default_factory=lambda: np.empty(0))
    second_moment: Floats = field(default_factory=lambda: np.empty(0, np.float32))
    lost: dict[ActivationRange, NDArray[np.float64]] = field(default_factory=dict)
    held_patches: list[Floats] = field(default_factory=list)

    def add(self, rows: Floats, ranges: Iterable[ActivationRange] = ()) -> None:
        """Add patches [rows, groups, values], and their errors in int8."""
        if not len(rows):
            return
        if not self.count:
            # Sums about a point near the mean keep their digits in float32.
            self.origin = rows.mean(axis=0)
            self.first_moment = np.zeros(self.origin.shape)
            self.second_moment = np.zeros((*self.origin.shape, self.origin.shape[-1]), np.float32)
        centred_rows = rows - self.origin
        self.first_moment += centred_rows.sum(axis=0, dtype=np.float64)
        for grid in ranges:
            rounded_rows = rounded_activation(rows, grid.low, grid.high, grid.activation)
            self.lost[grid] = self.lost.get(grid, 0) + (rounded_rows - rows).sum(axis=0, dtype=np.float64)
        self.count += len(rows)
        self.held_patches.append(centred_rows)
        if sum(map(len, self.held_patches)) >= HELD_PATCHES:
            self._multiply()

    def _multiply(self) -> None:
        if self.held_patches:
            transposed_patches = np.concatenate(self.held_patches).transpose(1, 2, 0)
            for group, group_patches in enumerate(transposed_patches):
                self.second_moment[group] += group_patches @ group_patches.T
            self.held_patches = []

    @property
    def mean(self) -> NDArray[np.float64]:
        """Mean patch, [groups, values]."""
        return np.asarray(self.origin + self.first_moment / self.count)

    def take_covariance(self, about_zero: bool = False) -> Floats:
        """Covariance of the values of a patch, or the mean of x x', [groups, values, values]. It replaces the sums, for
        there is no memory for both: two matrices of 4608 values take 170 MB."""
        self._multiply()
        matrices, self.second_moment = self.second_moment, np.empty(0, np.float32)
        matrices /= np.float32(self.count)
        _add_products(matrices, (self.first_moment / self.count).astype(np.float32), -1)
        return _add_products(matrices, self.mean.astype(np.float32), 1) if about_zero else matrices


def _add_products(matrices: Floats, vectors: Floats, sign: int) -> Floats:
    """In place, row by row: each [values, values] matrix with the products of a vector [values] with itself added."""
    for matrix, vector in zip(matrices, vectors, strict=True):
        for row, value in zip(matrix, sign * vector, strict=True):
            row += value * vector
    return matrices


@dataclass(frozen=True)
class Layer:
    """A convolution whose moments are computed. values: number in a patch of one group.  ranges: of its activation."""

    site: Site
    window: Window
    values: int
    ranges: Collection[ActivationRange] = ()

    @property
    def wanted(self) -> int:
        """The number of patches to draw."""
        return max(PATCHES_PER_VALUE * self.values, LEAST_PATCHES)

    @property
    def bytes(self) -> int:
        """Size of its covariance matrices in bytes."""
        return 4 * self.window.groups * self.values**2


def find_layers(
    model: ModelProto, sites: Iterable[Site], ranges: Mapping[str, Collection[ActivationRange]]
) -> list[Layer]:
    """The convolutions among the sites of a prepared model. ranges: by activation."""
    initializers, nodes, layers = constants(model.graph), {node.name: node for node in model.graph.node}, []
    for site in sites:
        if site.op_type == "Conv":
            shape = initializers[site.weight].dims
            window = Window.of(nodes[site.node], shape)
            layers.append(Layer(site, window, math.prod(shape[1:]), ranges.get(site.activation, ())))
    return layers


def batches(layers: Sequence[Layer], max_bytes: int = MOST_BYTES) -> Iterator[tuple[Layer, ...]]:
    """Consecutive layers, `MOST_LAYERS` at most, whose matrices together take at most `max_bytes`."""
    layer_batch: list[Layer] = []
    for layer in layers:
        is_full = (
            len(layer_batch) == MOST_LAYERS or sum(member.bytes for member in layer_batch) + layer.bytes > max_bytes
        )
        if layer_batch and is_full:
            yield tuple(layer_batch)
            layer_batch = []
        layer_batch.append(layer)
    if layer_batch:
        yield tuple(layer_batch)


@dataclass(frozen=True)
class StartedRuns:
    """Runs whose inputs also contain tensors of the model, which need not be computed again. tensor_types: of these
    tensors (name -> element type)."""

    runs: Sequence[Run]
    tensor_types: Mapping[str, int] = field(default_factory=dict)


def moments_of(
    model: ModelProto, batch: Sequence[Layer], started_runs: StartedRuns, keep: str | None = None
) -> tuple[dict[str, Moments], StartedRuns]:
    """Moments by node, from one pass over the runs that computes the model only up to these layers; and the runs for
    later passes, which start at the tensor `keep` if this pass used all runs and their values fit `MOST_HELD`."""
    runs, input_names = started_runs.runs, {value.name for value in model.graph.input} | {*started_runs.tensor_types}
    inner_types = dict.fromkeys(
        (name for layer in batch if (name := layer.site.activation) not in input_names), TensorProto.FLOAT
    )
    tail_model = tail(
        model,
        started_runs.tensor_types,
        inner_types | ({keep: TensorProto.FLOAT} if keep and keep not in input_names else {}),
    )
    set_ranks(tail_model, [inputs for _, inputs in runs[:1]])
    runner = SessionRunner(tail_model) if tail_model.graph.output else None
    layer_moments = {layer.site.node: Moments() for layer in batch}
    first_values = {**runs[0][1], **(runner.run(runs[0][1]) if runner else {})} if runs else {}
    batch_runs = _choose_runs(runs, batch, first_values)
    keeps_all = (
        len(batch_runs) == len(runs) and keep in first_values and first_values[keep].nbytes * len(runs) <= MOST_HELD
    )
    cached_runs, total, done_count = list[Run](), sum(count for count, _ in batch_runs), 0
    for index, (count, inputs) in enumerate(batch_runs):
        values = {**inputs, **(runner.run(inputs) if runner else {})} if index else first_values
        for layer in batch:
            # The difference of two cumulative counts, so that no rounding adds up.
            quota = layer.wanted * (done_count + count) // total - layer.wanted * done_count // total
            for rows in _draw(values[layer.site.activation], layer, quota, index):
                layer_moments[layer.site.node].add(rows, layer.ranges)
        done_count += count
        if keeps_all and keep:
            cached_runs.append(
                (
                    count,
                    {
                        **{name: array for name, array in inputs.items() if name not in started_runs.tensor_types},
                        keep: values[keep],
                    },
                )
            )
    return layer_moments, StartedRuns(cached_runs, {keep: TensorProto.FLOAT}) if cached_runs and keep else started_runs


def _choose_runs(runs: Sequence[Run], batch: Iterable[Layer], first_values: Mapping[str, Array]) -> Sequence[Run]:
    """Evenly chosen runs, with the first: enough for the patches of these layers, with at most `PATCHES_PER_SAMPLE` of
    one sample. first_values: the activations of the first run."""
    if not runs:
        return runs
    count, run_count = runs[0][0], 1
    for layer in batch:
        patch_count = math.prod(layer.window.places(first_values[layer.site.activation].shape)) // count
        run_count = max(run_count, -(-layer.wanted // max(1, min(patch_count, PATCHES_PER_SAMPLE))))
    return runs[:: max(1, sum(sample_count for sample_count, _ in runs) // run_count)]


def _draw(values: Floats, layer: Layer, quota: int, seed: int) -> Iterator[Floats]:
    """Yield `quota` patches, or all, from uniformly random places, as blocks [rows, groups, values]."""
    total = math.prod(layer.window.places(values.shape))
    if quota >= total:
        positions = np.arange(total)
    else:
        positions = np.sort(np.random.default_rng(seed).choice(total, quota, replace=False))
    batch_size = max(1, DRAWN_VALUES // (layer.window.groups * layer.values))
    for start in range(0, len(positions), batch_size):
        yield patches(values, layer.window, positions[start : start + batch_size])
