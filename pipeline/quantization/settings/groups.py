"""Groups of nodes that share one quantized activation, and the rounding of their weights."""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, helper

from builders.onnx_graphs.bodies import list_reads
from builders.onnx_graphs.weights import to_array
from enginesmith.core.errors import ModelError
from enginesmith.core.types import Tensors
from pipeline.quantization.graph import attribute_of, constants, consumers, infer_at, shapes_of
from pipeline.quantization.insertion_points import Site
from pipeline.quantization.schemes.block_floats import LARGEST_E4M3, BlockFormat
from pipeline.quantization.settings.runs import SessionRunner, with_outputs

# All nodes of a group are quantized, or none: query, key and value projections read one tensor, with one Q/DQ pair, one
# fused kernel, one set of smoothing factors. The settings of a group are fitted on its statistics, gathered in one
# streaming pass: each channel's extremes, the matrix of second moments E[x x'] (it gives the error of any change of a
# weight at the node's output, without another run), and a thousand rows for trials of activations. Extremes and rows
# are kept by halves. Memory is that of one inference and of these statistics.

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class SmoothingGroup:
    """The sites that read `activation`.

    mixes: whether all of them multiply matrices with the activation's last axis, so that factors for its channels can
    move into the weights. Only matrices' inputs get factors; a convolution's input is never smoothed.
    """

    activation: str
    sites: tuple[Site, ...]
    mixes: bool

    @property
    def nodes(self) -> tuple[str, ...]:
        """Names of the nodes."""
        return tuple(site.node for site in self.sites)


def find_groups(model: ModelProto, sites: Iterable[Site]) -> tuple[SmoothingGroup, ...]:
    """The sites of a prepared model by the activation they read, in the model's order."""
    transposed_nodes = {node.name for node in model.graph.node if attribute_of(node, "transA", 0)}
    sites_by_name: dict[str, list[Site]] = {}
    for site in sites:
        sites_by_name.setdefault(site.activation, []).append(site)
    return tuple(
        SmoothingGroup(
            name,
            tuple(group_sites),
            all(site.op_type in ("MatMul", "Gemm") and site.node not in transposed_nodes for site in group_sites),
        )
        for name, group_sites in sites_by_name.items()
    )


def matrices(model: ModelProto, groups: Sequence[SmoothingGroup]) -> Mapping[str, Floats]:
    """Node name -> weight as [channels in, channels out], for the groups that mix."""
    initializers = constants(model.graph)
    sites = [site for group in groups if group.mixes for site in group.sites]
    return {site.node: transpose_for(site, to_array(initializers[site.weight])) for site in sites}


def find_biases(model: ModelProto, groups: Sequence[SmoothingGroup]) -> Mapping[str, tuple[str, int]]:
    """Node name -> (node, index of its input) that reads the constant bias [channels out], for the groups that mix. The
    bias of a MatMul is in an Add that is the product's only reader. Nodes without a bias are left out."""
    initializers, readers = constants(model.graph), consumers(model.graph)
    nodes, outputs = {node.name: node for node in model.graph.node}, {value.name for value in model.graph.output}
    bias_inputs = dict[str, tuple[str, int]]()
    for site in (site for group in groups if group.mixes for site in group.sites):
        node = nodes[site.node]
        users = readers.get(node.output[0], []) if node.output[0] not in outputs else []
        if node.op_type == "MatMul" and len(users) == 1 and users[0].op_type == "Add":
            input_slots = [(users[0], index) for index, name in enumerate(users[0].input) if name != node.output[0]]
        else:
            is_plain = node.op_type == "Gemm" and len(node.input) > 2 and attribute_of(node, "alpha", 1.0) == 1
            input_slots = [(node, 2)] if is_plain else []
        for reader, index in input_slots:
            bias = initializers.get(reader.input[index])
            if bias is not None and list(bias.dims) == [initializers[site.weight].dims[site.axis]]:
                bias_inputs[site.node] = reader.name, index
    return bias_inputs


def transpose_for(site: Site, weight: Floats) -> Floats:
    """A node's stored weight as [channels in, channels out]; or such a matrix as the node stores it."""
    return weight.T if site.axis == 0 else weight


# Rows kept of each half. Beyond twice as many, every second row is dropped, and later runs add half as many.
ROWS = 512
FIRST_QUOTA = 32
# Second moments of wider activations would take gigabytes; their weights are rounded to the nearest.
WIDEST = 8192
# With fewer rows than a sixteenth of the channels, second moments hardly show correlations of channels, and a run of
# one row costs as much as one of hundreds: an unrolled LSTM of 40 steps behind 4,096 channels took minutes.
FEWEST = 16


@dataclass
class ChannelSums:
    """Half of the rows of one activation. low, high: extremes, [channels].  sampled_rows: [n, channels] of each run.
    quota: number of rows to keep of the next run."""

    low: Floats = field(default_factory=lambda: np.empty(0, np.float32))
    high: Floats = field(default_factory=lambda: np.empty(0, np.float32))
    sampled_rows: list[Floats] = field(default_factory=list)
    quota: int = FIRST_QUOTA

    def add(self, rows: Floats) -> None:
        """Add rows, [n, channels]."""
        if not len(rows):
            return
        low, high = rows.min(axis=0), rows.max(axis=0)
        self.low = np.minimum(self.low, low) if self.sampled_rows else low
        self.high = np.maximum(self.high, high) if self.sampled_rows else high
        # An odd step: sequence lengths are mostly even, and an even step would miss the same positions in all of them.
        self.sampled_rows.append(rows[:: (len(rows) // self.quota) | 1][: self.quota].copy())
        if sum(map(len, self.sampled_rows)) > 2 * ROWS:
            self.sampled_rows, self.quota = [self.rows[::2]], max(1, self.quota // 2)

    @property
    def rows(self) -> Floats:
        """The sampled rows, [n, channels]."""
        return np.concatenate(self.sampled_rows)


@dataclass
class Statistics:
    """Statistics of one group's activation. count: of rows.  runs: their number.  total: sum of x, [channels].  sums:
    sum of x x', [channels, channels]; both without the `unsummed` rows, fewer than 1/`FEWEST` of the channels.

    halves: of the rows; settings that were fitted on one are judged on the other.
    """

    count: int = 0
    runs: int = 0
    total: NDArray[np.float64] = field(default_factory=lambda: np.zeros(1))
    sums: Floats | None = None
    unsummed: list[Floats] = field(default_factory=list)
    halves: tuple[ChannelSums, ChannelSums] = field(default_factory=lambda: (ChannelSums(), ChannelSums()))

    def add(self, values: Floats) -> None:
        """Add one run's values, [..., channels]. Its first rows, which may be special, go to each half in turn."""
        rows = values.reshape(-1, values.shape[-1])
        if not len(rows):
            return
        midpoint, half_index = len(rows) // 2, self.runs % 2
        self.halves[half_index].add(rows[:midpoint])
        self.halves[1 - half_index].add(rows[midpoint:])
        self.count += len(rows)
        if rows.shape[1] <= WIDEST:
            self.unsummed.append(rows.copy())
            if sum(map(len, self.unsummed)) * FEWEST >= rows.shape[1]:
                pending_rows = np.concatenate(self.unsummed)
                sums = pending_rows.T @ pending_rows
                self.total = self.total + pending_rows.sum(axis=0, dtype=np.float64)
                self.sums = sums if self.sums is None else np.add(self.sums, sums, out=self.sums)
                self.unsummed = []
        self.runs += 1

    @property
    def low(self) -> Floats:
        """Least values, [channels]."""
        return np.asarray(np.min([half.low for half in self.halves if half.sampled_rows], axis=0))

    @property
    def high(self) -> Floats:
        """Greatest values, [channels]."""
        return np.asarray(np.max([half.high for half in self.halves if half.sampled_rows], axis=0))

    @property
    def rows(self) -> Floats:
        """The sampled rows of both halves, [n, channels]."""
        return np.concatenate([rows for half in self.halves for rows in half.sampled_rows])

    @property
    def moments(self) -> Floats | None:
        """Mean of x x' over the summed rows, [channels, channels]; None for an activation wider than `WIDEST`, or with
        too few rows."""
        return None if self.sums is None else self.sums / np.float32(self._summed)

    @property
    def mean(self) -> Floats:
        """Mean of x over the same rows, [channels]."""
        return np.asarray(self.total / self._summed, np.float32)

    @property
    def _summed(self) -> int:
        return self.count - sum(map(len, self.unsummed))


@dataclass(frozen=True)
class StatisticsWork:
    """Cost of a node for one sample, on average. macs: multiplications.  weight_bytes: of its float32 weight."""

    macs: float
    weight_bytes: int


def gather(
    model: ModelProto,
    groups: Sequence[SmoothingGroup],
    runs: Iterable[tuple[int, Tensors]],
    check: Callable[[str], None] = lambda _: None,
    mask: str | None = None,
) -> tuple[dict[str, Statistics], dict[str, StatisticsWork]]:
    """Statistics by activation, for the groups that mix, and work by node. runs: (samples in it, inputs).

    groups: of several kinds of int8; a node may be in more than one.  mask: input whose zeros mark padding.
    check: called before each run; its exception ends the pass.
    Raises ModelError if there are no runs, or the model does not run on them.
    """
    mixing_names = [*dict.fromkeys(group.activation for group in groups if group.mixes)]
    sites = [*{site.node: site for group in groups for site in group.sites}.values()]
    if not sites:
        return {}, {}
    output_names = {node.name: node.output[0] for node in model.graph.node}
    counted_tensors = {
        site.node: site.activation if site.op_type == "ConvTranspose" else output_names[site.node] for site in sites
    }
    runs = list(runs)
    inferred_sizes = _infer_sizes(model, counted_tensors, (inputs for _, inputs in runs))
    measured_model = with_outputs(model, dict.fromkeys(mixing_names, TensorProto.FLOAT))
    shapes = {} if inferred_sizes else {node: f"enginesmith/shape/{node}" for node in counted_tensors}
    for node, name in shapes.items():
        measured_model.graph.node.append(helper.make_node("Shape", [counted_tensors[node]], [name], name=name))
        measured_model.graph.output.append(helper.make_tensor_value_info(name, TensorProto.INT64, None))
    runner = SessionRunner(measured_model) if measured_model.graph.output else None
    del measured_model
    group_statistics: dict[str, Statistics] = {name: Statistics() for name in mixing_names}
    sizes, sample_count = dict.fromkeys(counted_tensors, 0.0), 0
    for count, inputs in runs:
        check("gathering statistics")
        values = runner.run(inputs) if runner else {}
        for name in mixing_names:
            is_padded = mask is not None and values[name].shape[:-1] == inputs[mask].shape
            group_statistics[name].add(values[name][inputs[mask] != 0] if mask and is_padded else values[name])
        output_sizes = (
            inferred_sizes[_signature(inputs)]
            if inferred_sizes
            else {node_name: math.prod(values[shape_name].tolist()) for node_name, shape_name in shapes.items()}
        )
        for node, size in output_sizes.items():
            sizes[node] += size
        sample_count += count
    if not sample_count:
        raise ModelError("there are no calibration samples to choose with; give at least one")
    initializers, node_work = constants(model.graph), {}
    for site in sites:
        weight = initializers[site.weight]
        channels = weight.dims[0 if site.op_type == "ConvTranspose" else site.axis]
        macs = sizes[site.node] / sample_count * math.prod(weight.dims) / channels
        node_work[site.node] = StatisticsWork(macs, to_array(weight).nbytes)
    return group_statistics, node_work


def _signature(inputs: Tensors) -> tuple[tuple[str, tuple[int, ...]], ...]:
    return tuple((name, values.shape) for name, values in sorted(inputs.items()))


def _infer_sizes(
    model: ModelProto, tensors: Mapping[str, str], runs: Iterable[Tensors]
) -> dict[tuple[tuple[str, tuple[int, ...]], ...], dict[str, int]]:
    """By the shapes of the inputs, the size of each node's tensor in elements; {} if inference does not find all.

    A session with all shapes as outputs keeps the tensors to the end of a run: 930 MiB for 8 images on ResNet-50.
    """
    sizes_by_signature = {}
    for signature in dict.fromkeys(map(_signature, runs)):
        shapes = shapes_of(infer_at(model, dict(signature)).graph)
        sizes_by_signature[signature] = {node: math.prod(shapes.get(tensor, (0,))) for node, tensor in tensors.items()}
        if not all(sizes_by_signature[signature].values()):
            return {}
    return sizes_by_signature


# Rounding of activations and weights to int8. A weight is rounded so that the errors of its rows cancel at the output.
#
# GPTQ (Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers", 2023),
# which goes back to Optimal Brain Surgeon: input channels are rounded one after the other, and the later ones
# compensate for the error of each, as far as the activations are correlated (`moments`). It is implemented as in Chee
# et al. ("QuIP: 2-Bit Quantization of Large Language Models With Guarantees", 2023): feedback through the triangular
# factor of the moments, which needs one Cholesky decomposition and no inverse.
#
# Matrices are float32 [..., in, out] and moments float32 [..., in, in]: a grouped convolution is one matrix per group.

Real = NDArray[np.floating]
# The last level of int8, or a format of blocks.
Levels = int | BlockFormat

# The addend of the diagonal, in mean second moments. MiniLM on held-out sentences, NVFP4 weights: 17.7 dB with 0.01 and
# without descent, 18.0 with 0.04 and two sweeps, 18.1 with 0.1 and three; int8 gained 0.1 dB.
DAMPING = 0.1
SWEEPS = 3
BLOCK = 64
LEVELS = 127  # the last level of int8, unless a scheme has fewer
# Wider matrices are decomposed in float32, which halves time and memory; damping keeps that well conditioned.
WIDEST_IN_DOUBLE = 1024
# Columns that are decomposed at a time.
DECOMPOSED = 512


def rounded_activation(values: Floats, low: float, high: float, activation: str) -> Floats:
    """The values as int8 (symmetric) or uint8 (asymmetric) holds them in the range [low, high]; dequantized."""
    if activation == "int8":
        step = max(-low, high, 1e-30) / 127
        return np.asarray(np.clip(np.rint(values / step), -128, 127) * step, np.float32)
    low, high = min(low, 0.0), max(high, 0.0)
    step = max(high - low, 1e-30) / 255
    zero = round(-low / step)
    return np.asarray((np.clip(np.rint(values / step) + zero, 0, 255) - zero) * step, np.float32)


def steps_of(matrix: Floats, levels: int = LEVELS) -> Floats:
    """Step of each output channel, [..., out]: its largest magnitude is the last of `levels`."""
    amax = np.abs(matrix).max(axis=-2)
    return np.asarray(np.where(amax > 0, amax, 1) / levels, np.float32)


def _rows_of_steps(matrix: Floats, levels: Levels, importance: Real | None = None) -> Floats:
    """Steps [..., 1, out] of integers; for blocks, a step for each value, chosen by the importance of its row."""
    if isinstance(levels, int):
        return steps_of(matrix, levels)[..., None, :]
    weights = None if importance is None else importance.astype(np.float32)
    block_scales = [levels.scales(block, weights) for block in matrix.reshape(-1, *matrix.shape[-2:])]
    scales = np.repeat(np.stack(block_scales), levels.block or matrix.shape[-2], axis=1).reshape(matrix.shape)
    return np.asarray(np.maximum(scales, np.finfo(np.float32).tiny), np.float32)


def _round(values: Real, levels: Levels) -> Real:
    return np.clip(np.rint(values), -levels, levels) if isinstance(levels, int) else levels.round(values)


def nearest(matrix: Floats, levels: Levels = LEVELS) -> Floats:
    """Every value rounded to the nearest level of its output channel, or of its block."""
    steps = _rows_of_steps(matrix, levels)
    return np.asarray(_round(matrix / steps, levels) * steps, np.float32)


def compensate(matrix: Floats, moments: Floats, levels: Levels = LEVELS) -> Floats:
    """The matrix rounded by GPTQ, for activations whose mean of x x' is `moments`. levels: the last one, or a format.

    Moments of more values than `WIDEST_IN_DOUBLE` are decomposed in place, and invalid afterwards.

    Each output channel keeps a value at its last level, so quantizing the result finds the same steps. Falls back to
    `nearest` if the moments are degenerate.
    """
    rows = matrix.reshape(-1, *matrix.shape[-2:])
    is_wide = rows.shape[1] > WIDEST_IN_DOUBLE
    dtype = np.float32 if is_wide else np.float64
    ordered_moments: Real = np.array(moments.reshape(-1, *moments.shape[-2:]), dtype, copy=None if is_wide else True)
    # Feedback runs upwards: the input channel with the largest second moment is the last row, and is rounded first.
    importance = np.diagonal(ordered_moments, axis1=1, axis2=2).copy()
    order = np.argsort(-importance, axis=1, kind="stable")[:, ::-1]
    for group_moments, group_order in zip(ordered_moments, order, strict=True):
        _reorder(group_moments, group_order)
    has_blocks = not isinstance(levels, int) and bool(levels.block)
    full_moments = ordered_moments.copy() if has_blocks else ordered_moments
    factor = _factor(ordered_moments)
    if factor is None:
        return nearest(matrix, levels)
    sorted_rows: Real = np.take_along_axis(rows, order[..., None], 1).astype(dtype)
    rounded_rows = np.empty_like(rows)
    steps: Real = _rows_of_steps(rows, levels, importance).astype(dtype)
    if steps.shape[1] > 1:
        steps = np.take_along_axis(steps, order[..., None], 1).astype(dtype)
    level_rows = _round_rows(sorted_rows, factor, steps, levels)
    if has_blocks:
        _descend(level_rows, sorted_rows, full_moments, steps, levels)
    np.put_along_axis(rounded_rows, order[..., None], level_rows.astype(np.float32), 1)
    if has_blocks:
        return rounded_rows.reshape(matrix.shape)
    last_level = levels if isinstance(levels, int) else int(LARGEST_E4M3)
    return _with_last_level(rounded_rows, rows, last_level).reshape(matrix.shape)


def _factor(moments: Real) -> Real | None:
    """In place: L, unit lower triangular, with L D L' the damped moments; the upper triangle is not used. None if they
    are not positive definite."""
    if not (np.trace(moments, axis1=1, axis2=2) > 0).any():
        return None
    _damp(moments)
    try:
        for matrix in moments:
            _decompose(matrix)
    except np.linalg.LinAlgError:
        return None
    moments /= np.diagonal(moments, axis1=1, axis2=2)[:, None].copy()
    return moments


def _damp(moments: Real) -> None:
    """In place: add to the diagonal. If a group's activations are always zero, its rounding does not matter."""
    size = moments.shape[-1]
    power = np.trace(moments, axis1=1, axis2=2) / size
    moments[:, np.arange(size), np.arange(size)] += np.where(power > 0, DAMPING * power, 1)[:, None]


def _reorder(matrix: Real, order: NDArray[np.intp]) -> None:
    """Reorder rows and columns of a square matrix, in place, without a second matrix."""
    for start in range(0, len(matrix), BLOCK):
        columns = matrix[:, start : start + BLOCK]
        columns[:] = columns[order]
    for start in range(0, len(matrix), BLOCK):
        rows = matrix[start : start + BLOCK]
        rows[:] = rows[:, order]


def _decompose(matrix: Real) -> None:
    """In place, without a second matrix: the lower triangle becomes the Cholesky factor; the upper is meaningless."""
    for start in range(0, len(matrix), DECOMPOSED):
        stop = start + DECOMPOSED
        diagonal_block = np.linalg.cholesky(matrix[start:stop, start:stop])
        matrix[start:stop, start:stop] = diagonal_block
        if stop < len(matrix):
            lower_block = matrix[stop:, start:stop] @ np.linalg.inv(diagonal_block).T
            matrix[stop:, start:stop] = lower_block
            for row in range(0, len(lower_block), DECOMPOSED):  # of the rest, the lower triangle
                rows = lower_block[row : row + DECOMPOSED]
                matrix[stop + row : stop + row + len(rows), stop : stop + row + len(rows)] -= (
                    rows @ lower_block[: row + len(rows)].T
                )


def _round_rows(rows: Real, factor: Real, steps: Real, levels: Levels) -> Real:
    """The rows, rounded from the last to the first; each compensates for the errors of the rows behind it."""
    rounded_rows, errors = np.empty_like(rows), np.zeros_like(rows)
    for stop in range(rows.shape[1], 0, -BLOCK):
        start = max(0, stop - BLOCK)
        target_rows = rows[:, start:stop] - factor[:, stop:, start:stop].swapaxes(1, 2) @ errors[:, stop:]
        for i in range(stop - 1, start - 1, -1):
            feedback = factor[:, i + 1 : stop, i : i + 1].swapaxes(1, 2) @ errors[:, i + 1 : stop]
            targets = target_rows[:, i - start : i - start + 1] - feedback
            step = steps[:, i : i + 1] if steps.shape[1] > 1 else steps
            rounded_rows[:, i : i + 1] = _round(targets / step, levels) * step
            errors[:, i] = rounded_rows[:, i] - rows[:, i]
    return rounded_rows


def _descend(rounded_rows: Real, rows: Real, moments: Real, steps: Real, levels: Levels) -> None:
    """In place: round each row again, to compensate for the errors of all others, `SWEEPS` times (coordinate descent:
    Behdin et al., "QuantEase: Optimization-based Quantization for Language Models", 2023)."""
    _damp(moments)
    for _ in range(SWEEPS):
        slopes = moments @ (rounded_rows - rows)
        for start in range(0, rows.shape[1], BLOCK):
            block = slice(start, start + BLOCK)
            gradient = slopes[:, block].copy()
            old_rows = rounded_rows[:, block].copy()
            hessian = moments[:, block, block]
            for i in range(gradient.shape[1]):
                column = slice(start + i, start + i + 1)
                targets = rounded_rows[:, column] - gradient[:, i : i + 1] / hessian[:, i : i + 1, i : i + 1]
                updates = _round(targets / steps[:, column], levels) * steps[:, column] - rounded_rows[:, column]
                rounded_rows[:, column] += updates
                gradient += hessian[:, :, i : i + 1] * updates
            slopes += moments[:, :, block] @ (rounded_rows[:, block] - old_rows)


def _with_last_level(rounded_rows: Floats, matrix: Floats, levels: int) -> Floats:
    """In place: a channel without a value at its last level gets its largest value back unrounded."""
    peak_indices = np.argmax(np.abs(matrix), axis=1)[:, None]
    lost_mask = np.abs(rounded_rows).max(axis=1, keepdims=True) < (levels - 0.5) * steps_of(matrix, levels)[:, None]
    top_values = np.where(
        lost_mask, np.take_along_axis(matrix, peak_indices, 1), np.take_along_axis(rounded_rows, peak_indices, 1)
    )
    np.put_along_axis(rounded_rows, peak_indices, top_values, 1)
    return rounded_rows


def find_waists(model: ModelProto, tensors: Collection[str], types: Mapping[str, int]) -> list[tuple[int, str]]:
    """(index of its node, name) of each float tensor that is the only connection between earlier and later nodes, such
    as the residual stream between two layers: later nodes read no other tensor of `tensors` from before. In order,
    without outputs of the model. types: name -> ONNX's element type."""
    graph = model.graph
    outputs, last_reads = {value.name for value in graph.output}, dict[str, int]()
    for index, node in enumerate(graph.node):
        last_reads |= dict.fromkeys(list_reads(node), index)
    last_reads |= dict.fromkeys(outputs, len(graph.node))
    waists, live_tensors = list[tuple[int, str]](), {value.name for value in graph.input if value.name in tensors}
    for index, node in enumerate(graph.node):
        live_tensors -= {name for name in list_reads(node) if last_reads[name] == index}
        live_tensors |= {name for name in node.output if name in tensors and last_reads.get(name, 0) > index}
        waist = next(iter(live_tensors)) if len(live_tensors) == 1 else ""
        if waist in node.output and waist not in outputs and types.get(waist) == TensorProto.FLOAT:
            waists.append((index, waist))
    return waists
