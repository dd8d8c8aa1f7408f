"""The draft of a spec from an ONNX model or Triton's config.pbtxt."""

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType

import onnx

from builders.backends.known_faults import COMPILERS, find_faults
from builders.onnx_graphs.bodies import copied, list_captured, list_reads
from builders.onnx_graphs.structure import find_source
from builders.onnx_graphs.weights import is_external, place_of, set_place, size_of, to_array
from enginesmith.client.layouts.protobuf_text import ProtoMessage, parse
from enginesmith.core.errors import InputError, ModelError, digest_of_bytes
from enginesmith.core.state import ENSEMBLE, without_states
from enginesmith.core.text import pluralize
from enginesmith.core.types import Scalar, TensorSpec
from pipeline.drafts.facts import (
    FoundDim,
    FoundEnsemble,
    FoundModel,
    begin_empty,
    find_sizes,
    find_states,
    fixed_axes,
    graph_key,
    input_name,
    model_name,
    name_axes,
    suggest_metric,
)
from pipeline.drafts.probing import find_dims, open_graph
from pipeline.quantization.insertion_points import find_sites, prepare_model
from pipeline.quantization.ranges import LEAST_SHARE
from pipeline.quantization.shares import narrow_share
from pipeline.sources.canonical import canonical
from pipeline.sources.export import choose_outputs
from pipeline.sources.onnx_header import fix_inputs, format_shape
from pipeline.sources.onnx_model import dtype_name, external_files, load_onnx, spec_of, why_no_tensor
from pipeline.sources.walk import all_nodes, all_tensors
from pipeline.spec.source import FILL_IN, INPUT_DTYPES, LARGEST_SIZE

# Operators that int8 makes smaller and faster.
_HEAVY = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul", "RNN", "LSTM", "GRU", "Attention", "Einsum"})
_INTEGER = frozenset({"ConvInteger", "MatMulInteger", "QLinearConv", "QLinearMatMul", "DynamicQuantizeMatMul"})
_TREES = frozenset({"TreeEnsemble", "TreeEnsembleClassifier", "TreeEnsembleRegressor"})
# The multiplications of a model with more bytes are not counted: counting needs a copy.
_LARGEST_COUNTED = 1 << 28
# Names of files and folders that do not describe the model: `bert/onnx/model.onnx`.
_COMMON = re.compile(r"(?i)(models?|model_quantized|onnx|export|te?mp|var|downloads|desktop|home|users|root)?")
_VERSION = re.compile(r"(?i)(v|version)?[-_.]?\d[\d._-]*")


def look_at_onnx(path: Path, spec_path: str, arguments: Mapping[str, Scalar] = MappingProxyType({})) -> FoundModel:
    """Facts from an ONNX file. spec_path: the path in the spec.  arguments: values of inputs that decide which branch
    of an If runs; the facts are of that branch alone.

    Outputs that are not tensors of numbers are left out. Raises ModelError as `load_onnx` and `canonical`, and for
    inputs that no spec accepts.
    """
    model = load_onnx(path, path.resolve().parent, 0)
    fix_inputs(model, arguments)
    constants = {tensor.name: to_array(tensor) for tensor in model.graph.initializer if tensor.name in arguments}
    omitted_outputs = _find_left_out(model)
    output_names = dict.fromkeys(value.name for value in model.graph.output if value.name not in omitted_outputs)
    if not output_names:
        raise ModelError("; ".join(omitted_outputs.values()))
    outputs = choose_outputs(model, [*output_names])
    inputs = _inputs(model)
    unknown_inputs = {
        value.name: "the model does not say how many axes it has" for value in inputs if _is_unranked(value)
    }
    # A model with an input of unknown rank has no canonical form, and cannot be run.
    tidy_model = model if unknown_inputs else canonical(model)
    fixed_sizes = fixed_axes(tidy_model.graph)
    if not inputs:
        raise ModelError("the model has no inputs, so its outputs are constant; there is nothing to build")
    counts = Counter(node.op_type for node in all_nodes(tidy_model) if node.op_type != "Constant")
    model_facts = FoundModel(
        name=_name(path),
        source={"onnx": spec_path, **({"arguments": dict(arguments)} if arguments else {})},
        inputs=name_axes(tuple(_read_input(value, fixed_sizes) for value in inputs)),
        outputs=outputs,
        precisions=_precisions(tidy_model, counts),
        notes=tuple(_notes(model, counts, path, arguments)),
        unknown=unknown_inputs,
        left_out=omitted_outputs,
        metric=_suggest_metric(tidy_model, outputs),
        deciding=frozenset(_deciding_inputs(model) - _list_sources(model, outputs)),
    )
    if unknown_inputs:
        return model_facts
    output_specs = [spec_of(value, "output") for value in tidy_model.graph.output]
    model_facts = find_dims(
        model_facts,
        lambda: open_graph(tidy_model, path, model_facts.name, constants),
        likely_sizes=find_sizes(tidy_model.graph),
    )
    states = find_states(model_facts.inputs, output_specs, _sources(tidy_model))
    notes = (*model_facts.notes, *_share(tidy_model, model_facts), *_refusals(tidy_model))
    return begin_empty(replace(model_facts, states=states, notes=notes), output_specs)


def _share(model: onnx.ModelProto, facts: FoundModel) -> Iterator[str]:
    """A note on the share of multiplications that int8 can take; none for a model without fp16. model: canonical."""
    if "fp16" not in dict(facts.precisions) or size_of(model) > _LARGEST_COUNTED:
        return
    sizes = {spec.name: spec.at({name: dim.opt for name, dim in facts.dims.items()}) for spec in facts.inputs}
    try:
        with TemporaryDirectory() as folder:
            ready_model = prepare_model(_linked(model, Path(folder)))
            share = narrow_share(ready_model, {site.node for site in find_sites(ready_model)[0]}, sizes)
    except ModelError:  # its opset cannot be raised; a build reports the reason
        return
    if share is not None:
        share_note = "; less than 10 % makes no int8 engine" if share < LEAST_SHARE else ""
        yield f"int8 can take {100 * share:.0f} % of the multiplications with weights{share_note}"


def _linked(model: onnx.ModelProto, folder: Path) -> onnx.ModelProto:
    """A copy whose external weights are links in `folder`; weights that are computed from them are written there."""
    copy = copied(model)
    for tensor in filter(is_external, copy.graph.initializer):
        file, *span = place_of(tensor)
        link = folder / digest_of_bytes(file.encode())
        if not link.is_symlink():
            link.symlink_to(file)
        set_place(tensor, str(link), *span)
    return copy


def _refusals(model: onnx.ModelProto) -> Iterator[str]:
    """Parts of a graph that compilers are known to refuse, one line each. model: canonical."""
    for compiler in sorted(COMPILERS):
        faults = [(node, fault_text) for fault, node, fault_text in find_faults(model, compiler) if not fault.write]
        if faults:
            node, fault_text = faults[0]
            more_text = f" (and {len(faults) - 1} more)" if faults[1:] else ""
            yield f"{compiler} may refuse node {node.name!r}{more_text}: {node.op_type} {fault_text}"


def _suggest_metric(model: onnx.ModelProto, outputs: Sequence[str]) -> dict[str, object]:
    """The task metric that the inputs and outputs make evident, apart from states; empty if a rank is unknown."""
    inputs = _inputs(model)
    output_values = [value for value in model.graph.output if value.name in outputs]
    if any(map(_is_unranked, (*inputs, *output_values))):
        return {}
    input_specs = [spec_of(value, "input") for value in inputs]
    output_specs = [spec_of(value, "output") for value in output_values]
    states = find_states(input_specs, output_specs, _sources(model))
    state_outputs = {state.output for state in states}
    metric = suggest_metric(
        without_states(input_specs, states), [spec for spec in output_specs if spec.name not in state_outputs]
    )
    if metric and any(node.op_type == "NonMaxSuppression" for node in all_nodes(model)):
        # Any rounding can reorder boxes of nearly equal scores; other boxes are then selected.
        metric["decides"] = ["fp32", "fp16", "int8"]
    return metric


def _inputs(model: onnx.ModelProto) -> list[onnx.ValueInfoProto]:
    initializer_names = {tensor.name for tensor in model.graph.initializer}
    return [value for value in model.graph.input if value.name not in initializer_names]


def _sources(model: onnx.ModelProto) -> dict[str, str]:
    return {value.name: find_source(model.graph, value.name) for value in model.graph.output}


def _name(path: Path) -> str:
    """The file's name; if it is common, that of the nearest folder that is not common, not a version and not a home."""
    home = Path(os.path.expanduser("~"))  # noqa: PTH111 - `Path.home` raises for a user without one
    folders = [folder for folder in path.resolve().parents if folder not in (home, *home.parents)]
    names = [folder.name for folder in folders if not (folder.match("/home/*") or _VERSION.fullmatch(folder.name))]
    return model_name(next((name for name in (path.stem, *names) if not _COMMON.fullmatch(name)), path.stem))


def _find_left_out(model: onnx.ModelProto) -> dict[str, str]:
    input_names = {value.name for value in model.graph.input}
    reasons = {value.name: why_no_tensor(value) for value in model.graph.output}
    reasons |= {name: "is an input that is passed on as it is" for name in reasons if name in input_names}
    return {name: f"output {name!r} {reason}" for name, reason in reasons.items() if reason}


def _is_unranked(value: onnx.ValueInfoProto) -> bool:
    return not why_no_tensor(value) and not value.type.tensor_type.HasField("shape")


def _read_input(value: onnx.ValueInfoProto, sizes: Mapping[tuple[str, int], int]) -> TensorSpec:
    """An input whose dynamic axes have the sizes that weights determine. Raises ModelError for an input that no spec
    accepts."""
    spec = TensorSpec(value.name, dtype_name(value), (FILL_IN,)) if _is_unranked(value) else spec_of(value, "input")
    if spec.dtype not in INPUT_DTYPES:
        raise ModelError(
            f"input {spec.name!r} is {spec.dtype}; inputs can be {', '.join(INPUT_DTYPES)}: export the model with one "
            "of these, and a cast behind it"
        )
    if any(isinstance(dim, int) and not 0 < dim < LARGEST_SIZE for dim in spec.shape):
        problem = "always empty" if 0 in spec.shape else "larger than any engine takes"
        raise ModelError(
            f"input {spec.name!r} is {format_shape(spec.shape)}, which is {problem}; export the model without it, or "
            "with that axis dynamic"
        )
    shape = (sizes.get((spec.name, axis), dim) if isinstance(dim, str) else dim for axis, dim in enumerate(spec.shape))
    return replace(spec, shape=tuple(shape))


def _notes(model: onnx.ModelProto, counts: Counter[str], path: Path, arguments: Mapping[str, Scalar]) -> Iterator[str]:
    """One line on the file, and one for each argument and for each input that decides which branch of an If runs."""
    opset = max((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), default=1)
    producer_note = (
        f", written by {model.producer_name}" if model.producer_name.isprintable() and model.producer_name else ""
    )
    op_text = ", ".join(f"{count} {name}" for name, count in counts.most_common(4))
    weight_files = external_files(path, path.resolve().parent)
    size = sum(file.stat().st_size for file in (path, *weight_files)) / (1 << 20)
    yield f"{path.name}: {size:.1f} MiB, opset {opset}{producer_note}; {counts.total()} nodes: {op_text}"
    for name in sorted(_deciding_inputs(model)):
        remedy = "with a value for it in source.arguments, and not in inputs, that branch alone is built"
        yield f"{name!r} decides which branch of an If runs: {remedy}, in every precision"
    for name, value in arguments.items():
        result = "that branch alone is built, and engines do not take this input"
        yield f"{name!r} is {value} in all requests, and decides which branch of an If runs: {result}"


def _deciding_inputs(model: onnx.ModelProto) -> set[str]:
    """The inputs of the conditions of Ifs, if all inputs of a condition are scalars."""
    inputs = {value.name: value.type.tensor_type for value in _inputs(model)}
    deciding_names = set[str]()
    for node in (node for node in model.graph.node if node.op_type == "If"):
        deciding_inputs = _list_sources(model, node.input) & inputs.keys()
        if all(inputs[name].HasField("shape") and not inputs[name].shape.dim for name in deciding_inputs):
            deciding_names |= deciding_inputs
    return deciding_names


def _list_sources(model: onnx.ModelProto, names: Iterable[str]) -> set[str]:
    """These names, and all tensors that they are computed from, except through the conditions of Ifs."""
    source_names = {*names}
    for node in reversed(model.graph.node):
        if not source_names.isdisjoint(node.output):
            source_names.update(list_captured(node) if node.op_type == "If" else list_reads(node))
    return source_names


def _precisions(model: onnx.ModelProto, counts: Counter[str]) -> tuple[tuple[str, str], ...]:
    if "QuantizeLinear" in counts or counts.keys() >= {"DequantizeLinear", "DynamicQuantizeLinear"}:
        return (("int8", "the graph as it is: it carries Q/DQ nodes, and other precisions would quantize twice"),)
    data_types = {tensor.data_type for tensor in all_tensors(model) if len(tensor.dims) > 1}
    other_types = data_types & {onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16, onnx.TensorProto.DOUBLE}
    reason = ""
    if quantized_ops := counts.keys() & (_INTEGER | {"DynamicQuantizeLSTM"}):
        op_text = ", ".join(sorted(quantized_ops))
        reason = f"the source model is quantized ({op_text}), and other precisions would quantize twice"
    elif "DequantizeLinear" in counts:
        reason = "it computes in float with weights that are stored in 8 or 4 bits"
    elif counts.keys() & _TREES:
        reason = "decision trees have no weights that 16 or 8 bits would make smaller"
    elif other_types and onnx.TensorProto.FLOAT not in data_types:
        type_text = " and ".join(sorted(onnx.helper.tensor_dtype_to_np_dtype(kind).name for kind in other_types))
        reason = f"its weights are {type_text}"
    if reason:
        return (("fp32", f"the graph as it is: {reason}"),)
    precisions = [("fp32", "the graph as it is"), ("fp16", "half the size; for GPUs")]
    return tuple(precisions if counts.keys() & _HEAVY else precisions[:1])


# The fields of a configuration are those of Triton's ModelConfig (https://github.com/triton-inference-server/common,
# protobuf/model_config.proto).

# The greatest size of a configuration.
LARGEST_BYTES = 1 << 20


def look_at_triton(config: Path, folder: Path) -> FoundModel:
    """Facts from the ONNX model beside a configuration, with the configuration's name and batch sizes.

    Raises InputError for a configuration of another platform, and if the model's file is missing.
    """
    config_message = _read_config(config)
    platform = config_message.text("backend") or config_message.text("platform") or "onnxruntime"
    if not platform.startswith("onnxruntime"):
        remedy = f"run `enginesmith init {config}`" if platform == ENSEMBLE else "name the model's file"
        raise InputError(
            f"{config} is of the platform {platform!r}, and a model's configuration must be of onnxruntime; {remedy}"
        )
    name = config_message.text("default_model_filename") or "model.onnx"
    version_numbers = config_message.message("version_policy").message("specific").numbers("versions")
    versions = sorted(
        config.parent.glob(f"[0-9]*/{name}"), key=lambda path: (_version(path) in version_numbers, _version(path))
    )
    model = next((path for path in reversed([config.parent / name, *versions]) if path.is_file()), None)
    if model is None:
        raise InputError(f"{config}: no {name} beside it, nor in a folder of a version; put it there")
    model_facts = look_at_onnx(model, str(model.resolve().relative_to(folder.resolve())))
    misfit_texts = (*_find_unfit(model_facts, config_message), *_find_dropped(config_message, model))
    notes = (
        *model_facts.notes,
        f"{config.name}: max_batch_size {config_message.text('max_batch_size') or '0'}",
        *(f"{config.name}: {text}" for text in misfit_texts),
    )
    # The devices of the served instances become the targets of the spec.
    kinds = {group.text("kind") for group in config_message.messages("instance_group")}
    targets = tuple(name for kind, name in (("KIND_CPU", "cpu"), ("KIND_GPU", "gpu")) if kind in kinds)
    model_facts = replace(
        model_facts,
        name=model_name(config_message.text("name") or config.resolve().parent.name),
        notes=notes,
        serve="triton",
        triton=_read_serving(config_message, config.parent, folder),
        # Clients may ask for a version that the configuration names.
        version=str(_version(model)) if _version(model) in version_numbers else "",
        targets=targets or model_facts.targets,
    )
    return _take_batch(_take_sizes(model_facts, config_message), config_message)


def _read_config(config: Path) -> ProtoMessage:
    if config.stat().st_size > LARGEST_BYTES:
        raise InputError(f"{config} is over {LARGEST_BYTES} bytes; a configuration is a short text")
    try:
        return parse(config.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise InputError(f"{config} is not protobuf text: {error}") from error


def look_at_ensemble(config: Path) -> FoundEnsemble | None:
    """The ensemble of a configuration in a model repository; None for any other configuration. Raises InputError for
    steps in a cycle and for an output of no step."""
    message = _read_config(config) if config.is_file() else ProtoMessage()
    if message.text("platform") != ENSEMBLE:
        return None
    steps, sources = dict[str, ProtoMessage](), dict[str, str]()
    for step in message.message("ensemble_scheduling").messages("step"):
        key = graph_key(step.text("model_name").rpartition("@")[2], [*steps])
        steps[key] = step
        sources |= {tensor: f"{key}.{output}" for output, tensor in _read_map(step, "output_map").items()}
    graphs, connections = dict[str, Path](), dict[str, str]()
    while waiting := {key: _read_map(step, "input_map") for key, step in steps.items() if key not in graphs}:
        givers = {tensor for key in waiting for tensor in _read_map(steps[key], "output_map").values()}
        key = next((key for key, tensors in waiting.items() if givers.isdisjoint(tensors.values())), "")
        if not key:
            raise InputError(f"{config}: each of the steps {', '.join(waiting)} takes what another gives; correct it")
        graphs[key] = config.resolve().parents[1] / steps[key].text("model_name") / config.name
        tensors = {f"{key}.{name}": tensor for name, tensor in waiting[key].items() if tensor != f"{key}.{name}"}
        connections |= {name: sources.get(tensor, input_name(tensor)) for name, tensor in tensors.items()}
    output_names = [output.text("name") for output in message.messages("output")]
    if lost_outputs := [name for name in output_names if name not in sources]:
        raise InputError(f"{config}: no step gives the output {lost_outputs[0]!r}; correct it")
    name = model_name(message.text("name") or config.resolve().parent.name)
    return FoundEnsemble(name, graphs, connections, tuple(sources[name] for name in output_names))


def _read_map(step: ProtoMessage, name: str) -> dict[str, str]:
    """A map of a step: name of the model's tensor -> name of the ensemble's tensor."""
    return {entry.text("key"): entry.text("value") for entry in step.messages(name)}


# Fields of a configuration and of its messages that a section of the spec has, or that follow from the model.
_KEPT: Mapping[str, str] = {
    "": "name platform backend version_policy max_batch_size input output dynamic_batching instance_group "
    "default_model_filename model_warmup parameters cc_model_filenames",
    "dynamic_batching": "preferred_batch_size max_queue_delay_microseconds",
    "instance_group": "kind count name profile",
    "output": "name data_type dims label_filename reshape",
    "version_policy": "specific latest",
}


def _find_dropped(config: ProtoMessage, model: Path) -> Iterator[str]:
    policy = config.message("version_policy")
    kept_counts = policy.message("latest").numbers("num_versions")
    if (count := max(1, len({*policy.message("specific").numbers("versions")}), *kept_counts)) > 1:
        path_text = f"{model.parent.name}/{model.name}"
        yield f"version_policy: serves {count} versions, but a spec builds one: {path_text} is used"
    for name, field_names in _KEPT.items():
        messages = config.messages(name) if name else [config]
        fields = dict.fromkeys(field for message in messages for field in message.fields)
        for field in (field for field in fields if field not in field_names.split()):
            yield f"{f'{name}.' if name else ''}{field}: ignored, because specs have no such key"


def _read_serving(config: ProtoMessage, place: Path, folder: Path) -> dict[str, object]:
    """The section `triton` of the spec: instances, batching, label files. place: the configuration's folder."""
    batching, serving = config.message("dynamic_batching"), dict[str, object]()
    counts = [count for group in config.messages("instance_group") for count in group.numbers("count")]
    if max(counts, default=1) > 1:
        serving["instances"] = max(counts)
    if sizes := batching.numbers("preferred_batch_size"):
        serving["preferred_batch_sizes"] = list(sizes)
    if "dynamic_batching" in config.fields:
        serving["max_queue_delay_us"] = next(iter(batching.numbers("max_queue_delay_microseconds")), 0)
    label_files = {output.text("name"): output.text("label_filename") for output in config.messages("output")}
    label_paths = {name: (place / file).resolve() for name, file in label_files.items() if file}
    for name, path in label_paths.items():
        if not (path.is_file() and path.is_relative_to(folder.resolve())):
            raise InputError(f"output {name!r} has the label file {label_files[name]!r}, not a file in {folder}")
    if label_paths:
        serving["labels"] = {name: str(path.relative_to(folder.resolve())) for name, path in label_paths.items()}
    return serving


def _version(path: Path) -> int:
    return int(path.parent.name) if path.parent.name.isdecimal() and len(path.parent.name) < 100 else -1


def _is_batched(config: ProtoMessage) -> bool:
    return any(size > 0 for size in config.numbers("max_batch_size"))


def _find_unfit(facts: FoundModel, config: ProtoMessage) -> Iterator[str]:
    """The configuration's inputs that do not fit the model, and are ignored."""
    ranks = {spec.name: len(spec.shape) - _is_batched(config) for spec in facts.inputs}
    for message in config.messages("input"):
        name, served_rank = message.text("name"), len(_served_shape(message))
        if name not in ranks:
            yield f"input {name!r}, which the model does not have; it has {', '.join(ranks)}"
        elif served_rank != ranks[name]:
            yield f"input {name!r} has {pluralize(served_rank, 'size')}, but the model takes {ranks[name]}: ignored"


def _take_sizes(facts: FoundModel, config: ProtoMessage) -> FoundModel:
    """The model whose dims have the served sizes: one, or several if inputs differ."""
    shapes = {message.text("name"): _served_shape(message) for message in config.messages("input")}
    sizes: dict[str, set[int]] = {}
    for spec in facts.inputs:
        axes = spec.shape[1:] if _is_batched(config) else spec.shape
        served_sizes = shapes.get(spec.name, ())
        if len(served_sizes) != len(axes):
            continue
        for axis, size in zip(axes, served_sizes, strict=True):
            if isinstance(axis, str) and axis in facts.dims:
                sizes.setdefault(axis, set()).add(size)
    served_dims = {
        name: FoundDim(low, max(all_sizes), max(all_sizes), f"served at {' and '.join(map(str, sorted(all_sizes)))}")
        for name, all_sizes in sizes.items()
        if (low := min(all_sizes)) > 0
    }
    return replace(facts, dims={**facts.dims, **served_dims})


def _served_shape(message: ProtoMessage) -> tuple[int, ...]:
    """The shape of an input as the model receives it, without the batch; -1, for any size, also replaces a value that
    is not a number."""
    reshape = message.message("reshape")
    texts = reshape.fields.get("shape", []) if "reshape" in message.fields else message.fields.get("dims", [])
    return tuple(int(text) if isinstance(text, str) and text.isdecimal() and len(text) < 100 else -1 for text in texts)


def _take_batch(facts: FoundModel, config: ProtoMessage) -> FoundModel:
    """The model whose batch dim has the greatest served batch as `max`, and the preferred batch as `opt`."""
    batch_dim = facts.inputs[0].shape[0] if facts.inputs and facts.inputs[0].shape else None
    if not _is_batched(config) or not isinstance(batch_dim, str):
        return facts
    limit = int(config.text("max_batch_size"))
    preferred_size = max(config.message("dynamic_batching").numbers("preferred_batch_size"), default=1)
    dim = FoundDim(1, min(preferred_size, limit), limit, f"max_batch_size is {limit}")
    return replace(facts, dims={**facts.dims, batch_dim: dim})
