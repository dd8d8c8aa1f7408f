"""ONNX models on disk with their external data: read with every check that a hostile file needs, written with equal
bytes for equal models."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Literal

import numpy as np
import onnx
from google.protobuf.message import DecodeError, EncodeError  # type: ignore[import-untyped]

from builders.onnx_graphs.bodies import LIBRARIES, NO_LIBRARIES, Libraries, drop_unread
from builders.onnx_graphs.outline import lacks_lists, load_without_lists, save_graph, save_with_lists
from builders.onnx_graphs.weights import (
    LEAST_BYTES,
    bytes_of,
    embed,
    has_external,
    is_external,
    may_lie_outside,
    place_of,
    set_place,
    to_array,
    wrong_length,
)
from enginesmith.arrays import Array, check_finite
from enginesmith.core.codec import encode
from enginesmith.core.errors import ModelError, canonical_json, digest_of_bytes
from enginesmith.core.requirements import Library, LibraryBuild
from enginesmith.core.types import TensorSpec
from pipeline.sources.request import MOST_EMBEDDED_BYTES
from pipeline.sources.walk import all_graphs, all_nodes, all_tensors, has_sparse, texts

# The greatest size that protobuf can hold, in bytes.
LARGEST_BYTES = (1 << 31) - 1
# An external tensor with its file, and offset and length in that, in bytes.
External = tuple[onnx.TensorProto, Path, int, int]


def inside(path: Path, folder: Path, folder_text: str) -> Path:
    """The path of a file in `folder`, with links followed. Raises ModelError for others. folder_text: for messages."""
    try:
        is_inside, is_file = path.resolve().is_relative_to(folder.resolve()), path.is_file()
    except (OSError, ValueError, RuntimeError) as error:  # too long, a NUL inside, links in a circle
        raise ModelError(f"{str(path)[:300]!r} cannot be the path of a file ({error}); correct it") from error
    if not is_inside:
        raise ModelError(f"{path} leads outside {folder_text} {folder}; put the file itself inside")
    if not is_file:
        raise ModelError(f"{path} does not exist or is not a file; correct the path or restore the file")
    return path


def list_external(model: onnx.ModelProto, path: Path) -> list[External]:
    """Each external tensor of the model in `path`, with file, offset and length in bytes; no file is read.

    Raises ModelError for a file outside of the model's folder, and one that is too short.
    """
    external_tensors = []
    for tensor in all_tensors(model):
        if is_external(tensor):
            name, offset, length = place_of(tensor)
            file = path.parent / name
            folder_text = f"the folder of {path.name}, which its external data must stay in:"
            # The model's own file may be a link that leads elsewhere.
            size = (file if file == path.absolute() else inside(file, path.parent, folder_text)).stat().st_size
            if offset + length > size:
                raise ModelError(
                    f"{path}: tensor {tensor.name[:80]!r} ends at byte {offset + length} of {file.name}, which has "
                    f"{size}; the file is truncated or belongs to another model: copy both again"
                )
            external_tensors.append((tensor, file, offset, length))
    return external_tensors


def check_places(external: Sequence[External], path: Path) -> None:
    """Raise ModelError if tensors overlap, because their shards would be larger than the files, or if a tensor's length
    in bytes does not fit its shape."""
    regions = {(file.resolve(), offset, length) for _, file, offset, length in external}
    file_bytes = sum(file.stat().st_size for file in {file for file, *_ in regions})
    if sum(length for *_, length in regions) > file_bytes:
        raise ModelError(f"{path}: tensors overlap in its external data files ({file_bytes} bytes); export it again")
    for tensor, _, _, length in external:
        if length != bytes_of(tensor):
            raise ModelError(f"{path}: {wrong_length(tensor)}")


# External data (tensors' bytes in other files) must be in the model's folder. Weights with NaN or infinities are
# refused by name; otherwise, an error would blame the first sample that shows them. If a model's weights take more than
# `MOST_EMBEDDED_BYTES`, large weights stay in their files and are written as shards (`builders.onnx_graphs`): protobuf
# cannot hold 2 GB in one piece.

# The oldest IR version whose initializers need not be inputs and that all readers know.
OLDEST_IR_VERSION = 8
# Operator domains of onnxruntime's CPU kernels; any other one needs a custom library.
DOMAINS = ("", "ai.onnx", "ai.onnx.ml", "com.microsoft")
# Operators that multiply by their constants, which must not be infinite. Other constants may be masks or bounds.
_WEIGHTED = frozenset(
    {
        "BatchNormalization", "Conv", "ConvTranspose", "Div", "GRU", "Gemm", "GroupNormalization",
        "InstanceNormalization", "LSTM", "LayerNormalization", "MatMul", "Mul", "PRelu", "RNN", "RMSNormalization",
    }
)  # fmt: skip


# Kinds of values other than dense tensors of numbers: description and remedy.
_ZIPMAP = "export a tensor instead (of skl2onnx: options={'zipmap': False})"
_NO_TENSORS: Mapping[str | None, tuple[str, str]] = {
    "string": ("holds strings", "keep text out of the model"),
    "sequence_type": ("is a sequence", _ZIPMAP),
    "map_type": ("is a map", _ZIPMAP),
    "optional_type": ("is optional", "export the model without it, or as a tensor that is always given"),
    "sparse_tensor_type": ("is a sparse tensor", "export it as a dense one"),
    "opaque_type": ("is of an opaque type", "export the model without it"),
}


def check_weights(model: onnx.ModelProto) -> None:
    """Raise ModelError for a constant with NaN, and for an infinite constant that nodes multiply by. A NaN scalar may
    mark a missing value; it is refused only if nodes multiply by it."""
    weights = {name for node in all_nodes(model) if node.op_type in _WEIGHTED for name in node.input}
    for name, array in nonfinite_constants(model):
        if name not in weights:
            array = np.where(np.isinf(array), 0, array) if array.size > 1 else np.zeros_like(array)
        check_finite([(name, array)])


def nonfinite_constants(model: onnx.ModelProto) -> Iterator[tuple[str, Array]]:
    """(name, array) of each floating-point constant with NaN or infinities."""
    constants = [(tensor.name, tensor) for graph in all_graphs(model) for tensor in graph.initializer]
    nodes = [node for node in all_nodes(model) if node.op_type == "Constant"]
    constants += [
        (node.output[0], attribute.t) for node in nodes for attribute in node.attribute if attribute.HasField("t")
    ]
    for name, tensor in constants:
        if onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).kind not in "iubOSU":
            array = to_array(tensor)
            if not np.isfinite(array).all():
                yield name, array


def load_onnx(
    path: Path, root: Path, most_embedded_bytes: int = MOST_EMBEDDED_BYTES, *, custom: bool = False
) -> onnx.ModelProto:
    """Read a model, with its external data if all of it takes at most `most_embedded_bytes`. In a larger model, large
    weights stay in their files (`builders.onnx_graphs.weights`), and unused weights are left out.

    most_embedded_bytes: 0 leaves large weights in the model's own file, too; the model can then be read, not written.
    root: the spec's folder, which must contain the model.  custom: whether operators of unknown domains are allowed,
    because a library has them. Names of libraries in the file itself are removed, because they would be opened.
    Raises ModelError, with the remedy, for a file that is missing, empty, truncated or no ONNX; for external data that
    is missing, too short or outside of the model's folder (through a link too); for an unknown opset or domain.
    """
    model = _parse(inside(path, root, "the spec's folder"), weights=most_embedded_bytes > 0)
    _check_operators(model, path, custom)
    name_libraries(model, NO_LIBRARIES)
    entries = list_external(model, path)
    if entries and lacks_lists(model):
        model = _parse(path, whole=True)
        entries = list_external(model, path)
    # Several tensors may name the same bytes, which the read model would contain several times.
    is_large = bool(entries) and path.stat().st_size + sum(length for *_, length in entries) > most_embedded_bytes
    if is_large:
        check_places(entries, path)
    weight_ids = {id(tensor) for tensor in model.graph.initializer if may_lie_outside(tensor)} if is_large else set()
    outer_entries = [entry for entry in entries if id(entry[0]) in weight_ids and entry[3] >= LEAST_BYTES]
    inner_entries = [entry for entry in entries if id(entry[0]) not in weight_ids or entry[3] < LEAST_BYTES]
    for tensor, file, offset, length in outer_entries:
        set_place(tensor, str(file.resolve()), offset, length)
    if sum(length for *_, length in inner_entries) > LARGEST_BYTES:
        raise ModelError(f"{path}: graphs inside nodes have constants of over 2 GB; make initializers of them")
    for tensor, file, offset, length in inner_entries:
        set_place(tensor, str(file), offset, length)
        embed(tensor)
    if is_large:
        drop_unread(model.graph)
    _forget_unknown_sizes(model)
    # A newer onnx writes a version that onnxruntime does not read, although an older one could represent the graph.
    min_ir_version = onnx.helper.find_min_ir_version_for(model.opset_import, ignore_unknown=True)
    model.ir_version = min(model.ir_version, max(min_ir_version, OLDEST_IR_VERSION))
    return model


def _forget_unknown_sizes(model: onnx.ModelProto) -> None:
    """In place: clear each size that marks an axis as unknown.

    Paddle writes -1, and "?" as a name, which would make all such axes one dim; others write "None" or "-1".
    """
    for graph in all_graphs(model):
        for value in (*graph.input, *graph.output, *graph.value_info):
            for dim in value.type.tensor_type.shape.dim if value.type.HasField("tensor_type") else ():
                name = dim.dim_param
                is_unknown = name and (name == "None" or not any(letter.isalpha() for letter in name))
                if dim.dim_value < 0 or is_unknown:
                    dim.Clear()


def external_files(path: Path, root: Path) -> tuple[Path, ...]:
    """The files of a model's external data, sorted; none is read. Raises ModelError as `load_onnx`."""
    model = _parse(inside(path, root, "the spec's folder"), weights=False)
    return tuple(sorted({file for _, file, *_ in list_external(model, path)} - {path.absolute()}))


def save_onnx(model: onnx.ModelProto, path: Path) -> None:
    """Write a model, equal bytes for equal models; large weights as shards beside it. Raises ModelError above 2 GB."""
    try:
        if has_external(model):
            save_graph(model, path)
            return
        if lacks_lists(model):
            save_with_lists(model, path)
            return
        data = model.SerializeToString(deterministic=True)
    except (ValueError, EncodeError) as error:
        raise ModelError(f"{path.name}: the model is over 2 GB, which one ONNX file cannot hold") from error
    path.write_bytes(data)


def name_libraries(model: onnx.ModelProto, libraries: Libraries) -> None:
    """In place: write these operator libraries, and no others, into a model's metadata."""
    entries = {entry.key: entry.value for entry in model.metadata_props if entry.key != LIBRARIES}
    entries |= {LIBRARIES: canonical_json(encode(libraries)).decode()} if libraries.libraries else {}
    onnx.helper.set_model_props(model, entries)


# ELF (https://refspecs.linuxfoundation.org/elf/gabi4+/ch4.eheader.html): the machine of a shared library.
_ELF_MACHINES = {62: "x86_64", 183: "aarch64"}
# Functions of operator libraries; runtimes call one of them.
_ENTRIES = ("RegisterCustomOps", "getCreators", "getPluginCreators")


def read_libraries(root: Path, files: Sequence[tuple[str, int]], folder: Path) -> Libraries:
    """The libraries in these files, which are copied into `folder`, each named by its digest. files: relative to
    `root`, with CUDA's major version. Raises ModelError for a file that is no Linux library with operators, and for two
    builds of one library for one platform."""
    builds = dict[tuple[str, str], dict[tuple[str, int], LibraryBuild]]()
    for file, cuda in files:
        path = inside(root / file, root, "the spec's folder")
        data = path.read_bytes()
        machine = _ELF_MACHINES.get(int.from_bytes(data[18:20], "little")) if data[:6] == b"\x7fELF\2\1" else None
        if machine is None:
            machine_text = ", ".join(_ELF_MACHINES.values())
            raise ModelError(f"{path} is not a shared library of Linux for one of {machine_text}; give one that is")
        entry = next((name for name in _ENTRIES if b"\0" + name.encode() + b"\0" in data), None)
        if entry is None:
            raise ModelError(f"{path} has none of the functions that runtimes call ({', '.join(_ENTRIES)})")
        build = LibraryBuild(f"linux-{machine}", digest_of_bytes(data), cuda)
        builds_by_platform = builds.setdefault((path.name, entry), {})
        if builds_by_platform.setdefault((build.platform, cuda), build) != build:
            raise ModelError(f"{path} is the second {path.name} for {build.platform}; give one for each platform")
        (folder / build.sha256).write_bytes(data)
    return Libraries(tuple(Library(*key, tuple(entry_builds.values())) for key, entry_builds in builds.items()))


def specs_of(model: onnx.ModelProto) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    """The model's inputs without initializers, and its outputs. An axis without size and name is '?'.

    Raises ModelError for an input or output that is not a tensor of numbers of known rank.
    """
    initializer_names = {tensor.name for tensor in model.graph.initializer}
    inputs = tuple(spec_of(value, "input") for value in model.graph.input if value.name not in initializer_names)
    return inputs, tuple(spec_of(value, "output") for value in model.graph.output)


def spec_of(value: onnx.ValueInfoProto, role: Literal["input", "output"]) -> TensorSpec:
    """One input or output. Raises ModelError if it is not a tensor of numbers, or has an unknown rank."""
    if reason := why_no_tensor(value):
        remedy = "; or leave it out of the spec's outputs" if role == "output" else ""
        raise ModelError(f"{role} {value.name!r} {reason}{remedy}")
    tensor = value.type.tensor_type
    if not tensor.HasField("shape"):
        raise ModelError(f"{role} {value.name!r} is of unknown rank; state its shape when you export the model")
    shape = tuple(dim.dim_param or (dim.dim_value if dim.HasField("dim_value") else "?") for dim in tensor.shape.dim)
    return TensorSpec(value.name, dtype_name(value), shape)


def dtype_name(value: onnx.ValueInfoProto) -> str:
    """The dtype of a tensor: 'float32'."""
    return str(onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type).name)


def why_no_tensor(value: onnx.ValueInfoProto) -> str:
    """Why an input or output is not a dense tensor of numbers, and the remedy; '' for such a tensor."""
    kind = "string" if value.type.tensor_type.elem_type == onnx.TensorProto.STRING else value.type.WhichOneof("value")
    kind_text, remedy = _NO_TENSORS.get(kind, ("", ""))
    return f"{kind_text}, which no engine takes or gives; {remedy}" if kind_text else ""


def _parse(path: Path, whole: bool = False, *, weights: bool = True) -> onnx.ModelProto:
    """A model without its external data, and without the long lists of tree ensembles unless `whole`. weights: as in
    `load_without_lists`. Raises ModelError for a damaged file and for contents that no backend reads."""
    if path.stat().st_size == 0:
        raise ModelError(f"{path} is empty; export the model again")
    if path.stat().st_size > LARGEST_BYTES:
        raise ModelError(f"{path} is over 2 GB; export it with its weights as external data")
    try:
        model = (
            onnx.load(path, format="protobuf", load_external_data=False)
            if whole
            else load_without_lists(path, weights=weights)
        )
    except DecodeError as error:
        raise ModelError(f"{path} is truncated or not an ONNX file ({error}); export or download it again") from error
    if not model.opset_import or not model.graph.output:
        raise ModelError(f"{path} holds no ONNX graph with an opset and an output; export or download it again")
    name_counts = Counter(value.name for value in model.graph.input)
    if duplicate := next((name for name, count in name_counts.items() if count > 1), None):
        raise ModelError(f"{path} has two inputs called {duplicate[:80]!r}; export it again")
    if bad_name := next((text for text in texts(model) if isinstance(text, bytes)), None):
        raise ModelError(f"{path} is damaged: the name {bad_name[:80]!r} in it is not UTF-8; export or copy it again")
    if has_sparse(model):
        raise ModelError(f"{path} holds sparse tensors, which nothing here reads; export the model with dense ones")
    del model.training_info[:]
    return model


def _check_operators(model: onnx.ModelProto, path: Path, custom: bool) -> None:
    opset = max((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), default=1)
    if opset > newest_opset():
        raise ModelError(
            f"{path} uses opset {opset}, and onnxruntime here knows {newest_opset()} at most; "
            f"export with opset {min(newest_opset(), 20)} or use onnx.version_converter"
        )
    local_functions = {(function.domain, function.name) for function in model.functions}
    for node in all_nodes(model):
        if not custom and node.domain not in DOMAINS and (node.domain, node.op_type) not in local_functions:
            raise ModelError(
                f"{path}: node {node.name[:80]!r} is operator {node.domain[:80]}::{node.op_type[:80]}, which no "
                "backend knows; name its library in source.libraries, or export the model without custom operators"
            )


@cache
def newest_opset() -> int:
    """The newest ONNX opset that the installed onnxruntime accepts, found by opening a one-node model of each."""
    from builders.reference import accepts

    value = onnx.helper.make_tensor_value_info
    node = onnx.helper.make_node("Identity", ["x"], ["y"])
    graph = onnx.helper.make_graph([node], "probe", [value("x", 1, [1])], [value("y", 1, [1])])
    for opset in range(onnx.defs.onnx_opset_version(), 1, -1):
        opsets = [onnx.helper.make_opsetid("", opset)]
        min_ir_version = onnx.helper.find_min_ir_version_for(opsets)
        model = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=min_ir_version)
        if accepts(model.SerializeToString()):
            return opset
    return 1
