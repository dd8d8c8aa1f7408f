"""Nodes that a compiler is known to compile wrongly: one table, with the source of each row.

Nodes of a row are refused, or replaced by other nodes that compute the same. If the exact cause is not known, the plan
only has a note. Versions and generations are those that were reported. On a later version or another generation it is
not known whether the fault exists, so a node that would be refused only gets a note.

IREE's rows were found by running ONNX's node tests and tests/conformance/torture with 3.13. IREE compiles a Loop into a
counted loop whenever it can, and a counted loop ignores both of the Loop's conditions. So a Loop is accepted only if
the constants in the graph show that both are always true. IREE reads and writes a Scan forwards along axis 0, whatever
its attributes, and takes 1 for a dynamic size of its results.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from builders.onnx_graphs.bodies import list_bodies, opset_of, walk_nodes
from builders.onnx_graphs.rewriting import Scope, Writer, Writing, attributes_of, rewrite
from enginesmith.core.errors import ModelError
from enginesmith.core.requirements import numbers
from enginesmith.core.types import BuildRequest, Precision

if TYPE_CHECKING:
    import onnx

_RUNS_ON = "runs for its whole trip count even if its condition is false; give it a condition that is constantly true"
_SCAN_LISTS = ("scan_input_axes", "scan_input_directions", "scan_output_axes", "scan_output_directions")
# For others it computes tanh, or another slope.
_ACTIVATIONS = {b"Sigmoid", b"Tanh", b"Relu"}


def _loop(node: "onnx.NodeProto", scope: Scope) -> Iterator[str]:
    (body,) = list_bodies(node)
    if not scope.begins(node) or body.output[0].name not in scope.inside(body, node).true_names:
        yield _RUNS_ON


def _scan(node: "onnx.NodeProto", scope: Scope) -> Iterator[str]:
    """'REASON; REMEDY' for each way in which IREE gets a Scan wrong."""
    attributes = attributes_of(node)
    for name in _SCAN_LISTS:
        if any(attributes.get(name, ())):
            yield f"ignores {name} and runs forward along axis 0; reverse or transpose the tensor outside of the Scan"
    state_count = len(node.input) - attributes["num_scan_inputs"]
    for name in filter(None, node.output[state_count:]):
        if (sizes := scope.sizes(name)) is None or None in sizes:
            yield f"collects {name}, whose dynamic size is taken for 1; export the model with fixed sizes"


def _flattens(node: "onnx.NodeProto", scope: Scope) -> Iterator[str]:
    sizes, axis = scope.sizes(node.input[0]), attributes_of(node).get("axis", 1)
    if scope.opset < 13 and (sizes is None or axis not in (-1, len(sizes) - 1)):
        yield "is computed along one axis, as opset 13 defines it; export the model with opset 13 or later"


def _find_unsigned(node: "onnx.NodeProto", scope: Scope) -> Iterator[str]:
    kind = scope.dtype(node.input[0])
    if kind is not None and kind.kind == "u":
        yield f"reads {kind.name} as signed numbers; cast {node.input[0]} to a wider signed type before it"


def _recurrent(node: "onnx.NodeProto", scope: Scope) -> Iterator[str]:
    attributes = attributes_of(node)
    lengths_name, peepholes = (node.input[index] if len(node.input) > index else "" for index in (4, 7))
    if lengths_name:
        array, sizes = scope.array(lengths_name), scope.sizes(node.input[0])
        if array is None or sizes is None or array.tolist() != [sizes[0]] * array.size:
            yield "ignores sequence_lens; mask the sequences in the model"
    if peepholes:
        yield "ignores its peephole weights; export the model without them"
    if "clip" in attributes:
        yield "ignores clip; export the model without it"
    if other_names := [name.decode() for name in attributes.get("activations", ()) if name not in _ACTIVATIONS]:
        yield f"computes another activation than {other_names[0]}; use Sigmoid, Tanh or Relu"


def _average(node: "onnx.NodeProto", scope: Scope) -> Iterator[str]:
    """'REASON; REMEDY' for an AveragePool with ceil_mode whose windows end beyond the padding, or begin behind the last
    entry."""
    attributes = attributes_of(node)
    if not attributes.get("ceil_mode") or attributes.get("auto_pad", b"NOTSET") != b"NOTSET":
        return
    kernel = np.array(attributes["kernel_shape"])
    ones = [1] * kernel.size
    pads = np.array(attributes.get("pads", [0, 0] * kernel.size)).reshape(2, -1)
    windows = (kernel - 1) * attributes.get("dilations", ones) + 1
    strides = np.array(attributes.get("strides", ones))
    sizes = (scope.sizes(node.input[0]) or [None] * (kernel.size + 2))[2:]
    # how far the last window reaches beyond the padding; a whole window beyond the entries is none
    inner_widths = windows - pads[1]
    overhangs = [
        min(stride, space) - 1 if size is None else -(size + sum(pad) - window) % stride
        for size, pad, window, stride, space in zip(sizes, pads.T, windows, strides, inner_widths, strict=True)
    ]
    if max(overhangs) > (0 if attributes.get("count_include_pad") else 1):
        yield "divides by too much where windows reach beyond the padding (ceil_mode); pad in the model instead"
    elif any(overhang and overhang >= space for overhang, space in zip(overhangs, inner_widths, strict=True)):
        yield "keeps windows that begin behind the last entry (ceil_mode) and must be left out; pad in the model"


def _pad(node: "onnx.NodeProto", scope: Scope) -> Iterator[str]:
    if attributes_of(node).get("mode") == b"wrap":
        yield "compiles without end in mode wrap; write it as slices and Concat"
    amounts = scope.array(node.input[1]) if len(node.input) > 1 else None
    is_reflected = attributes_of(node).get("mode") == b"reflect"  # of these it gets the ends right
    if amounts is not None and (amounts[: amounts.size // 2 if is_reflected else None] < 0).any():
        yield "reads wrong elements if an amount is negative; crop with Slice"


def _quantized_product(node: "onnx.NodeProto", scope: Scope) -> Iterator[str]:
    ranks = [scope.sizes(node.input[index]) for index in (0, 3)]
    if any(sizes is None or len(sizes) > 2 for sizes in ranks):
        yield "is computed wrongly in batches; use DequantizeLinear, MatMul and QuantizeLinear"


def _sampled(node: "onnx.NodeProto", scope: Scope) -> Iterator[str]:
    if _is_gathered(node, scope):
        yield "interpolates otherwise"


def _sampled_nearest(node: "onnx.NodeProto", scope: Scope) -> Iterator[str]:
    mode = _interpolation(node)
    if scope.opset >= 20 and mode != "nearest" and not _is_gathered(node, scope):
        yield f"takes the nearest pixel in place of {mode} interpolation; export the model with opset 18"


def _is_gathered(node: "onnx.NodeProto", scope: Scope) -> bool:
    """Whether `gather_samples` writes a GridSample: linear, of images, within their borders or with zeros around."""
    sizes, padding = scope.sizes(node.input[0]), attributes_of(node).get("padding_mode", b"zeros")
    return _interpolation(node) == "linear" and sizes is not None and len(sizes) == 4 and padding != b"reflection"


def _interpolation(node: "onnx.NodeProto") -> str:
    """'linear', 'cubic' or 'nearest': opset 20 has other names than 16."""
    return str(attributes_of(node).get("mode", b"linear").decode()).removeprefix("bi")


def _summed(node: "onnx.NodeProto", scope: Scope) -> Iterator[str]:
    """'REASON; REMEDY' for a CumSum if the model has another one along another axis, or with other attributes."""

    def how(other_node: "onnx.NodeProto") -> tuple[object, ...]:
        axis, attributes = scope.array(other_node.input[1]), attributes_of(other_node)
        return axis if axis is None else int(axis.ravel()[0]), *(attributes.get(n, 0) for n in ("exclusive", "reverse"))

    if any(other_node.op_type == "CumSum" and how(other_node) != how(node) for other_node in scope.nodes):
        yield "is summed with the axis and attributes of another CumSum; write one as MatMul with a triangular matrix"


def _transposed(softmax: "onnx.NodeProto", scope: Scope) -> Iterator[str]:
    for name in _attended(softmax, scope):
        producer = scope.makers.get(name)
        if producer is not None and producer.op_type == "Transpose" and producer.input[0] in scope.inputs:
            yield f"reads {producer.input[0]!r} without its Transpose; transpose it outside of the model"


def _fused(softmax: "onnx.NodeProto", scope: Scope) -> Iterator[str]:
    if _attended(softmax, scope):
        yield "is fused with the MatMuls around it into one kernel, which is wrong for some networks"


def _attended(softmax: "onnx.NodeProto", scope: Scope) -> tuple[str, ...]:
    """Inputs of the MatMuls around a Softmax: names of queries, keys and values; empty for other patterns."""
    product = _product_above(softmax.input[0], scope, 6)
    product_nodes = [step for step in scope.nodes if step.op_type == "MatMul" and step.input[0] == softmax.output[0]]
    return (*product.input, product_nodes[0].input[1]) if product is not None and product_nodes else ()


def _product_above(name: str, scope: Scope, depth: int) -> "onnx.NodeProto | None":
    producer = scope.makers.get(name)
    if producer is None or producer.op_type == "MatMul":
        return producer
    if not depth or producer.op_type not in ("Add", "Cast", "Div", "Mul", "Sub", "Where"):
        return None
    return next(filter(None, (_product_above(input_name, scope, depth - 1) for input_name in producer.input)), None)


def _resized(node: "onnx.NodeProto", scope: Scope) -> Iterator[str]:
    producer = scope.makers.get(node.input[0])
    if_node = producer is not None and producer.op_type == "Transpose" and scope.makers.get(producer.input[0])
    if if_node and if_node.op_type == "If":
        yield "gets wrong values from the If and the Transpose before it; transpose in both branches of the If"


def _integers(node: "onnx.NodeProto", scope: Scope) -> Iterator[str]:
    codes = node.input[0]
    if codes in scope.arrays and scope.dtype(codes) == np.int32 and len(scope.sizes(codes) or ()) < 2:
        yield "dequantizes int32"


def dequantize_integers(write: Writer, scope: Scope) -> "list[onnx.NodeProto] | None":
    """The nodes or the constant that replace a DequantizeLinear of an int32 constant of rank 0 or 1 (a bias); None for
    other nodes."""
    from onnx import TensorProto, helper, numpy_helper

    if not any(_integers(write.node, scope)):
        return None
    names = [name for name in write.node.input if name]
    if not scope.arrays.keys() >= {*names}:
        codes = write("Sub", names[0], names[2]) if names[2:] else names[0]
        kind = helper.np_dtype_to_tensor_dtype(scope.dtype(names[1]) or np.dtype(np.float32))
        # As DequantizeLinear does: fp16 ends at 65504, and codes do not.
        factors = [write("Cast", name, to=TensorProto.FLOAT) for name in (codes, names[1])]
        write.last("Cast", [write("Mul", *factors)], write.node.output, to=kind)
        return write.nodes
    codes, scale, *zero_points = (np.asarray(scope.array(name)) for name in names)
    values = ((codes - sum(zero_points)) * scale).astype(scale.dtype).reshape(codes.shape)
    write.last("Constant", [], write.node.output, value=numpy_helper.from_array(values))
    return write.nodes


def _shifted(node: "onnx.NodeProto", scope: Scope) -> Iterator[str]:
    kind = scope.dtype(node.input[0] if node.op_type == "DequantizeLinear" else node.output[0])
    zero_points = scope.array(node.input[2]) if len(node.input) > 2 and kind != np.int32 else None
    is_shifted = zero_points is not None and zero_points.astype(np.float32).any()
    if kind is not None and (is_shifted or "uint" in kind.name):
        yield f"has {'other zero points than 0' if is_shifted else kind.name}; quantize to symmetric int8"


def _always(words: str) -> "Rule":
    def rule(node: "onnx.NodeProto", scope: Scope) -> Iterator[str]:  # noqa: ARG001 - as all rules
        yield words

    return rule


def gather_samples(write: Writer, scope: Scope) -> "list[onnx.NodeProto] | None":
    """The nodes that replace a linear GridSample of images: they gather the four pixels around each point, and
    interpolate in float32. None for other nodes, and with reflected borders.

    The pixels of [N, C, H, W] become rows of [N, H * W, C]; GatherND reads one row per point.
    """
    from onnx import TensorProto

    attributes, (image, grid) = attributes_of(write.node), write.node.input
    if not _is_gathered(write.node, scope):
        return None
    points = write("Cast", grid, to=TensorProto.FLOAT)
    shape, zero, unit = write("Shape", image), write.constant(np.float32(0)), write.constant(np.float32(1))
    axis_pixels = []
    for column, axis in enumerate((3, 2)):
        coordinate = write("Gather", points, write.constant(np.int64(column)), axis=3)
        coordinate = write("Reshape", coordinate, write.constant(np.array([0, -1, 1])))
        size = write("Cast", write("Gather", shape, write.constant(np.int64(axis))), to=TensorProto.FLOAT)
        last_index, half = write("Sub", size, unit), write.constant(np.float32(0.5))
        if attributes.get("align_corners"):
            coordinate = write("Mul", write("Mul", write("Add", coordinate, unit), half), last_index)
        else:
            coordinate = write("Mul", write("Sub", write("Mul", write("Add", coordinate, unit), size), unit), half)
        if attributes.get("padding_mode") == b"border":
            coordinate = write("Min", write("Max", coordinate, zero), last_index)
        floor = write("Floor", coordinate)
        fraction = write("Sub", coordinate, floor)
        pixels = []
        for pixel, weight in ((floor, write("Sub", unit, fraction)), (write("Add", floor, unit), fraction)):
            clipped_pixel = write("Min", write("Max", pixel, zero), last_index)
            weight = write("Mul", weight, write("Cast", write("Equal", pixel, clipped_pixel), to=TensorProto.FLOAT))
            number = write("Where", write("IsNaN", clipped_pixel), zero, clipped_pixel)
            pixels.append((write("Cast", number, to=TensorProto.INT64), weight))
        axis_pixels.append(pixels)
    rows = write("Transpose", write("Reshape", image, write.constant(np.array([0, 0, -1]))), perm=[0, 2, 1])
    width, total = write("Gather", shape, write.constant(np.int64(3))), ""
    for y_index, y_weight in axis_pixels[1]:
        for x_index, x_weight in axis_pixels[0]:
            row = write("Add", write("Mul", y_index, width), x_index)
            pixel = write("Cast", write("GatherND", rows, row, batch_dims=1), to=TensorProto.FLOAT)
            term = write("Mul", pixel, write("Mul", y_weight, x_weight))
            total = write("Add", total, term) if total else term
    lead_sizes = write("Gather", shape, write.constant(np.array([0, 1])))
    tail_sizes = write("Gather", write("Shape", grid), write.constant(np.array([1, 2])))
    samples = write(
        "Reshape", write("Transpose", total, perm=[0, 2, 1]), write("Concat", lead_sizes, tail_sizes, axis=0)
    )
    kind = scope.types[image].elem_type if image in scope.types else TensorProto.FLOAT
    write.last("Cast", [samples], list(write.node.output), to=kind)
    return write.nodes


Rule = Callable[["onnx.NodeProto", Scope], Iterator[str]]


@dataclass(frozen=True)
class KnownFault:
    """A row. find: gives 'REASON; REMEDY' for each fault of a node of type `operator`.

    compilers: backend -> the first and the last version with a report of the fault; '' is no bound.
    source: public threads, or how it was found.  write: makes the nodes that replace it; None: it is refused or noted.
    generations: the reported ones.  precisions: those that can have the fault.  () means all.
    mended_in: backend -> the first version that was seen to compile the node correctly.
    name: the row's name in messages.  note_only: whether the engine is still built, with a note.
    """

    name: str
    operator: str
    compilers: Mapping[str, tuple[str, str]]
    source: str
    find: Rule
    write: Writing | None = None
    note_only: bool = False
    generations: tuple[str, ...] = ()
    precisions: tuple[Precision, ...] = ()
    mended_in: Mapping[str, str] = field(default_factory=dict)

    def versions(self, compiler: str) -> str:
        """'tensorrt 10.8 to 10.11'."""
        low, high = self.compilers[compiler]
        version_range = low if low == high else f"{low} to {high}" if low else f"up to {high}"
        return f"{compiler} {version_range if low or high else 'of unknown versions'}"


_HALF: tuple[Precision, ...] = ("fp16", "bf16")
_TRT = "https://github.com/NVIDIA/TensorRT/issues"
_RUN = "ONNX's node tests, run with IREE 3.13"
_IREE: tuple[tuple[str, Rule], ...] = (
    ("AveragePool", _average),
    ("Det", _always("divides by zero where an entry of the diagonal comes to 0; compute the determinant outside")),
    ("Div", _find_unsigned),
    ("GRU", _recurrent),
    ("GridSample", _always("reads wrong pixels for points far outside of the image; sample outside of the model")),
    ("Hardmax", _flattens),
    ("LSTM", _recurrent),
    ("Loop", _loop),
    ("MaxPool", _find_unsigned),
    ("Mod", _find_unsigned),
    ("Pad", _pad),
    ("QLinearMatMul", _quantized_product),
    ("RNN", _recurrent),
    ("Scan", _scan),
    ("TopK", _find_unsigned),
)
# ONNX's operators of which TensorRT for RTX 1.7.1 parsed no node test.
_UNREAD = (
    "AffineGrid Bernoulli BitShift BitwiseAnd BitwiseNot BitwiseOr BitwiseXor CenterCropPad Col2Im Compress "
    "ConvInteger CumProd DFT DeformConv Det DynamicQuantizeLinear ImageDecoder MatMulInteger MaxUnpool MelWeightMatrix "
    "NonZero QLinearConv QLinearMatMul RoiAlign SplitToSequence TfIdfVectorizer Unique"
)
_WORDS = "is not read by its parser; compute it outside of the model"
# A change of `write`, or of the rows that have it, makes other engines: raise the backend's `revision`.
FAULTS: tuple[KnownFault, ...] = (
    KnownFault("linear-grid-sample", "GridSample", {"tensorrt": ("10.13.3", "11.1"), "tensorrt-rtx": ("", "")},
               f"{_TRT}/4813, https://github.com/pytorch/TensorRT/issues/4074, "
               "https://github.com/jamjamjon/usls/pull/261", _sampled, gather_samples),
    # mended: the layer that the parser of RTX 1.7.1 makes says linear, or cubic
    KnownFault("nearest-grid-sample", "GridSample", {"tensorrt": ("10.13.3", "11.1"), "tensorrt-rtx": ("1.5", "1.5")},
               f"{_TRT}/4646, https://github.com/onnx/onnx-tensorrt/pull/1060", _sampled_nearest,
               mended_in={"tensorrt-rtx": "1.7"}),
    KnownFault("two-cumsums", "CumSum", {"tensorrt": ("10.8", "10.11")}, f"{_TRT}/4551, {_TRT}/4513", _summed),
    KnownFault("transposed-input", "Softmax", {"tensorrt": ("11.2", "11.2")}, f"{_TRT}/4826", _transposed,
               precisions=_HALF),
    KnownFault("resized-choice", "Resize", {"tensorrt": ("11.1", "11.2")}, f"{_TRT}/4846", _resized,
               generations=("sm_75", "sm_86")),
    KnownFault("fused-attention", "Softmax", {"tensorrt": ("", "10.16")}, f"{_TRT}/4837", _fused, note_only=True,
               generations=("sm_120",), precisions=_HALF),
    KnownFault("int32-codes", "DequantizeLinear", {"tensorrt": ("", ""), "tensorrt-rtx": ("", "")},
               "https://github.com/onnx/onnx-tensorrt/issues/850", _integers, dequantize_integers),
    *(KnownFault(f"shifted-{operator}", operator, {"tensorrt": ("", ""), "tensorrt-rtx": ("", "")},
                 f"{_TRT}/2774, {_TRT}/4698", _shifted) for operator in ("QuantizeLinear", "DequantizeLinear")),
    *(KnownFault(f"iree-{operator}", operator, {"iree": ("", "")}, _RUN, rule) for operator, rule in _IREE),
    *(KnownFault(f"rtx-{operator}", operator, {"tensorrt-rtx": ("1.7", "1.7")}, "ONNX's node tests, parsed by 1.7.1",
                 _always(_WORDS)) for operator in _UNREAD.split()),
)  # fmt: skip
BY_NAME = {fault.name: fault for fault in FAULTS}
COMPILERS = frozenset(compiler for fault in FAULTS for compiler in fault.compilers)


def find_faults(model: "onnx.ModelProto", compiler: str) -> Iterator[tuple[KnownFault, "onnx.NodeProto", str]]:
    """A compiler's rows and their nodes, in inner graphs too, with 'REASON; REMEDY'. model: with inferred shapes."""
    rows: dict[str, list[KnownFault]] = {}
    for fault in FAULTS:
        if compiler in fault.compilers:
            rows.setdefault(fault.operator, []).append(fault)

    def walk(graph: "onnx.GraphProto", scope: Scope) -> Iterator[tuple[KnownFault, "onnx.NodeProto", str]]:
        for node in graph.node:
            for fault in rows.get(node.op_type, ()) if node.domain in ("", "ai.onnx") else ():
                yield from ((fault, node, message) for message in fault.find(node, scope))
            for body in list_bodies(node):
                yield from walk(body, scope.inside(body, node))

    return walk(model.graph, Scope(opset_of(model)).inside(model.graph))


@dataclass(frozen=True)
class Verdict:
    """The result of checking a graph for one compiler. refusal: why it cannot be built; None if it can.

    notes: the replaced nodes, and remarks.  written: names of the rows whose nodes are replaced.
    """

    refusal: str | None = None
    notes: tuple[str, ...] = ()
    written: frozenset[str] = frozenset()


def judge_faults(findings: Iterable[tuple[str, str]], request: BuildRequest) -> Verdict:
    """The verdict on a graph. findings: names of rows, each with "node 'x' (Operator) REASON; REMEDY"."""
    reasons_by_row, refusals, notes, written_names = dict[str, list[str]](), list[str](), list[str](), set[str]()
    for name, reason in findings:
        reasons_by_row.setdefault(name, []).append(reason)
    for name, (reason, *other_names) in reasons_by_row.items():
        fault = BY_NAME[name]
        if (is_reported := _is_reported(fault, request)) is None:
            continue
        count_text = f", and {len(other_names)} more like it" if other_names else ""
        source_text = f"{count_text} (reported of {fault.versions(request.backend)}: {fault.source})"
        if fault.write:
            written_names.add(name)
            notes.append(f"{reason} and is written as other operators{source_text}")
        elif fault.note_only or not is_reported:
            notes.append(f"{reason}: only a proof on {request.target.sm} shows it{source_text}")
        else:
            refusals.append(f"{reason}{source_text}")
    return Verdict(refusals[0] if refusals else None, tuple(notes), frozenset(written_names))


def _is_reported(fault: KnownFault, request: BuildRequest) -> bool | None:
    """Whether a fault was reported for the request's compiler version and GPU; None if the request cannot have it."""
    low, high = (numbers(version) for version in fault.compilers[request.backend])
    release = max((numbers(text) for name, text in request.toolchain if name.startswith(request.backend)), default=())
    mended_version = numbers(fault.mended_in.get(request.backend, ""))
    if (release and release < low) or (release and mended_version and release >= mended_version):
        return None
    if fault.precisions and request.precision not in fault.precisions:
        return None
    is_affected = not (release and high) or release[: len(high)] <= high
    return is_affected and (not fault.generations or request.target.sm in fault.generations)


def list_faults(path: Path, compiler: str) -> list[tuple[str, str]]:
    """(name of the row, "node 'x' (Operator) REASON; REMEDY") of a compiler's known faults on a graph."""
    from onnx import shape_inference

    from builders.onnx_graphs.outline import load_outline

    operators = {fault.operator for fault in FAULTS if compiler in fault.compilers}
    model = load_outline(path)
    if not any(node.op_type in operators for node in walk_nodes(model.graph)):
        return []
    faults = find_faults(shape_inference.infer_shapes(model), compiler)
    return [(fault.name, f"node {node.name!r} ({node.op_type}) {message}") for fault, node, message in faults]


def without_faults(request: BuildRequest, path: Path, workdir: Path) -> tuple[Path, tuple[str, ...]]:
    """The path of the graph to compile, `path` or, if faulty nodes were replaced, WORKDIR/mended.onnx; and notes.
    Raises ModelError for a graph that the request's compiler is known to compile wrongly."""
    from onnx import shape_inference

    from builders.onnx_graphs.outline import write_graph
    from builders.onnx_graphs.weights import load_graph

    verdict = judge_faults(list_faults(path, request.backend), request)
    if verdict.refusal:
        raise ModelError(f"{request.backend} does not compile the model correctly: {verdict.refusal}")
    if not verdict.written:
        return path, verdict.notes
    model = shape_inference.infer_shapes(load_graph(path))
    rows = (BY_NAME[name] for name in verdict.written)
    rewrite(model.graph, opset_of(model), {fault.operator: fault.write for fault in rows if fault.write})
    write_graph(model, workdir / "mended.onnx")
    return workdir / "mended.onnx", verdict.notes
