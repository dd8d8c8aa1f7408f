"""Checks before a build that everything it needs is there."""

import math
import os
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from builders.backends import discovery
from builders.onnx_graphs.bodies import graph_bytes, list_weight_files
from enginesmith.core.errors import EnginesmithError, ModelError
from enginesmith.core.state import step_inputs
from enginesmith.core.text import format_bytes
from enginesmith.core.types import TRAITS, TensorSpec
from enginesmith.user_code.entry_point import why_no_function
from pipeline.sources.onnx_header import GraphHeader, read_header, wrong_arguments, wrong_inputs, wrong_outputs
from pipeline.sources.request import MOST_EMBEDDED_BYTES
from pipeline.spec.model import ModelSpec, locate_mistakes
from pipeline.spec.source import Loc

# All mistakes that the headers of a spec's files show are reported together, before anything heavy runs.
#
# Only headers are read: inputs and outputs of an ONNX file, names, dtypes and shapes of stored arrays, the functions
# of a Python file. The cost does not grow with the model or the data. The steps that read the files repeat these
# checks, and report one mistake at a time; they also check what headers do not show.

# The first bytes of a Git LFS pointer file (https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md).
_LFS = b"version https://git-lfs.github.com/spec/"
POINTER = "is a Git LFS pointer in the place of the file; run `git lfs pull`"
_PICKLE = b"\x80"

Mistake = tuple[Loc, str]


def check_files(spec: ModelSpec) -> None:
    """Raise SpecError, with a line per mistake, if files of a spec do not match it or each other."""
    if mistakes := list(_find_mistakes(spec)):
        raise locate_mistakes(spec, mistakes)


def _find_mistakes(spec: ModelSpec) -> Iterator[Mistake]:
    pointers = [(loc, f"{name!r} {POINTER}") for loc, name in spec.named_files() if is_pointer(spec.file(name))]
    yield from pointers
    pointer_locs = {loc for loc, _ in pointers}
    header: GraphHeader | None = None
    if ("source", spec.source.kind) not in pointer_locs:
        try:
            header = _check_source(spec)
        except ModelError as error:
            yield ("source", spec.source.kind), str(error)
    if header is not None:
        arguments = spec.source.arguments
        yield from ((("source", "arguments", name), text) for name, text in wrong_arguments(header.inputs, arguments))
        header = replace(header, inputs=tuple(tensor for tensor in header.inputs if tensor.name not in arguments))
        yield from _compare(spec, header)
        yield from _weights_too_large(spec)
    yield from _inputs_too_large(spec)
    if spec.source.weights and ("source", "weights") not in pointer_locs:
        yield from _wrong_weights(spec.file(spec.source.weights))
    # Where the model says otherwise than the spec, the spec is wrong; data is not held to what it says there.
    wrong_names = {name for name, _ in wrong_inputs(header, spec.tensors())} if header else set()
    sound_specs = tuple(
        tensor for tensor in step_inputs(spec.tensors(), spec.states()) if tensor.name not in wrong_names
    )
    other_names = (wrong_names | {tensor.name for tensor in header.inputs} if header else wrong_names) - {
        tensor.name for tensor in sound_specs
    }
    other_names -= spec.state.keys()  # data with states gets another message
    if spec.calibration and ("calibration", "data") not in pointer_locs:
        path, function = spec.file(spec.calibration.file), spec.calibration.function
        data_loc: Loc = ("calibration", "data")
        if function:
            if reason := why_no_function(spec.folder, path, function):
                yield data_loc, reason
        else:
            column_names = [name for name in (spec.calibration.labels, *spec.calibration.orders) if name]
            yield from _wrong_samples(data_loc, spec, path, sound_specs, column_names, other_names)
    if spec.golden and ("golden", "data") not in pointer_locs:
        path = spec.file(spec.golden.data)
        column_names = [name for name in (spec.golden.labels, *spec.golden.orders) if name]
        yield from _wrong_samples(("golden", "data"), spec, path, sound_specs, column_names, other_names)


def _inputs_too_large(spec: ModelSpec) -> Iterator[Mistake]:
    """Inputs of the largest sizes that memory cannot hold twice: an edge of the golden set, and its bytes to write."""
    import numpy as np

    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    dims, tensors = spec.named_dims(), spec.tensors()
    sizes = {dim.name: dim.max for dim in dims}
    size_bytes = 2 * sum(math.prod(tensor.at(sizes)) * np.dtype(tensor.dtype).itemsize for tensor in tensors)
    if size_bytes > memory_bytes:
        widest_dim = max(dims, key=lambda dim: dim.max / max(dim.min, 1), default=None)
        loc: Loc = ("dims", widest_dim.name) if widest_dim else ("inputs",)
        need_text = f"golden inputs of the largest sizes take {format_bytes(size_bytes)} while they are written"
        yield loc, f"{need_text}, more than this machine has ({format_bytes(memory_bytes)}); lower the max of dims"


def is_pointer(path: Path) -> bool:
    """Whether a file is a Git LFS pointer to a large file that was not fetched."""
    return path.is_file() and _first_bytes(path).startswith(_LFS)


def _first_bytes(path: Path) -> bytes:
    with path.open("rb") as stream:
        return stream.read(len(_LFS))


def _check_source(spec: ModelSpec) -> GraphHeader | None:
    """The header of an ONNX source; None for others. Raises ModelError for a file that cannot be the source."""
    path, source = spec.file(spec.source_file), spec.source
    if source.kind == "onnx":
        return read_header(path)
    if source.kind == "pt2" and not zipfile.is_zipfile(path):
        raise ModelError(f"{path} is truncated or not a .pt2 archive; save it again with torch.export.save")
    if source.kind == "torch" and (reason := why_no_function(spec.folder, path, source.function, source.module)):
        raise ModelError(reason)
    return None


def _compare(spec: ModelSpec, header: GraphHeader) -> Iterator[Mistake]:
    for name, text in wrong_inputs(header, spec.tensors()):
        yield ("inputs", name) if name else ("inputs",), text
    for index, text in wrong_outputs(header.outputs, spec.outputs):
        yield ("outputs", index), text
    if spec.outputs is not None:  # what else names outputs was held to these when the spec was read
        return
    contract_outputs = spec.validation.contract.outputs()
    golden_outputs = spec.golden.outputs() if spec.golden else []
    named_outputs: list[tuple[Loc, str]] = [(("golden", *inner_path), output) for inner_path, output in golden_outputs]
    named_outputs += [(("validation", "contract", *inner_path), output) for inner_path, output in contract_outputs]
    named_outputs += [(("state", name, "output"), state.output) for name, state in spec.state.items()]
    for loc, name in named_outputs:
        yield from ((loc, text) for _, text in wrong_outputs(header.outputs, [name]))


def _weights_too_large(spec: ModelSpec) -> Iterator[Mistake]:
    """The mistakes that a spec can make with an ONNX model whose weights stay in files of their own: no backend of the
    spec takes such a model; or `build.memory_mib` is less than the weights of the widest engine take."""
    path = spec.file(spec.source_file)
    size = graph_bytes(path)
    if not list_weight_files(path) or size <= MOST_EMBEDDED_BYTES:
        return
    compilers = (discovery.configure(name, options) for name, options in spec.backends.items())
    reasons = [discovery.refuse_shards(compiler, size) for compiler in compilers]
    if all(reasons):
        yield ("backends",), str(reasons[0])
    # ONNX Runtime packs weights for its kernels: mapped files do not hold them.
    weight_bits = max(TRAITS[precision].bits for precision in spec.precision_list())
    weights_mib = (size * weight_bits // 32) >> 20
    if weights_mib > spec.build.memory_mib:
        need_text = f"the weights alone take {weights_mib} MiB at {weight_bits} bits each"
        text = f"{spec.build.memory_mib} MiB are too few: {need_text}; set {weights_mib + 2048}"
        yield ("build", "memory_mib"), text


def _wrong_weights(path: Path) -> Iterator[Mistake]:
    head = _first_bytes(path)
    if path.suffix.lower() == ".safetensors":
        is_valid = len(head) > 8 and int.from_bytes(head[:8], "little") + 8 <= path.stat().st_size and head[8:9] == b"{"
        format_hint = "safetensors; save it with safetensors.torch.save_file"
    else:
        is_valid = head.startswith((_PICKLE, b"PK")) or zipfile.is_zipfile(path)
        format_hint = "a file that torch.save wrote; save it again"
    if not is_valid:
        yield ("source", "weights"), f"{path} is truncated or not {format_hint}"


def _wrong_samples(
    loc: Loc, spec: ModelSpec, path: Path, inputs: tuple[TensorSpec, ...], columns: Sequence[str], others: set[str]
) -> Iterator[Mistake]:
    """Mismatches of stored samples with these inputs. columns: other arrays. others: unchecked arrays."""
    from validation.data.samples import Samples

    if inputs:
        try:
            mistakes = Samples.find_mistakes(path, inputs, spec.named_dims(), columns, others)
            yield from ((loc, text) for text in mistakes)
        except EnginesmithError as error:
            yield loc, str(error)


# Modules that the workers of several steps import, for the server that forks them (`builders.execution.fork_client`).
#
# Our own modules, and libraries that start no thread of their own; ONNX Runtime, PyTorch and compilers do, and sympy,
# which the export alone needs, would take memory in every other step.

PRELOADED = (
    "blake3", "numpy", "onnx.numpy_helper", "onnx.reference.ops", "onnx.shape_inference", "safetensors.numpy",
    "builders.onnx_graphs.structure", "builders.onnx_graphs.weights", "builders.reference",
    "pipeline.compile.steps.attributions", "pipeline.compile.steps.calibration", "pipeline.compile.steps.engines",
    "pipeline.compile.steps.exports", "pipeline.compile.steps.graphs", "pipeline.compile.steps.keys",
    "pipeline.compile.steps.proofs",
    "pipeline.quantization.insertion_points", "pipeline.quantization.record", "pipeline.quantization.search.trial",
    "pipeline.quantization.schemes.write", "pipeline.quantization.statistics.observe",
    "pipeline.sources.onnx_model",
    "validation.attribution.sweep", "validation.calls.checks", "validation.comparison.sessions",
    "validation.comparison.tasks", "validation.data.joined", "validation.fuzz.run", "validation.golden.golden_set",
    "validation.latency.measurement.measure", "validation.latency.roofline.breakdown",
    "validation.latency.roofline.costs", "validation.limits.budget", "validation.metrics.tally",
    "validation.perturbation.honest",
)  # fmt: skip
