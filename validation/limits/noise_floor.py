"""The noise floor: the error of a model's own float32 outputs, which is no fault of an engine.

The model is run in float64 and in float32 on cases of the golden set. An engine's limits follow from the difference
(`budget`): a rounding unit of float16 is 2^13 times that of float32 and one of bfloat16 2^16 times (Higham,
"Accuracy and Stability of Numerical Algorithms", 2002, chapters 2 and 3: to first order, errors grow with the unit).

ONNX's own reference evaluator runs the graph in float64 with numpy. Its convolutions and max pooling, which work
element by element, are replaced by matrix products and windows; its Erf is replaced because it rounds to float32.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from onnx import AttributeProto, TensorProto, helper, numpy_helper

from builders.onnx_graphs.bodies import walk_graphs, walk_nodes
from builders.onnx_graphs.outline import lacks_lists, load_outline
from builders.onnx_graphs.weights import to_array, without_weights
from enginesmith.arrays import Array
from enginesmith.core.types import Tensors
from validation.metrics.drift import Drift, is_exact, measure

if TYPE_CHECKING:
    from onnx import ModelProto
    from onnx.reference.op_run import OpRun

# At most this many cases of each kind are measured: one in float64 takes as long as several inferences.
MOST_CASES = 2
# Operators with a random result: two runs differ by more than rounding.
RANDOM = ("RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike", "Multinomial", "Bernoulli")


def random_operator(model: "ModelProto") -> str | None:
    """The type of the first operator of a model with a random result; None without any."""
    return next((node.op_type for node in walk_nodes(model.graph) if node.op_type in RANDOM), None)


class DoubleSession:
    """Runs a float32 ONNX model in float64. Raises ValueError for random operators, for a large tree ensemble, and for
    an operator that the evaluator does not implement (with its error)."""

    def __init__(self, model: Path) -> None:
        from onnx.reference import ReferenceEvaluator

        outline = load_outline(model, lists=True)
        if operator_name := random_operator(outline):
            raise ValueError(f"{operator_name} gives random results")
        if lacks_lists(outline):  # the evaluator makes a Python object of each number: gigabytes, minutes
            raise ValueError("a tree ensemble of this size is not run in float64")
        try:
            light_model = without_weights(outline)
            weight_names = {initializer.name for initializer in light_model.graph.initializer}
            # Kept outside the model, because protobuf would store and copy float64 weights.
            outside_tensors = [tensor for tensor in outline.graph.initializer if tensor.name not in weight_names]
            self._weights = {tensor.name: _as_double(to_array(tensor)) for tensor in outside_tensors}
            _widen(light_model)
            self._evaluator = ReferenceEvaluator(light_model, new_ops=_operators())
        except Exception as error:  # RuntimeError for an operator of this opset, NotImplementedError for another domain
            raise ValueError(f"{type(error).__name__}: {error}") from error

    def run(self, inputs: Tensors) -> dict[str, Array]:
        """All outputs, float32 ones as float64. Raises ValueError with the evaluator's error if the evaluator fails."""
        feeds = self._weights | {name: _as_double(array) for name, array in inputs.items()}
        try:
            with np.errstate(all="ignore"):
                outputs = self._evaluator.run(None, feeds)
        except Exception as error:  # the evaluator raises whatever numpy and its operators do
            raise ValueError(f"{type(error).__name__}: {error}") from error
        return dict(zip(self._evaluator.output_names, outputs, strict=True))


def _as_double(array: Array) -> Array:
    return array.astype(np.float64) if array.dtype == np.float32 else array


def _widen(model: "ModelProto") -> None:
    """Replace float32 by float64 in constants, casts, inputs and outputs, in place, and drop inferred shapes."""

    def widen(tensor: TensorProto) -> TensorProto:
        return numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float64), tensor.name)

    for graph in [*walk_graphs(model.graph), *model.functions]:
        for node in graph.node:
            for attribute in node.attribute:
                _widen_attribute(node.op_type, attribute, widen)
    for graph in walk_graphs(model.graph):
        del graph.value_info[:]
        for value in (*graph.input, *graph.output):
            if value.type.tensor_type.elem_type == TensorProto.FLOAT:
                value.type.tensor_type.elem_type = TensorProto.DOUBLE
        for tensor in graph.initializer:
            if tensor.data_type == TensorProto.FLOAT:
                tensor.CopyFrom(widen(tensor))


def _widen_attribute(op_type: str, attribute: "AttributeProto", widen: "Callable[[TensorProto], TensorProto]") -> None:
    if attribute.type == AttributeProto.TENSOR and attribute.t.data_type == TensorProto.FLOAT:
        attribute.t.CopyFrom(widen(attribute.t))
    elif op_type == "Cast" and attribute.name == "to" and attribute.i == TensorProto.FLOAT:
        attribute.i = TensorProto.DOUBLE
    elif op_type == "Constant" and attribute.name in ("value_float", "value_floats"):
        values = [attribute.f] if attribute.name == "value_float" else list(attribute.floats)
        shape = [] if attribute.name == "value_float" else [len(values)]
        attribute.CopyFrom(helper.make_attribute("value", helper.make_tensor("", TensorProto.DOUBLE, shape, values)))


def _operators() -> "list[type[OpRun]]":
    """Conv, MaxPool and Erf for the evaluator, whose own Erf rounds to float32."""
    from onnx.reference.op_run import OpRun
    from onnx.reference.ops.op_max_pool import MaxPool as AnyMaxPool

    class Conv(OpRun):
        def _run(self, x: Array, w: Array, b: Array | None = None, **attrs: object) -> tuple[Array]:
            return (convolve(x, w, b, _ints(attrs.get("group") or 1)[0], *_window(attrs, x.shape[2:], w.shape[2:])),)

    class MaxPool(AnyMaxPool):
        def _run(self, x: Array, **attrs: object) -> tuple[Array, ...]:  # type: ignore[override]
            if len(self.onnx_node.output) > 1 or attrs.get("ceil_mode"):
                outputs: tuple[Array, ...] = super()._run(x, **attrs)  # type: ignore[no-untyped-call] # and rare
                return outputs
            kernel = _ints(attrs.get("kernel_shape"))
            strides, dilations, pads = _window(attrs, x.shape[2:], kernel)
            patches = windows(x, kernel, strides, dilations, pads, -np.inf)
            return (patches.max(axis=tuple(range(-len(kernel), 0))),)

    class Erf(OpRun):
        def _run(self, x: Array) -> tuple[Array]:
            return (np.array([math.erf(value) for value in x.ravel().tolist()], x.dtype).reshape(x.shape),)

    return [Conv, MaxPool, Erf]


def convolve(
    x: Array,
    w: Array,
    b: Array | None,
    group: int,
    strides: Sequence[int],
    dilations: Sequence[int],
    pads: Sequence[tuple[int, int]],
) -> Array:
    """A convolution as matrix products, one sample at a time: (n, out, places...).

    x: (n, c, ...).  w: (out, c / group, kernel...).  b: (out,).  pads: before and behind, for each spatial axis.
    strides, dilations: for each spatial axis.
    """
    kernel = w.shape[2:]
    matrices = w.reshape(group, w.shape[0] // group, -1)
    results = []
    for sample in x:
        patches = windows(sample[None], kernel, strides, dilations, pads, 0.0)[0]
        output_sizes = patches.shape[1 : 1 + len(kernel)]
        # (c, sizes..., kernel...) -> (group, c / group * kernel, sizes)
        order = (0, *range(1 + len(kernel), patches.ndim), *range(1, 1 + len(kernel)))
        columns = patches.transpose(order).reshape(group, matrices.shape[2], -1)
        results.append((matrices @ columns).reshape(w.shape[0], *output_sizes))
    convolution = np.stack(results) if results else np.zeros((0, w.shape[0], *([0] * len(kernel))))
    return convolution if b is None else convolution + b.reshape(1, -1, *([1] * len(kernel)))


def windows(
    x: Array,
    kernel: Sequence[int],
    strides: Sequence[int],
    dilations: Sequence[int],
    pads: Sequence[tuple[int, int]],
    fill: float,
) -> Array:
    """A view of all windows of x, which is (n, c, ...), padded with `fill`: (n, c, places..., kernel...).

    strides, dilations, pads: as of `convolve`.
    """
    padded_array = np.pad(x, [(0, 0), (0, 0), *pads], constant_values=fill)
    spans = tuple((size - 1) * dilation + 1 for size, dilation in zip(kernel, dilations, strict=True))
    window_view = sliding_window_view(padded_array, spans, tuple(range(2, x.ndim)))
    return np.asarray(window_view[:, :, *(slice(None, None, step) for step in (*strides, *dilations))])


def _window(
    attrs: dict[str, object], sizes: Sequence[int], kernel: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...], list[tuple[int, int]]]:
    """Strides, dilations and padding of each spatial axis, from a node's attributes (ONNX operators, Conv)."""
    rank = len(kernel)
    strides, dilations = (_ints(attrs.get(name) or [1] * rank) for name in ("strides", "dilations"))
    auto_pad = attrs.get("auto_pad") or "NOTSET"
    auto_pad = auto_pad.decode() if isinstance(auto_pad, bytes) else str(auto_pad)
    if not auto_pad.startswith("SAME"):
        pads = _ints((attrs.get("pads") if auto_pad == "NOTSET" else None) or [0] * 2 * rank)
        return strides, dilations, [(pads[axis], pads[axis + rank]) for axis in range(rank)]
    pad_pairs = []
    for size, length, stride, dilation in zip(sizes, kernel, strides, dilations, strict=True):
        total = max(0, (-(-size // stride) - 1) * stride + (length - 1) * dilation + 1 - size)
        small_pad, large_pad = total // 2, total - total // 2
        pad_pairs.append((small_pad, large_pad) if auto_pad == "SAME_UPPER" else (large_pad, small_pad))
    return strides, dilations, pad_pairs


def _ints(value: object) -> tuple[int, ...]:
    return tuple(map(int, value)) if isinstance(value, Iterable) else (int(str(value)),)


@dataclass(frozen=True)
class OutputFloor:
    """The error of one output in float32 against float64: the least SQNR in decibels and the greatest max_rel."""

    sqnr_db: float
    max_rel: float


@dataclass(frozen=True)
class Noise:
    """The floor by output and kind of case ('golden', 'edge'). reason: why nothing was measured, or ''."""

    floors: Mapping[str, Mapping[str, OutputFloor]] = field(default_factory=dict)
    reason: str = ""


def noise_floor(
    exact: Callable[[Tensors], Tensors], single: Callable[[Tensors], Tensors], cases: Mapping[str, Iterable[Tensors]]
) -> Noise:
    """Compare two ways to run one model. exact: in float64.  single: in float32.  cases: inputs by kind of case.

    If `exact` raises ValueError, the result has no floors, and the error's first line is the reason.
    """
    floors: dict[str, dict[str, OutputFloor]] = {}
    for kind, inputs in cases.items():
        drift_lists: dict[str, list[Drift]] = {}
        try:
            for tensors in islice(inputs, MOST_CASES):
                exact_outputs, single_outputs = exact(tensors), single(tensors)
                for name, array in exact_outputs.items():
                    if not is_exact(array) and array.shape == single_outputs[name].shape:
                        drift = measure(array, single_outputs[name])
                        if drift.nonfinite == 0 and drift.count:
                            drift_lists.setdefault(name, []).append(drift)
        except ValueError as error:
            return Noise(reason=str(error).splitlines()[0][:200])
        for output, drifts in drift_lists.items():
            floor = OutputFloor(min(drift.sqnr_db for drift in drifts), max(drift.max_rel for drift in drifts))
            if math.isfinite(floor.sqnr_db) and math.isfinite(floor.max_rel):
                floors.setdefault(output, {})[kind] = floor
    return Noise(floors)
