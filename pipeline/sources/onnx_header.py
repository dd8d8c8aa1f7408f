"""The header of an ONNX file, and inputs that a spec makes constant."""

import mmap
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from builders.onnx_graphs.bodies import set_items
from builders.onnx_graphs.wire import Field, decode, fields, inner_fields, inner_text
from enginesmith.core.errors import ModelError
from enginesmith.core.types import Scalar, TensorSpec

if TYPE_CHECKING:
    import onnx

# Time and memory of parsing grow with the file. The reader here skips everything else (`builders.onnx_graphs.wire`).

_GRAPH, _INITIALIZER, _INPUT, _OUTPUT = 7, 5, 11, 12  # of ModelProto, and of GraphProto
_TENSOR_NAME = 8
_DTYPES = {
    1: "float32", 2: "uint8", 3: "int8", 4: "uint16", 5: "int16", 6: "int32", 7: "int64", 8: "string", 9: "bool",
    10: "float16", 11: "float64", 12: "uint32", 13: "uint64", 14: "complex64", 15: "complex128", 16: "bfloat16",
}  # fmt: skip


@dataclass(frozen=True)
class HeaderTensor:
    """An input or output of a graph. dtype: '' if it is no tensor.  shape: an unknown size is '?'; None: unknown
    rank."""

    name: str
    dtype: str
    shape: tuple[int | str, ...] | None


@dataclass(frozen=True)
class GraphHeader:
    """The inputs of a graph that are not initializers, and its outputs, in order."""

    inputs: tuple[HeaderTensor, ...]
    gives: tuple[HeaderTensor, ...]

    @property
    def outputs(self) -> tuple[str, ...]:
        """The names of its outputs."""
        return tuple(tensor.name for tensor in self.gives)


def read_header(path: Path) -> GraphHeader:
    """The header of an ONNX file. Raises ModelError for a file that is empty, truncated, or no ONNX."""
    try:
        with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
            inputs, outputs, initializer_names = list[HeaderTensor](), list[HeaderTensor](), set[str]()
            has_graph = False
            for graph in fields(data, 0, len(data)):
                if graph.number != _GRAPH:
                    continue
                has_graph = True
                for field in fields(data, graph.begin, graph.end):
                    if field.number == _INPUT:
                        inputs.append(_read_tensor(data, field))
                    elif field.number == _OUTPUT:
                        outputs.append(_read_tensor(data, field))
                    elif field.number == _INITIALIZER:
                        initializer_names.add(inner_text(data, field, _TENSOR_NAME))
            if not has_graph or not outputs:
                raise ValueError("there is no graph")
            return GraphHeader(
                tuple(tensor for tensor in inputs if tensor.name not in initializer_names), tuple(outputs)
            )
    except (ValueError, OSError) as error:  # an empty file cannot be mapped
        raise ModelError(f"{path} is empty, truncated or not an ONNX file; export or download it again") from error


def wrong_inputs(header: GraphHeader, specs: Sequence[TensorSpec]) -> Iterator[tuple[str, str]]:
    """The inputs of a spec that do not fit the model: (name of the input, reason). '' is for a missing input.
    `canonical` reads the whole model and decides by the same rules.
    """
    model_inputs = {tensor.name: tensor for tensor in header.inputs}
    input_names = {spec.name for spec in specs}
    for name in model_inputs.keys() - input_names:
        yield "", f"the model's input {name!r} is missing; its inputs are {', '.join(model_inputs)}: add it"
    for spec in specs:
        header_tensor = model_inputs.get(spec.name)
        if header_tensor is None:
            yield spec.name, f"the model has no such input; its inputs are {', '.join(model_inputs) or 'none'}"
            continue
        if header_tensor.dtype != spec.dtype:
            dtype = header_tensor.dtype or "no tensor"
            yield spec.name, f"is {dtype} in the model and {spec.dtype} in the spec; correct the spec"
        if header_tensor.shape is not None and not _fits(header_tensor.shape, spec.shape):
            shapes_text = f"{format_shape(header_tensor.shape)} in the model and {format_shape(spec.shape)} in the spec"
            yield spec.name, f"is {shapes_text}; correct the spec, or export the model with that axis dynamic"


def wrong_outputs(model_outputs: Collection[str], names: Sequence[str] | None) -> Iterator[tuple[int, str]]:
    """The outputs of a spec that an ONNX model with outputs `model_outputs` does not have: (index, reason)."""
    for index, name in enumerate(names or ()):
        if name not in model_outputs:
            yield index, f"output {name!r} is not in the model; its outputs are {', '.join(model_outputs)}"


def _fits(model_shape: Sequence[int | str], spec_shape: Sequence[int | str]) -> bool:
    same_rank = len(model_shape) == len(spec_shape)
    return same_rank and all(isinstance(a, str) or a == b for a, b in zip(model_shape, spec_shape, strict=True))


def can_be_equal(shape: Sequence[int | str], other: Sequence[int | str]) -> bool:
    """Whether two shapes have the same rank and no different sizes; a name matches any size."""
    return len(shape) == len(other) and all(
        size == other_size or isinstance(size, str) or isinstance(other_size, str)
        for size, other_size in zip(shape, other, strict=True)
    )


def format_shape(shape: Sequence[int | str]) -> str:
    """'[batch, 3, 8]', of at most 16 axes."""
    dims = [str(dim)[:80] for dim in shape[:16]]
    return f"[{', '.join([*dims, '...'] if len(shape) > 16 else dims)}]"


def _read_tensor(data: mmap.mmap, value: Field) -> HeaderTensor:
    """A ValueInfoProto: name = 1, type = 2 {tensor_type = 1 {elem_type = 1, shape = 2 {dim = 1}}}."""
    dtype, shape = "", None
    for kind in inner_fields(data, value, 2):
        for tensor in inner_fields(data, kind, 1):
            dtype = next((_DTYPES.get(f.value, f"type {f.value}") for f in inner_fields(data, tensor, 1)), "")
            for dims in inner_fields(data, tensor, 2):
                shape = tuple(_read_dim(data, dim) for dim in inner_fields(data, dims, 1))
    return HeaderTensor(inner_text(data, value, 1), dtype, shape)


def _read_dim(data: mmap.mmap, dim: Field) -> int | str:
    """A Dimension: dim_value = 1, dim_param = 2. '?' for sizes that `onnx_model.load_onnx` treats as unknown."""
    size: int | str = "?"
    for field in fields(data, dim.begin, dim.end):
        if field.number == 1:
            size = "?" if field.value >> 63 else field.value  # a negative number has the highest of 64 bits
        elif field.number == 2:
            name = decode(data, field)
            size = name if name != "None" and any(letter.isalpha() for letter in name) else "?"
    return size


# Values that a spec gives to inputs of an ONNX model (`source.arguments`): the inputs become constants.
#
# A model may contain a network for each value of an input, such as a sample rate, and choose one by an If. No compiler
# quantizes, casts or fuses nodes in the branches. If the input is a constant, the chosen branch replaces the If
# (`constant_ifs`). The golden set is computed with the same constant.


def wrong_arguments(inputs: Iterable[HeaderTensor], arguments: Mapping[str, Scalar]) -> Iterator[tuple[str, str]]:
    """The arguments that do not fit the inputs of a model: (name of the argument, reason)."""
    model_inputs = {tensor.name: tensor for tensor in inputs}
    for name, value in arguments.items():
        if name not in model_inputs:
            yield name, f"the model has no such input; its inputs are {', '.join(model_inputs) or 'none'}"
        elif reason := _why_unfit(model_inputs[name], value):
            yield name, reason


def _why_unfit(tensor: HeaderTensor, value: Scalar) -> str | None:
    import numpy as np

    if tensor.shape is None or not all(isinstance(dim, int) for dim in tensor.shape):
        shape_text = "of unknown rank" if tensor.shape is None else format_shape(tensor.shape)
        return f"is {shape_text} in the model; only an input whose every size is fixed can be made a constant"
    try:
        is_equal = not isinstance(value, str) and bool(np.asarray(value, tensor.dtype) == value)
    except (TypeError, ValueError, OverflowError):
        is_equal = False
    return None if is_equal else f"{value!r} is not {tensor.dtype or 'a tensor'}, the input's type in the model"


def fix_inputs(model: "onnx.ModelProto", arguments: Mapping[str, Scalar]) -> None:
    """Replace inputs by their values in `arguments`, in place. Raises ModelError for a value that does not fit."""
    if not arguments:
        return
    import numpy as np
    import onnx

    from pipeline.sources.onnx_model import specs_of

    tensors_by_name = {spec.name: HeaderTensor(spec.name, spec.dtype, spec.shape) for spec in specs_of(model)[0]}
    if mistake := next(wrong_arguments(tensors_by_name.values(), arguments), None):
        raise ModelError(f"source.arguments.{mistake[0]}: {mistake[1]}")
    for name, value in arguments.items():
        shape = [int(size) for size in tensors_by_name[name].shape or ()]
        array = np.full(shape, value, tensors_by_name[name].dtype)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    set_items(model.graph.input, [value for value in model.graph.input if value.name not in arguments])
