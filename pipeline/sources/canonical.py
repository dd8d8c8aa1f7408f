"""The canonical form of an ONNX model: accepted by the checker, with inferred shapes and the spec's names.

Local functions are inlined. An If whose condition is known is replaced by its branch. Dead nodes, unused initializers,
Identities of constants, doc strings, metadata and stack traces are removed. Constants are in name order, as bytes. The
inputs have the spec's shapes. The IR version is the oldest that the opset allows.
A second canonicalisation changes nothing, and equal inputs give equal bytes in every process.
"""

import re
import resource
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import onnx
import onnx_ir as ir
from google.protobuf.message import Error as ProtobufError  # type: ignore[import-untyped]
from onnx_ir.passes import common

from builders.onnx_graphs.bodies import set_items, walk_graphs
from builders.onnx_graphs.weights import check_lengths, is_external, without_weights
from enginesmith.core.errors import ModelError
from enginesmith.core.types import PLUS, TensorSpec
from pipeline.sources.constant_ifs import fold_constant_ifs
from pipeline.sources.onnx_header import GraphHeader, HeaderTensor, wrong_inputs
from pipeline.sources.onnx_model import OLDEST_IR_VERSION
from pipeline.sources.walk import all_nodes, all_tensors, inline_functions

# The memory that checking may take besides a few copies of the model. The largest of our examples takes 0.1 GiB.
_CHECKING_BYTES = 2 << 30
# The opset of a model without standard operators: graphs that are derived from the model may have some.
_UNUSED_OPSET = 20
_REFUSALS = (onnx.checker.ValidationError, onnx.shape_inference.InferenceError, ProtobufError, ValueError, RuntimeError)


@contextmanager
def limit_memory(extra_bytes: int) -> Iterator[None]:
    """A context in which the process may allocate `extra_bytes` more memory; beyond this, MemoryError is raised.

    A few bytes of input can make a library allocate any amount. The limit (RLIMIT_AS) holds for the whole process,
    which should do nothing else meanwhile. It is set on Linux only.
    """
    soft_limit, hard_limit = resource.getrlimit(resource.RLIMIT_AS)
    statm = Path("/proc/self/statm")
    if not statm.exists():
        yield
        return
    target_bytes = int(statm.read_text().split()[0]) * resource.getpagesize() + extra_bytes
    limits = [limit for limit in (target_bytes, soft_limit, hard_limit) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min(limits), hard_limit))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft_limit, hard_limit))


def canonical(
    model: onnx.ModelProto, inputs: Sequence[TensorSpec] = (), outputs: Sequence[str] = ()
) -> onnx.ModelProto:
    """A model in canonical form; the argument does not change.

    inputs: of the spec. The model's inputs must have equal names, dtypes and ranks, and get their order and dims.
    outputs: new names for the outputs, in order; an inner value with such a name gets another one.
    Raises ModelError for models that do not fit the spec, or that the ONNX checker or strict shape inference refuse.
    """
    with _convert_errors():
        graph_model = ir.from_proto(inline_functions(model))
        passed_inputs = {value: value.name for value in graph_model.graph.inputs if value.is_graph_output()}
        _tidy(graph_model)
    # An output that is also an input needs another name.
    for value, name in passed_inputs.items():
        if value.name != name and not outputs:
            raise ModelError(f"{name!r} is an input and an output; give the output another name in the spec's outputs")
        value.name = name
    if inputs:
        _take_inputs(graph_model.graph, inputs)
    if outputs:
        _name_outputs(graph_model.graph, outputs)
    with _convert_errors():
        common.NameFixPass()(graph_model)
        plain_model = _plain(ir.to_proto(graph_model))
    return _settle_ifs(_check(plain_model))


def _settle_ifs(model: onnx.ModelProto) -> onnx.ModelProto:
    """A canonical model without the Ifs whose condition is known; the same object if there are none."""
    with _convert_errors():
        new_model = fold_constant_ifs(model)
    if new_model is model:
        return model
    try:
        return canonical(new_model)
    except ModelError:  # the branch is invalid for these shapes: the If stays
        return model


@contextmanager
def _convert_errors() -> Iterator[None]:
    """Turn errors of onnx_ir into ModelError: onnx_ir does not check its input, so a malformed graph raises them."""
    try:
        yield
    except (*_REFUSALS, LookupError, TypeError, AttributeError) as error:
        raise ModelError(f"the ONNX graph is malformed: {_reason(error)}; export it again") from error


def _reason(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return " ".join(str(error).split())[:400] or type(error).__name__


def _tidy(model: ir.Model) -> None:
    for ir_pass in (
        common.InlinePass(),  # functions of another opset than the model's, which `inline_functions` leaves
        common.RemoveInitializersFromInputsPass(),
        common.RemoveUnusedNodesPass(),
        common.RemoveUnusedFunctionsPass(),  # type: ignore[no-untyped-call]
        common.RemoveUnusedOpsetsPass(),
        common.ClearMetadataAndDocStringPass(),
        common.OutputFixPass(),
    ):
        ir_pass(model)
    try:
        common.TopologicalSortPass()(model)
    except ValueError as error:
        raise ModelError(f"the ONNX graph has a cycle: {error}; export it again") from error
    # Exporters write shared weights as Identities; quantizers and compilers would copy the weights for each Identity.
    for node in tuple(model.graph):
        if node.op_type != "Identity" or node.domain or node.outputs[0].is_graph_output():
            continue
        (constant,) = node.inputs
        if constant is not None and constant.is_initializer():
            ir.convenience.replace_all_uses_with(node.outputs[0], constant)
            model.graph.remove(node, safe=True)


def _take_inputs(graph: ir.Graph, specs: Sequence[TensorSpec]) -> None:
    """Give the inputs the spec's order and shapes, and the outputs' shapes the spec's names of dims."""
    values = {value.name: value for value in graph.inputs}
    input_names = [spec.name for spec in specs]
    check_names([str(name) for name in values], input_names)
    names: dict[str, int | str] = {}
    for spec in specs:
        names |= _match(values[spec.name], spec)
        values[spec.name].shape = ir.Shape(spec.shape)
    graph.inputs[:] = [values[name] for name in input_names]
    for value in graph.outputs:
        if value.shape is not None:
            value.shape = ir.Shape([_rename(dim, names) for dim in value.shape])


def check_names(model_names: Iterable[str], spec_names: Iterable[str]) -> None:
    """Raise ModelError unless a model's inputs have the spec's names."""
    if sorted(model_names) != sorted(spec_names):
        raise ModelError(
            f"the model's inputs are {sorted(model_names)}, the spec's {sorted(spec_names)}; make them equal"
        )


def _match(value: ir.Value, spec: TensorSpec) -> dict[str, int | str]:
    """The model's name of each dim of an input -> the spec's dim. Raises ModelError if dtype or shape differ."""
    try:
        dtype = "" if value.dtype is None else str(value.dtype.numpy().name)
    except TypeError:  # numpy has no such dtype
        dtype = str(value.dtype)
    dims = None if value.shape is None else [dim if isinstance(dim, int) else dim.value for dim in value.shape]
    model_shape = None if dims is None else tuple("?" if dim is None else dim for dim in dims)
    header = GraphHeader((HeaderTensor(spec.name, dtype, model_shape),), ())
    if mistake := next(wrong_inputs(header, [spec]), None):
        raise ModelError(f"input {mistake[0]!r} {mistake[1]}")
    pairs = zip(dims or (), spec.shape, strict=dims is not None)
    names = {model_dim: dim for model_dim, dim in pairs if isinstance(model_dim, str)}
    for model_dim, dim in tuple(names.items()):  # torch calls a dim of multiples of 32 '32*s40'
        if step := re.fullmatch(r"(\d+)\*([A-Za-z_]\w*)", model_dim):
            names[step[2]] = dim // int(step[1]) if isinstance(dim, int) else f"({dim}//{step[1]})"
    return names


def _rename(dim: int | ir.SymbolicDim, names: Mapping[str, int | str]) -> int | str | None:
    """A dim, or an expression of dims such as 's40*4', with the spec's names."""
    if isinstance(dim, int) or dim.value is None:
        return dim if isinstance(dim, int) else None
    if dim.value in names:
        return names[dim.value]
    text = re.sub(r"[A-Za-z_]\w*", lambda word: _term(names.get(word[0], word[0])), dim.value)
    return int(text) if text.isdigit() else text


def _term(name: int | str) -> str:
    return f"({name})" if isinstance(name, str) and PLUS in name else str(name)


def _name_outputs(graph: ir.Graph, names: Sequence[str]) -> None:
    if len(names) != len(graph.outputs):
        raise ModelError(f"the model has {len(graph.outputs)} outputs, the spec names {len(names)}: {', '.join(names)}")
    for value in graph.inputs:
        if value.name in names:
            raise ModelError(
                f"output {value.name!r} is an input, or has its name; leave it out of the spec's outputs, or rename it"
            )
    for value, name in zip(graph.outputs, names, strict=True):
        value.name = name


def _plain(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model, in place, without parts that do not affect its results."""
    if not any(entry.domain in ("", "ai.onnx") for entry in model.opset_import):
        model.opset_import.add(domain="", version=_UNUSED_OPSET)
    opsets = sorted((entry.domain, entry.version) for entry in model.opset_import)
    for field in [field.name for field, _ in model.ListFields() if field.name != "graph"]:
        model.ClearField(field)
    model.producer_name = "enginesmith"
    for domain, version in opsets:
        model.opset_import.add(domain=domain, version=version)
    min_ir_version: int = onnx.helper.find_min_ir_version_for(model.opset_import, ignore_unknown=True)
    model.ir_version = max(OLDEST_IR_VERSION, min_ir_version)
    model.graph.name = "model"
    model.graph.initializer.sort(key=lambda tensor: tensor.name)
    main_graph, *bodies = walk_graphs(model.graph)
    for graph in (main_graph, *bodies):
        del graph.value_info[:]
    for value in (value for body in bodies for value in body.output):  # exporters write wrong shapes
        if value.type.HasField("tensor_type"):
            value.type.tensor_type.ClearField("shape")
    _forget_inferred_names(main_graph)
    for node in all_nodes(model):  # onnx infers its shapes only with explicit axes; these are the default
        if node.op_type == "MeanVarianceNormalization" and not node.attribute:
            node.attribute.append(onnx.helper.make_attribute("axes", [0, 2, 3]))
    for tensor in all_tensors(model):
        _as_bytes(tensor)
    return model


def _forget_inferred_names(graph: onnx.GraphProto) -> None:
    """In place: remove the names of output dims that shape inference chose; they depend on names that exist already."""
    input_dims = {dim.dim_param for value in graph.input for dim in value.type.tensor_type.shape.dim}
    for dim in (dim for value in graph.output for dim in value.type.tensor_type.shape.dim):
        if re.fullmatch(r"unk__\d+", dim.dim_param) and dim.dim_param not in input_dims:
            dim.Clear()


def _as_bytes(tensor: onnx.TensorProto) -> None:
    """Store numbers as bytes, in place, as most exporters do, and not in typed lists."""
    if not (tensor.HasField("raw_data") or is_external(tensor) or tensor.data_type == onnx.TensorProto.STRING):
        tensor.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(tensor), tensor.name))


def _check(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with inferred shapes, in place. Raises ModelError if inference or the checker fails or lacks memory."""
    check_lengths(model)
    light_model = without_weights(model)
    try:
        # Inference also computes the values of small tensors; a Range or a chain of Concats can make them large.
        with limit_memory(_CHECKING_BYTES + 8 * light_model.ByteSize()):
            shaped_model = _infer(light_model)
            for value in shaped_model.graph.output:
                if value.type.HasField("tensor_type") and not value.type.tensor_type.HasField("shape"):
                    raise ModelError(
                        f"output {value.name!r} does not say how many axes it has, and onnx cannot infer that; give it "
                        "a shape (onnx.helper.make_tensor_value_info) and save the model"
                    )
            onnx.checker.check_model(shaped_model)
    except MemoryError as error:
        raise ModelError(
            f"finding the shapes of the model's tensors takes over {_CHECKING_BYTES >> 30} GiB: one of them comes "
            "from a very long list (Range, Concat); export the model without it"
        ) from error
    except _REFUSALS as error:
        raise ModelError(f"the model is not valid ONNX: {_reason(error)}; correct or export it again") from error
    shaped_model.graph.value_info.sort(key=lambda value: value.name)
    for field in ("node", "output", "value_info"):
        set_items(getattr(model.graph, field), getattr(shaped_model.graph, field))
    return model


def _infer(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with inferred shapes. They replace wrong shapes that the model states for outputs, as in onnxruntime.
    Raises InferenceError."""
    infer = partial(onnx.shape_inference.infer_shapes, check_type=True, strict_mode=True)
    with suppress(onnx.shape_inference.InferenceError):
        return infer(model, data_prop=True)
    with suppress(onnx.shape_inference.InferenceError):  # computing values fails if two longer lists are added
        return infer(model)
    bare_model = onnx.ModelProto()
    bare_model.CopyFrom(model)
    for value in bare_model.graph.output:
        if value.type.HasField("tensor_type"):
            value.type.tensor_type.ClearField("shape")
    return infer(bare_model)
