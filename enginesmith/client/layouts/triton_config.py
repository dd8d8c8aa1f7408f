"""Triton's `config.pbtxt` for engines of a version, and its warm-up requests."""

import math
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO

from enginesmith.client.layouts.protobuf_text import Field, Fields, ProtoMessage, Word, entries, write_message
from enginesmith.core.codec import Excerpt, decode
from enginesmith.core.errors import InputError, IntegrityError
from enginesmith.core.golden import golden_prefix
from enginesmith.core.parsing import parse_json
from enginesmith.core.requirements import Count
from enginesmith.core.state import ENSEMBLE, PinnedGraph, split_source, with_int8_states
from enginesmith.core.types import PLUS, BuildRequest, TensorSpec
from enginesmith.registry.manifest import EngineEntry, Manifest, make_request

# Warm-up requests from a version's golden set: the bytes of one case's inputs, as Triton reads them from files.
#
# A golden set is a safetensors file (https://github.com/huggingface/safetensors, "Format"): a header of JSON, then the
# tensors' bytes, row-major and little-endian, as Triton expects them in `warmup/` files. So nothing is decoded here,
# and numpy is not needed.

# The largest golden set that is read for warm-up, in bytes. A set is read whole, because its digest covers all bytes.
MOST_BYTES = 64 << 20
_MOST_HEADER = 16 << 20
# Safetensors' names of the types in golden sets.
_TYPES = {
    "BOOL": "bool",
    **{f"{kind[0].upper()}{bits}": f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)},
    **{f"F{bits}": f"float{bits}" for bits in (16, 32, 64)},
}


@dataclass(frozen=True)
class WarmupInput:
    """The bytes of one input of a warm-up request. shape: as the engine takes it."""

    shape: tuple[int, ...]
    data: bytes

    def first_row(self) -> "WarmupInput":
        """The first entry along axis 0, without that axis."""
        size = len(self.data) // self.shape[0]
        return WarmupInput(self.shape[1:], self.data[:size])


@dataclass(frozen=True)
class _StoredTensor(Excerpt):
    dtype: str
    shape: tuple[Count, ...]
    data_offsets: tuple[Count, Count]


def read_warmup(path: Path, inputs: Sequence[TensorSpec]) -> dict[str, WarmupInput] | None:
    """The inputs, by name, of a golden set's first case in which no input is empty; None if there is no such case, or
    an input has another type than the engine's. Raises IntegrityError if the file is no golden set."""
    with path.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        if size > _MOST_HEADER:
            raise IntegrityError(f"golden set: a header has {size} bytes; the limit is {_MOST_HEADER}")
        header = parse_json(stream.read(size), _MOST_HEADER)
        index = 0
        while warmup_inputs := _read_case(stream, 8 + size, header, golden_prefix(index, "in"), inputs):
            if all(warmup_input.data for warmup_input in warmup_inputs.values()):
                return warmup_inputs
            index += 1
    return None


def _read_case(
    stream: BinaryIO, begin: int, header: Mapping[str, object], prefix: str, inputs: Sequence[TensorSpec]
) -> dict[str, WarmupInput]:
    """The inputs of the case with this prefix; empty if one is missing or has another type."""
    warmup_inputs: dict[str, WarmupInput] = {}
    for spec in inputs:
        tensor_document = header.get(f"{prefix}{spec.name}")
        if tensor_document is None:
            return {}
        tensor = decode(tensor_document, _StoredTensor, spec.name)
        shape, (first_byte, end_byte) = tensor.shape, tensor.data_offsets
        if _TYPES.get(tensor.dtype) != spec.dtype:
            return {}
        size, element_count, file_size = end_byte - first_byte, math.prod(shape), os.fstat(stream.fileno()).st_size
        if size < 0 or begin + end_byte > file_size or (size % element_count if element_count else size):
            raise IntegrityError(
                f"golden set: input {spec.name!r} of shape {list(shape)} does not fit bytes {first_byte} to "
                f"{end_byte} of a file of {file_size}"
            )
        stream.seek(begin + first_byte)
        warmup_inputs[spec.name] = WarmupInput(shape, stream.read(size))
    return warmup_inputs


# Triton's `config.pbtxt` for engines of a version: their types and sizes, the batch, profiles, warm-up.
#
# Fields: https://github.com/triton-inference-server/common, protobuf/model_config.proto (ModelConfig). Comments below
# describe how the backends use them, from their sources at onnxruntime_backend 00fd3e8, tensorrt_backend e2ef6d7, core
# 73aad7c.

# The first line of every configuration that is written here, which identifies it later.
HEADER = "# Written by enginesmith; the next swap replaces it."
# The dim along which requests are joined (`enginesmith.serving.batcher`).
BATCH = "batch"
_TRITON_TYPES = {
    "bool": "TYPE_BOOL",
    "bfloat16": "TYPE_BF16",
    **{f"{kind}{bits}": f"TYPE_{kind.upper()}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)},
    **{f"float{bits}": f"TYPE_FP{bits}" for bits in (16, 32, 64)},
}
# Names of Triton's platforms and of the files that its backends open.
_PLAN, _ONNX = "tensorrt_plan", "onnxruntime_onnx"
_SUFFIXES = {_PLAN: ".plan", _ONNX: ".onnx"}
# Triton's backend and platform for engines of each of our backends.
_OPENED_BY = {
    "onnxruntime": ("onnxruntime", _ONNX),
    "onnxruntime-cuda": ("onnxruntime", _ONNX),
    "onnxruntime-tensorrt": ("onnxruntime", _ONNX),
    "tensorrt": ("tensorrt", _PLAN),
}
# How to get an engine that one of these backends opens.
REMEDY = (
    "build again with `serve: triton` in its spec, and no backends: ONNX Runtime's engines (fp32, fp16) are built on "
    "any machine, TensorRT's (int8, too) on a worker with that GPU"
)
# The backend whose engines need ONNX Runtime's TensorRT provider.
_BY_PROVIDER = "onnxruntime-tensorrt"


@dataclass(frozen=True)
class TritonFile:
    """An engine in the folder of a version. file: its name there."""

    entry: EngineEntry
    file: str

    @property
    def capability(self) -> str:
        """The compute capability as Triton writes it, '8.9'; '' for a CPU engine."""
        return "{}.{}".format(*self.entry.compute_capability) if self.entry.compute_capability else ""


@dataclass(frozen=True)
class DynamicBatching:
    """Triton's dynamic batching, with Triton's names. max_batch_size: if None, the most that the engine takes.

    max_queue_delay_s: most seconds that a request waits for others; if None, the spec's value, else 0.
    """

    max_batch_size: int | None = None
    max_queue_delay_s: float | None = None

    def __post_init__(self) -> None:
        if self.max_batch_size is not None and self.max_batch_size < 1:
            raise InputError(f"max_batch_size is {self.max_batch_size}; a batch has at least one sample")
        if self.max_queue_delay_s is not None and not 0.0 <= self.max_queue_delay_s <= 3600.0:
            raise InputError(f"max_queue_delay_s is {self.max_queue_delay_s}; give seconds from 0 to 3600")


@dataclass(frozen=True)
class ServingHints(Excerpt):
    """The section `triton` of a version's spec. labels: output -> file of class names."""

    instances: Count = 1
    preferred_batch_sizes: tuple[Count, ...] = ()
    max_queue_delay_us: Count | None = None
    labels: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, manifest: Manifest) -> "ServingHints":
        """The hints of a version; the defaults if its spec has no section `triton`."""
        return decode(manifest.spec.get("triton", {}), cls, "spec.triton")

    def batching(self, options: DynamicBatching | None) -> DynamicBatching | None:
        """The dynamic batching by the options, else by the spec; None if neither enables it."""
        delay_us = self.max_queue_delay_us
        if options is None and delay_us is None and not self.preferred_batch_sizes:
            return None
        options = options or DynamicBatching()
        delay_s = (delay_us or 0) / 1e6 if options.max_queue_delay_s is None else options.max_queue_delay_s
        return replace(options, max_queue_delay_s=delay_s)


def label_source(output: str) -> str:
    """The key, among a manifest's sources, of an output's class names."""
    return f"labels {output}"


def label_file(number: int, output: str, hints: ServingHints) -> str:
    """The path of an output's class names below the model's folder: NUMBER/labelsINDEX.txt."""
    return f"{number}/labels{[*hints.labels].index(output)}.txt"


def find_unservable(entry: EngineEntry) -> str | None:
    """The reason why Triton cannot serve an engine; None if it can."""
    if entry.backend not in {*_OPENED_BY, ENSEMBLE}:  # an ensemble's graphs are checked instead
        return f"Triton does not load {entry.backend} engines; it loads engines of {', '.join(_OPENED_BY)}"
    if entry.is_stripped:
        return "its file has no weights, and Triton does not add them"
    request = with_int8_states(make_request(entry))
    if not request.inputs or not request.outputs:
        return "its inputs and outputs are not recorded, and Triton's configuration needs them"
    if unservable_spec := next(
        (spec for spec in (*request.inputs, *request.outputs) if spec.dtype not in _TRITON_TYPES), None
    ):
        return f"{unservable_spec.name!r} is {unservable_spec.dtype}, a type that Triton does not support"
    return None


def file_suffix(entry: EngineEntry) -> str:
    """The suffix that Triton's backend expects: '.plan' or '.onnx'."""
    return _SUFFIXES[_OPENED_BY[entry.backend][1]]


def write_config(
    name: str,
    number: int,
    version: str,
    files: Sequence[TritonFile],
    *,
    hints: ServingHints = ServingHints(),
    batching: DynamicBatching | None = None,
    warmup: Mapping[str, WarmupInput] | None = None,
    libraries: Sequence[str] = (),
    beside: Sequence[int] = (),
) -> str:
    """The configuration that serves version `number` from these files.

    version: its name in the registry.  beside: other versions that are served too.
    warmup: inputs of a request; their files are `warmup_files`.
    libraries: paths of the engines' libraries with operators, which ONNX Runtime's backend passes to the loader.
    hints: the section `triton` of the version's spec.
    batching: how Triton joins requests; None: it does not.
    Raises InputError for engines that no single configuration describes, and if requests cannot be joined.
    """
    requests = [with_int8_states(make_request(file.entry)) for file in files]
    batching = hints.batching(batching)
    configs = [_describe(file, request, batching, hints, number) for file, request in zip(files, requests, strict=True)]
    config = configs[0]
    for file, other_config in zip(files[1:], configs[1:], strict=True):
        if other_config != config:
            raise InputError(
                f"{file.entry.unit} has other inputs, sizes or profiles than {files[0].entry.unit}, but one "
                "configuration must describe both; pull them into two folders"
            )
    config_fields: dict[str, Fields] = {"name": name, **config}
    config_fields |= {**_name_version(version, number, *beside), **_name_files(files)}
    if libraries:
        config_fields["model_operations"] = {"op_library_filename": list(libraries)}
    if warmup:
        max_batch = config["max_batch_size"]
        sizes = [0]
        if isinstance(max_batch, int) and max_batch:  # one sample, and the sizes that each profile is tuned for
            sizes = sorted({1, *(min(size, max_batch) for size in _tuned_sizes(requests[0]))})
        config_fields["model_warmup"] = [_write_warmup(number, requests[0].inputs, warmup, size) for size in sizes]
    return f"{HEADER}\n{write_message(config_fields)}"


def _name_version(version: str, *numbers: int) -> dict[str, Fields]:
    """The fields with the served versions. version: the registry's name of the first one."""
    parameters = entries({"enginesmith_version": {"string_value": version}})
    return {"version_policy": {"specific": {"versions": list(numbers)}}, "parameters": parameters}


def write_ensemble(
    name: str, number: int, version: str, graphs: Sequence[tuple[PinnedGraph, ProtoMessage]], outputs: Collection[str]
) -> str:
    """The configuration of an ensemble. number, version: as in `write_config`.  graphs: with their configurations.
    outputs: of the ensemble, as 'GRAPH.OUTPUT'.

    If a graph has no batch axis for Triton, the ensemble has none, and the batch of the others is an ordinary axis.
    """
    max_batches = [sum(config.numbers("max_batch_size")) for _, config in graphs]
    config_fields: dict[str, Fields] = {"name": name, "platform": ENSEMBLE, "max_batch_size": min(max_batches)}
    used_names = {*outputs}.union(*(graph.sources.values() for graph, _ in graphs))
    inputs, output_fields, steps = dict[str, Field](), list[Field](), list[Field]()
    for (graph, config), max_batch in zip(graphs, max_batches, strict=True):
        batch_dims = [-1] if max_batch > min(max_batches) == 0 else []
        input_map, output_map = dict[str, Field](), dict[str, Field]()
        for tensor in (*config.messages("input"), *config.messages("output")):
            tensor_name, own_name = tensor.text("name"), f"{graph.name}.{tensor.text('name')}"
            source, is_input = graph.sources.get(tensor_name, own_name), tensor in config.messages("input")
            dims = [*batch_dims, *(int(str(size)) for size in tensor.fields["dims"])]
            tensor_fields: dict[str, Fields] = {"data_type": Word(tensor.text("data_type")), "dims": dims}
            if is_input:
                input_map[tensor_name] = source
                if split_source(source, [earlier.name for earlier, _ in graphs[: len(steps)]]) is None:
                    inputs.setdefault(source, {"name": source, **tensor_fields})
            elif own_name in used_names:
                output_map[tensor_name] = own_name
                output_fields += [{"name": own_name, **tensor_fields}] if own_name in outputs else []
        versions = config.message("version_policy").message("specific").numbers("versions")
        step: dict[str, Fields] = {"model_name": config.text("name"), "model_version": versions[0]}
        steps.append({**step, "input_map": entries(input_map), "output_map": entries(output_map)})
    config_fields |= {"input": [*inputs.values()], "output": output_fields, **_name_version(version, number)}
    return f"{HEADER}\n{write_message({**config_fields, 'ensemble_scheduling': {'step': steps}})}"


def warmup_files(inputs: Sequence[TensorSpec], warmup: Mapping[str, WarmupInput], batched: bool) -> dict[str, bytes]:
    """The files, by name, that `write_config` refers to. batched: whether Triton adds the batch axis."""
    return {
        f"input{index}": (warmup[spec.name].first_row() if batched else warmup[spec.name]).data
        for index, spec in enumerate(inputs)
    }


def largest_batch(request: BuildRequest) -> int:
    """The largest batch if axis 0 of every input and output is the batch and every batch from 1 on is allowed; else 0.

    With 0, the batch is an ordinary axis.
    """
    tensors = (*request.inputs, *request.outputs)
    batch_axes = {axis for spec in tensors for axis, dim in enumerate(spec.shape) if dim == BATCH}
    is_leading = all(spec.shape and spec.shape[0] == BATCH for spec in tensors)
    if not is_leading or batch_axes != {0} or not request.profiles:
        return 0
    batch_ranges = sorted((low[0], high[0]) for profile in request.profiles for _, low, _, high in profile.inputs)
    has_gaps = any(upper_range[0] > lower_range[1] + 1 for lower_range, upper_range in pairwise(batch_ranges))
    max_size = max(high for _, high in batch_ranges)
    return max_size if batch_ranges[0][0] == 1 and max_size > 1 and not has_gaps else 0


def _describe(
    file: TritonFile, request: BuildRequest, batching: DynamicBatching | None, hints: ServingHints, number: int
) -> dict[str, Fields]:
    """The fields that engines of one configuration share. number: of the version, for the files of class names."""
    backend, platform = _OPENED_BY[file.entry.backend]
    max_batch = largest_batch(request)
    if batching and not max_batch:
        raise InputError(
            f"{file.entry.unit}: requests cannot be joined, because axis 0 of its inputs and outputs is not a dim "
            f"{BATCH!r} of sizes from 1 on; leave out --max-batch-size and --max-queue-delay, or the batch "
            "settings in the section triton of its spec"
        )
    if batching and batching.max_batch_size is not None:
        if batching.max_batch_size > max_batch:
            raise InputError(
                f"{file.entry.unit}: max_batch_size {batching.max_batch_size} is beyond its largest batch, "
                f"{max_batch}; ask for {max_batch} or less, or build it with a larger dims.{BATCH}.max"
            )
        max_batch = batching.max_batch_size
    fixed_dims = _fixed_sizes(request)
    config_fields: dict[str, Fields] = {"backend": backend, "platform": platform, "max_batch_size": max_batch}
    labels = {name: {"label_filename": label_file(number, name, hints)} for name in hints.labels}
    config_fields["input"] = [_describe_tensor(spec, fixed_dims, bool(max_batch)) for spec in request.inputs]
    config_fields["output"] = [
        {**_describe_tensor(spec, fixed_dims, bool(max_batch)), **labels.get(spec.name, {})} for spec in request.outputs
    ]
    if batching:
        # Triton's documentation advises preferred sizes only for plans with several profiles ("Dynamic Batcher").
        tuned_sizes = _tuned_sizes(request) if platform == _PLAN and len(request.profiles) > 1 else ()
        preferred_sizes = hints.preferred_batch_sizes or tuned_sizes
        sizes = sorted({size for size in preferred_sizes if size <= max_batch})
        delay_us = round((batching.max_queue_delay_s or 0.0) * 1e6)
        config_fields["dynamic_batching"] = {
            **({"preferred_batch_size": sizes} if sizes else {}),
            "max_queue_delay_microseconds": delay_us,
        }
    config_fields["instance_group"] = [_instances(file.entry, platform, len(request.profiles), hints.instances)]
    if file.entry.backend == _BY_PROVIDER:
        config_fields["optimization"] = {
            "execution_accelerators": {"gpu_execution_accelerator": [{"name": "tensorrt"}]}
        }
    return config_fields


def _fixed_sizes(request: BuildRequest) -> dict[str, int]:
    """The named dims that have one size in all profiles."""
    sizes: dict[str, set[int]] = {}
    shapes = {spec.name: spec.shape for spec in request.inputs}
    for name, low, _, high in (ranges for profile in request.profiles for ranges in profile.inputs):
        for dim, min_size, max_size in zip(shapes[name], low, high, strict=True):
            sizes.setdefault(str(dim), set()).update((min_size, max_size))
    return {dim: min(dim_sizes) for dim, dim_sizes in sizes.items() if len(dim_sizes) == 1 and PLUS not in dim}


def _describe_tensor(spec: TensorSpec, fixed: Mapping[str, int], batched: bool) -> dict[str, Fields]:
    """An input or output. A tensor without axes becomes one of [1] that is reshaped, since Triton requires an axis."""
    shape = spec.shape[1:] if batched else spec.shape
    sizes = [dim if isinstance(dim, int) else fixed.get(dim, -1) for dim in shape]
    tensor_fields: dict[str, Fields] = {
        "name": spec.name,
        "data_type": Word(_TRITON_TYPES[spec.dtype]),
        "dims": sizes or [1],
    }
    return tensor_fields if sizes else {**tensor_fields, "reshape": {"shape": list[Field]()}}


def _instances(entry: EngineEntry, platform: str, profiles: int, count: int) -> Field:
    """Instances on the CPU or on each GPU. Those of a plan list all its profiles, else Triton uses only the first."""
    if entry.hardware.is_cpu:
        return {"kind": Word("KIND_CPU"), "count": count}
    instance_group: dict[str, Fields] = {"kind": Word("KIND_GPU"), "count": count}
    if platform == _PLAN and profiles > 1:
        instance_group["profile"] = [str(index) for index in range(profiles)]
    return instance_group


def _name_files(files: Sequence[TritonFile]) -> dict[str, Fields]:
    """The file of a single engine, or one for each compute capability."""
    if len(files) == 1:
        return {"default_model_filename": files[0].file}
    files_by_capability = {file.capability: file.file for file in files}
    if "" in files_by_capability or len(files_by_capability) < len(files):
        unit_list = ", ".join(file.entry.unit for file in files)
        raise InputError(
            f"Triton chooses by compute capability, which does not distinguish {unit_list}; pull one of them"
        )
    return {"cc_model_filenames": entries(dict(sorted(files_by_capability.items())))}


def _tuned_sizes(request: BuildRequest) -> set[int]:
    """The sizes of axis 0 that the profiles are tuned for."""
    return {opt_shape[0] for profile in request.profiles for _, _, opt_shape, _ in profile.inputs}


def _write_warmup(number: int, inputs: Sequence[TensorSpec], warmup: Mapping[str, WarmupInput], size: int) -> Field:
    """A warm-up request. size: of its batch; 0 if the model has no batch axis for Triton."""

    def write(index: int, spec: TensorSpec) -> Iterator[tuple[str, Field]]:
        warmup_input = warmup[spec.name].first_row() if size else warmup[spec.name]
        file_name = f"{number}/input{index}"
        dims = list(warmup_input.shape) or [1]
        yield spec.name, {"data_type": Word(_TRITON_TYPES[spec.dtype]), "dims": dims, "input_data_file": file_name}

    input_fields = dict(pair for index, spec in enumerate(inputs) for pair in write(index, spec))
    name = f"golden inputs, batch {size}" if size else "golden inputs"
    return {"name": name, "batch_size": size or 1, "inputs": entries(input_fields)}
