"""Streaming MinMax calibration: one pass over the samples, with the reductions inside the onnxruntime session.

Each measured tensor gets ReduceMin, ReduceMax and ReduceL1 nodes, and only their scalars leave the session: memory does
not grow with the number of samples. Nothing else is tapped, so that the runtime's fusions survive. A minimum of minima
does not depend on how samples are grouped or ordered; what remains is the rounding of the runtime's own kernels,
which may differ in the last bits between batch sizes.

ReduceL1 is there for NaN: onnxruntime's vectorised minimum and maximum skip it, a sum cannot.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx
from onnx import ModelProto, TensorProto, helper

from builders.errors import DataError, ModelError
from builders.types import Tensors
from pipeline.quantization.calibration.ranges import Ranges
from pipeline.quantization.graphs.graph import constants, element_types
from pipeline.quantization.graphs.sites import find_sites, prepared, taps
from validation.samples import Samples

REDUCTIONS = ("ReduceMin", "ReduceMax", "ReduceL1")


def calibrate(model: Path, samples: Samples, tensors: Sequence[str] | None = None, *, threads: int = 0) -> Ranges:
    """Ranges of `tensors` over all samples; by default of those that int8 needs, in any backend's scheme.

    Tensors beyond those (see `sites.activations`) may be infinite by design, as a mask of -inf is; such a one has no
    range and is left out, and so is a tensor that is empty in every run.
    threads: of the runtime, 0 for all cores. Raises DataError for NaN anywhere and for infinity in a tensor that int8
    needs (naming tensor and group of samples), ModelError for a model that does not run or lacks a named tensor.
    """
    graph = prepared(onnx.load(model))
    needed = taps(find_sites(graph)[0])
    wanted = needed if tensors is None else tuple(tensors)
    seen = dict.fromkeys(wanted, (math.inf, -math.inf))
    session = _open(tapped(graph, wanted), threads) if wanted else None
    for group, inputs in enumerate(samples.batches() if session else ()):
        for name, measured in zip(wanted, _measure(session, inputs), strict=True):
            _check_finite(name, measured, name in needed, f"{samples.path}: group {group} of the samples")
            low, high = seen[name]
            seen[name] = (min(low, measured[0]), max(high, measured[1]))
    usable = {name: pair for name, pair in seen.items() if math.isfinite(pair[0]) and math.isfinite(pair[1])}
    return Ranges(usable, "minmax", samples.digest, samples.count)


def tapped(model: ModelProto, tensors: Sequence[str]) -> ModelProto:
    """A prepared model whose only outputs are the reductions of `tensors`, three scalars for each, in order.

    Raises ModelError for a name that is no float32 activation of the model.
    """
    _check_tensors(model, tensors)
    copy = ModelProto()
    copy.CopyFrom(model)
    graph = copy.graph
    del graph.output[:]
    for index, name in enumerate(tensors):
        for reduction in REDUCTIONS:
            output = f"enginery/{index}/{reduction}"
            graph.node.append(helper.make_node(reduction, [name], [output], name=output, keepdims=0))
            graph.output.append(helper.make_tensor_value_info(output, TensorProto.FLOAT, []))
    return copy


def _check_tensors(model: ModelProto, tensors: Sequence[str]) -> None:
    types, given = element_types(model), constants(model.graph)
    for name in tensors:
        if name not in types or name in given:
            raise ModelError(f"tensor {name!r} is no activation of the model; measure names that the graph has")
        if types[name] != TensorProto.FLOAT:
            kind = TensorProto.DataType.Name(types[name])
            raise ModelError(f"tensor {name!r} is {kind}; only float32 activations have ranges")


def _open(model: ModelProto, threads: int) -> Any:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = threads
    try:
        return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's errors share no base class of their own
        raise ModelError(f"onnxruntime cannot load the model for calibration: {error}") from error


def _measure(session: Any, inputs: Tensors) -> Iterator[tuple[float, float, float]]:
    """(lowest, highest, sum of magnitudes) of each tensor for one group of samples."""
    try:
        scalars = [float(value) for value in session.run(None, _fed(session, inputs))]
    except Exception as error:  # as above
        raise ModelError(f"the model does not run on its calibration samples: {error}") from error
    return zip(scalars[::3], scalars[1::3], scalars[2::3], strict=True)


def _fed(session: Any, inputs: Tensors) -> Mapping[str, Any]:
    """What the session takes: an input that no measured tensor depends on is gone from it."""
    return {value.name: inputs[value.name] for value in session.get_inputs() if value.name in inputs}


def _check_finite(tensor: str, measured: tuple[float, float, float], needed: bool, where: str) -> None:
    """Only NaN counts in the sum, since sums of large values overflow; infinities show in the extremes."""
    low, high, total = measured
    infinite = needed and (low == -math.inf or high == math.inf) and low <= high
    if math.isnan(total) or infinite:
        raise DataError(
            f"{where} makes tensor {tensor!r} {'infinite' if infinite else 'NaN'} (lowest {low}, highest {high}); "
            "remove those samples, or find the operator that overflows"
        )
