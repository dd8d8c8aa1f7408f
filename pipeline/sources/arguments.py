"""Values that a spec gives to inputs of an ONNX model (`source.arguments`): the inputs become constants.

A model may hold a network for each value of an input, chosen by an If, such as a sample rate. While that is an input,
no compiler enters the branches to quantize, cast or fuse; with a constant in its place the If gives way to one of them
(`constant_ifs`). The golden set is computed with the same constant.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from enginesmith.core.errors import ModelError
from enginesmith.core.types import Scalar
from pipeline.sources.onnx_header import HeaderTensor, format_shape

if TYPE_CHECKING:
    import onnx


def wrong_arguments(inputs: Iterable[HeaderTensor], arguments: Mapping[str, Scalar]) -> Iterator[tuple[str, str]]:
    """What of these arguments does not fit the inputs of a model: (name of the argument, why)."""
    own = {item.name: item for item in inputs}
    for name, value in arguments.items():
        if name not in own:
            yield name, f"the model has no such input; its inputs are {', '.join(own) or 'none'}"
        elif reason := _why_unfit(own[name], value):
            yield name, reason


def _why_unfit(given: HeaderTensor, value: Scalar) -> str | None:
    import numpy as np

    if given.shape is None or not all(isinstance(dim, int) for dim in given.shape):
        shape = "of unknown rank" if given.shape is None else format_shape(given.shape)
        return f"is {shape} in the model; only an input whose every size is fixed can be made a constant"
    try:
        fits = not isinstance(value, str) and bool(np.asarray(value, given.dtype) == value)
    except (TypeError, ValueError, OverflowError):
        fits = False
    return None if fits else f"{value!r} is no {given.dtype or 'tensor'}, which the input is in the model"


def fix_inputs(model: "onnx.ModelProto", arguments: Mapping[str, Scalar]) -> None:
    """Make constants of the inputs that have a value here, in place. Raises ModelError for one that does not fit."""
    if not arguments:
        return
    import numpy as np
    import onnx

    from pipeline.sources.onnx_model import specs_of

    found = {spec.name: HeaderTensor(spec.name, spec.dtype, spec.shape) for spec in specs_of(model)[0]}
    if wrong := next(wrong_arguments(found.values(), arguments), None):
        raise ModelError(f"source.arguments.{wrong[0]}: {wrong[1]}")
    for name, value in arguments.items():
        shape = [int(size) for size in found[name].shape or ()]
        array = np.full(shape, value, found[name].dtype)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    kept = [item for item in model.graph.input if item.name not in arguments]
    del model.graph.input[:]
    model.graph.input.extend(kept)
