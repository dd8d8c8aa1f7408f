"""Writes a model in any precision, in the way that a backend wants it."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from onnx import ModelProto

from builders.onnx_graphs.quantized_states import quantize_states
from enginesmith.core.errors import DataError
from enginesmith.core.types import Precision, QuantizationScheme, QuantizedState
from pipeline.quantization.insertion_points import prepare_model
from pipeline.quantization.notes import CastNotes, QuantizationNotes
from pipeline.quantization.ranges import Ranges
from pipeline.quantization.schemes.cast import cast_float
from pipeline.quantization.schemes.overrides import Override, OverridePrecision, in_fp32, resolve
from pipeline.quantization.schemes.qdq import quantize_fp8, quantize_int8
from pipeline.quantization.schemes.uncalibrated import UNCALIBRATED


def write(
    model: ModelProto,
    precision: Precision,
    scheme: QuantizationScheme | None = None,
    ranges: Ranges | None = None,
    overrides: Sequence[Override] = (),
    *,
    keep_io: bool = True,
    left: Mapping[str, str] | None = None,
    states: Sequence[QuantizedState] = (),
) -> tuple[ModelProto, QuantizationNotes | CastNotes]:
    """The model in a precision other than fp32, and notes on what was done and what was left alone.

    scheme: the backend's, for the quantized precisions.  ranges: int8 and fp8 need them; the others find with them
    which tensors are too large.  left: nodes that a search leaves in float (node -> reason), in int8 only.
    keep_io: whether fp16 and bf16 graphs keep fp32 inputs and outputs.  states: rounded where the graph takes and gives
    them.
    Raises DataError where ranges are missing, InputError for an override that matches no node, ModelError for a graph
    that cannot be written so.
    """
    written, notes = _write(model, precision, scheme, ranges, overrides, keep_io, left or {})
    quantize_states(written, states)
    return written, notes


def _write(
    model: ModelProto,
    precision: Precision,
    scheme: QuantizationScheme | None,
    ranges: Ranges | None,
    overrides: Sequence[Override],
    keep_io: bool,
    left: Mapping[str, str],
) -> tuple[ModelProto, QuantizationNotes | CastNotes]:
    chosen = resolve(prepare_model(model), overrides) if overrides else {}
    if precision == "fp16" or precision == "bf16":
        return cast_float(model, precision, keep_io=keep_io, keep=in_fp32(chosen), ranges=ranges)
    if scheme is None:
        raise ValueError(f"{precision} is written in a backend's scheme; none was given")
    if uncalibrated := UNCALIBRATED.get(precision):
        return uncalibrated(model, scheme, chosen, ranges)
    if ranges is None:
        raise DataError(f"{precision} needs calibrated ranges, and there are none; add calibration.data")
    if precision == "fp8":
        return quantize_fp8(model, ranges, scheme, chosen)
    in_float: dict[str, OverridePrecision] = dict.fromkeys(left, "fp16")
    written, notes = quantize_int8(model, ranges, scheme, {**chosen, **in_float})
    kept = tuple(replace(item, reason=left.get(item.node, item.reason)) for item in notes.kept)
    return written, replace(notes, kept=kept)
