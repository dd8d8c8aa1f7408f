"""Perturbed runs of a graph: each operator rounds as another correct kernel may round."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from builders.onnx_graphs.bodies import copied, lift, list_bodies, opset_of, set_items, walk_nodes
from enginesmith.arrays import Array
from enginesmith.core.types import Session, Tensors
from validation.limits.noise_floor import RANDOM

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto, NodeProto, TensorProto

    from enginesmith.core.types import Precision
    from validation.comparison.sessions import Opener

# Which ONNX operators round their results, and the types and ranks of a model's tensors.

# Operators that do not round, because their results are copied or exact.
COPIES = frozenset(
    (
        *("Abs", "ArgMax", "ArgMin", "BitShift", "Cast", "CastLike", "Ceil", "CenterCropPad", "Clip", "Compress"),
        *("Concat", "ConcatFromSequence", "Constant", "ConstantOfShape", "DepthToSpace", "DequantizeLinear"),
        *("DynamicQuantizeLinear", "Dropout", "Expand", "EyeLike", "Flatten", "Floor", "Gather", "GatherElements"),
        *("GatherND", "GlobalMaxPool", "Identity", "If", "Loop", "Max", "MaxPool", "MaxUnpool", "Min", "Neg"),
        *("NonMaxSuppression", "OneHot", "Optional", "OptionalGetElement", "Pad", "QuantizeLinear", "ReduceMax"),
        *("ReduceMin", "Relu", "Reshape", "ReverseSequence", "Round", "Scan", "Scatter", "ScatterElements"),
        *("ScatterND", "SequenceAt", "Shape", "Sign", "Size", "Slice", "SpaceToDepth", "Split", "SplitToSequence"),
        *("Squeeze", "Tile", "TopK", "Transpose", "Trilu", "Unique", "Unsqueeze", "Where"),
    )
)
# Operators that round each result once (IEEE 754-2019, 5.4.1), or not at all if they are fused.
CORRECT = frozenset(("Add", "Div", "Mul", "Sqrt", "Sub"))
# Operators that kernels compute from terms of about 1, with their absolute error in units of fp32's rounding (2^-24),
# even for results near zero. ONNX Runtime's Sigmoid is a rational function plus 0.5: its error is 2.8 units over
# -100 .. 30, and 2.3 for results below 0.001. Its Elu is exp(x) - 1. LSTM and GRU multiply by sigmoids.
OF_ONE = {"Sigmoid": 4, "LSTM": 4, "GRU": 4, "Elu": 1, "Selu": 1, "Celu": 1}
# SUMS: operators that are exact in any order of summation if all operands are whole numbers or halves, such as lengths
# and positions. STEPS: operators whose result changes by a step if such an operand is slightly less.
SUMS = CORRECT | frozenset(("Conv", "CumSum", "Einsum", "Gemm", "MatMul", "ReduceSum", "Sum"))
STEPS = frozenset(("Ceil", "Equal", "Floor", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Mod", "Round"))
# Operators whose float constants determine sizes.
SIZES = frozenset(("Range", "Resize"))
# Constants of at most this many elements may be shapes, which inference needs for the ranks of other tensors.
_SMALL = 256


def inline_functions(model: "ModelProto") -> "ModelProto":
    """A copy of the model in which functions are inlined."""
    from onnx.inliner import inline_local_functions

    return inline_local_functions(model) if model.functions else copied(model)


def types_of(model: "ModelProto") -> tuple[dict[str, int], dict[str, int]]:
    """ONNX's element type of each tensor, including graphs within nodes, and the known ranks, by name.

    Raises ValueError if inference does not find the type of a node's output.
    """
    from onnx import ModelProto, helper, shape_inference

    light_model = ModelProto(ir_version=model.ir_version, opset_import=model.opset_import)
    light_model.graph.CopyFrom(model.graph)
    del light_model.graph.initializer[:]
    for weight in model.graph.initializer:
        if math.prod(weight.dims) <= _SMALL:
            light_model.graph.initializer.append(weight)
        else:
            light_model.graph.input.append(helper.make_tensor_value_info(weight.name, weight.data_type, weight.dims))
    try:
        typed_model = shape_inference.infer_shapes(light_model)
    except shape_inference.InferenceError as error:
        raise ValueError(f"its types cannot be inferred: {str(error).splitlines()[0]}") from error
    types: dict[str, int] = {}
    ranks: dict[str, int] = {}
    _collect(typed_model.graph, types, ranks)
    return types, ranks


def _collect(graph: "GraphProto", types: dict[str, int], ranks: dict[str, int]) -> None:
    types |= {initializer.name: initializer.data_type for initializer in graph.initializer}
    for value in (*graph.input, *graph.value_info, *graph.output):
        if value.type.HasField("tensor_type"):
            types[value.name] = value.type.tensor_type.elem_type
            if value.type.tensor_type.HasField("shape"):
                ranks[value.name] = len(value.type.tensor_type.shape.dim)
    for node in graph.node:
        for body in list_bodies(node):
            _collect(body, types, ranks)
        for name in node.output:
            if name and name not in types and node.op_type != "Constant":
                raise ValueError(f"the type of {name!r}, which {node.op_type} makes, is not known")


# Rewriting of an ONNX graph to round like another kernel for the same graph.
#
# The graph is the one that ONNX Runtime runs for an engine: fp32 arithmetic, in which pairs of casts round to a 16-bit
# type (`pipeline.quantization.schemes.cast`) and pairs of QuantizeLinear and DequantizeLinear to a grid. Two more
# inputs control the rounding: SKIP, whether 16-bit roundings are left out, as in a kernel that keeps fp32 between fused
# operators; and FLIPS, the number of elements of each tensor that are quantized to the neighbouring grid point.

PREFIX = "rounding/"
SKIP, FLIPS = "rounding/skip", "rounding/flips"
# Relative error of each fp32 result, in units of rounding, for other kernels and orders of summation. 32 is about the
# margin of fp32 in `validation.limits.budget`, for the same reason; with grids it is less: integer kernels add exactly.
UNIT = 2.0**-24
MANY_UNITS, FEW_UNITS = 32, 8
# The error of requantization in fp32 as a share of a step of the grid, for values of up to 255 steps.
STEP = 255 * FEW_UNITS * UNIT / 2
# Results are clipped to this before they are perturbed: masks have fp32's lowest number, and a change could overflow.
_LARGE = 1e30
# Between these opsets ONNX Runtime's CPU draws random numbers.
_OPSET, _LAST_OPSET = 11, 21
_FLOAT, _HALVES = 1, {"fp16": 10, "bf16": 16}
# Constants are clipped to the range of the type that they are cast to, as in graphs that the pipeline casts.
_GREATEST = {10: 65504.0, 16: 3.3895314e38}
_QUANTIZE = ("QuantizeLinear", "DynamicQuantizeLinear")
_FP8, _INT4 = (17, 18, 19, 20), (21, 22)


class Nodes:
    """A list of nodes under construction; new nodes get unique names and seeds.

    numbers: the constants that new nodes read, for the outermost graph, by their bytes.
    """

    def __init__(self) -> None:
        self._nodes: list[NodeProto] = []
        self._constants: dict[str, TensorProto] = {}
        self.numbers: dict[bytes, TensorProto] = {}
        self._count = 0

    def constant(self, name: str) -> Array | None:
        """The value of a constant of the graphs; None for a tensor that is computed."""
        from builders.onnx_graphs.weights import to_array

        tensor = self._constants.get(name)
        return None if tensor is None else to_array(tensor)

    @contextmanager
    def collect(self, graph: "GraphProto") -> Iterator[None]:
        """Replace a graph's nodes by the nodes appended within the context; `constant` finds the graph's constants."""
        self._constants |= {initializer.name: initializer for initializer in graph.initializer}
        for node in graph.node:
            if node.op_type == "Constant" and node.attribute[0].name == "value":
                self._constants[node.output[0]] = node.attribute[0].t
        outer_nodes, self._nodes = self._nodes, []
        yield
        set_items(graph.node, self._nodes)
        self._nodes = outer_nodes

    def append(self, node: "NodeProto") -> None:
        """Append a node of the graph itself."""
        self._nodes.append(node)

    def add(self, op_type: str, *inputs: str, **attributes: Any) -> str:
        """Append a new node and return the name of its output."""
        from onnx import helper

        self._count += 1
        name = f"{PREFIX}{self._count}"
        self._nodes.append(helper.make_node(op_type, list(inputs), [name], name=name, **attributes))
        return name

    def rename(self, output: str) -> None:
        """Rename the output of the last node."""
        self._nodes[-1].output[0] = output

    def number(self, value: float | list[int] | Array) -> str:
        """The name of a constant with this value, int64 for a list, else float32; the constant is kept in `numbers`."""
        from onnx import numpy_helper

        array = np.asarray(value, np.int64 if isinstance(value, list) else np.float32)
        tensor = numpy_helper.from_array(array)
        constant = self.numbers.setdefault(tensor.SerializeToString(), tensor)
        constant.name = constant.name or f"{PREFIX}number {len(self.numbers)}"
        return str(constant.name)

    def draw(self, like: str, bound: float) -> str:
        """The name of a tensor of random numbers between -bound and bound, of the shape of `like`."""
        return self.add("RandomUniformLike", like, low=-bound, high=bound, seed=float(self._count))


def with_rounding(
    model: "ModelProto", half: "Precision | None" = None, activation_blocks: bool = False
) -> "ModelProto":
    """The model with two more inputs, SKIP (bool scalar) and FLIPS (float32 scalar), which control its roundings.

    Each run in a session draws new random numbers; a new session draws the same numbers again.
    half: 'fp16' or 'bf16', to which results, inputs and constants of an fp32 model are rounded.
    activation_blocks: whether products with weights in blocks round their activations to 8 bits, block by block, as
    ONNX Runtime's kernel does.
    Raises ValueError for operators that cannot be perturbed, and for operators that draw random numbers.
    """
    from onnx import TensorProto, helper

    copy = lift(inline_functions(model), _OPSET)
    if opset_of(copy) < _OPSET:
        raise ValueError(f"its opset is older than {_OPSET}, and onnx cannot convert it")
    _lower(copy)
    rounding = _Rounding(*types_of(copy), _HALVES.get(half or "", 0), activation_blocks)
    rounding.units = FEW_UNITS if any(node.op_type in _QUANTIZE for node in walk_nodes(copy.graph)) else MANY_UNITS
    rounding.counts = any(rounding.steps(node) for node in walk_nodes(copy.graph))
    for name, kind in ((SKIP, TensorProto.BOOL), (FLIPS, TensorProto.FLOAT)):
        copy.graph.input.append(helper.make_tensor_value_info(name, kind, []))
    rounding.rewrite(copy.graph)
    copy.graph.initializer.extend(rounding.numbers.values())
    del copy.graph.value_info[:]
    return copy


def _lower(model: "ModelProto") -> None:
    """Set the model's opset to at most `_LAST_OPSET`, in place, if that opset has all its operators, with as many
    inputs and all attributes."""
    from onnx import defs

    for node in walk_nodes(model.graph):
        if node.domain in ("", "ai.onnx"):
            if not defs.has(node.op_type, max_inclusive_version=_LAST_OPSET):
                return
            schema = defs.get_schema(node.op_type, max_inclusive_version=_LAST_OPSET)
            if (
                len(node.input) > schema.max_input
                or {entry.name for entry in node.attribute} - schema.attributes.keys()
            ):
                return
    for entry in model.opset_import:
        if entry.domain in ("", "ai.onnx"):
            entry.version = min(entry.version, _LAST_OPSET)


def traits(model: "ModelProto") -> tuple[bool, bool]:
    """Whether a model of `with_rounding` has 16-bit roundings, which read SKIP, and whether it has grids (FLIPS)."""
    inputs = {name for node in walk_nodes(model.graph) for name in node.input}
    return SKIP in inputs, FLIPS in inputs


class _Rounding(Nodes):
    """Rewrites a graph and the graphs within its nodes. half: the ONNX type to round to, 0 for none.

    types, ranks: of all tensors, as far as known.  units: the greatest change of results, in units of rounding.
    counts: whether a node makes steps of floats (`steps`); sums of whole numbers are then not perturbed.
    """

    def __init__(self, types: Mapping[str, int], ranks: Mapping[str, int], half: int, activation_blocks: bool) -> None:
        super().__init__()
        self._types, self._ranks, self._half, self._activation_blocks = types, ranks, half, activation_blocks
        self.units, self.counts = MANY_UNITS, False
        self._inputs: dict[str, str] = {}

    def steps(self, node: "NodeProto") -> bool:
        """Whether a node makes steps of floats: it rounds or compares them, or casts them to integers."""
        target_type = self._types.get(node.output[0], _FLOAT) if node.op_type == "Cast" else _FLOAT
        takes_floats = bool(node.input) and self._types.get(node.input[0]) == _FLOAT
        return takes_floats and (node.op_type in STEPS or target_type not in (_FLOAT, *_HALVES.values(), 11))

    def rewrite(self, graph: "GraphProto") -> None:
        """Add the roundings to a graph in place. Raises ValueError as `with_rounding` does."""
        producers = {name: node for node in graph.node for name in node.output}
        with self.collect(graph):
            for graph_input in graph.input if self._half else ():
                is_computed = graph_input.name != FLIPS and self.constant(graph_input.name) is None
                if is_computed and graph_input.type.tensor_type.elem_type == _FLOAT:
                    self._inputs[graph_input.name] = self._narrow(self._clip(graph_input.name, _GREATEST[self._half]))
            for node in graph.node:
                self._take(node, producers)

    def _take(self, node: "NodeProto", makers: Mapping[str, "NodeProto"]) -> None:
        if node.op_type in RANDOM:
            raise ValueError(f"{node.op_type} gives random results")
        for index, name in enumerate(node.input):
            node.input[index] = self._inputs.get(name, name)
        for body in list_bodies(node):
            self.rewrite(body)
        narrow_cast = makers.get(node.input[0]) if node.op_type == "Cast" else None
        if narrow_cast is not None and _casts_to(node, _FLOAT) and _casts_to(narrow_cast, *_HALVES.values()):
            name = node.output[0]
            node.output[0] = rounded_name = f"{name}/rounding"
            self.append(node)
            self.add("Where", SKIP, narrow_cast.input[0], rounded_name)
            self.rename(name)
        elif node.op_type == _QUANTIZE[1]:
            output, scale, zero_name = node.output
            node.output[0] = f"{output}/unmoved"
            self.append(node)
            self.add("QuantizeLinear", self._move(node.input[0], scale), scale, zero_name)
            self.rename(output)
        else:
            self._read(node, makers)
            self.append(node)
            if node.op_type not in COPIES:
                for index, name in enumerate(node.output):
                    if name and self._types.get(name) == _FLOAT:
                        self._perturb_rounding(node, index)

    def _read(self, node: "NodeProto", makers: Mapping[str, "NodeProto"]) -> None:
        """Perturb the inputs of a node."""
        if node.op_type == _QUANTIZE[0] and self.constant(node.input[0]) is None:
            node.input[0] = self._move(node.input[0], self._step(node))
        if node.op_type in ("Conv", "Gemm") and len(node.input) > 2:
            self._bias(node, 2, node, makers)
        for bias_index, operand in ((0, 1), (1, 0)) if node.op_type == "Add" else ():
            product = makers.get(node.input[operand])
            # Kernels compute MatMul and Add as one Gemm.
            if product is not None and product.op_type == "MatMul" and self._ranks.get(node.input[operand]) == 2:
                self._bias(node, bias_index, product, makers)
        if self._activation_blocks and node.op_type in ("Gemm", "MatMul"):
            self._blocks(node, makers)
        if self._half and node.op_type not in (*COPIES, *SIZES):
            for index, name in enumerate(node.input):
                if self._types.get(name) == _FLOAT and self.constant(name) is not None:
                    node.input[index] = self._narrow(self._clip(name, _GREATEST[self._half]))

    def _perturb_rounding(self, node: "NodeProto", index: int) -> None:
        name = node.output[index]
        node.output[index] = unrounded_name = f"{name}/unrounded"
        units = 1 if node.op_type in CORRECT else self.units
        size = self._clip(unrounded_name, _LARGE)
        if node.op_type in OF_ONE:
            size = self.add("Max", self.add("Abs", size), self.number(OF_ONE[node.op_type] / units))
        if self.counts and node.op_type in SUMS:
            sixteenths = self.add("Mul", size, self.number(16.0))
            fraction = self.add("Sub", sixteenths, self.add("Round", sixteenths))
            size = self.add("Mul", size, self.add("Abs", self.add("Sign", fraction)))
        sum_name = self.add(
            "Add", unrounded_name, self.add("Mul", size, self._draw(unrounded_name, name, units * UNIT))
        )
        if self._half:
            self._narrow(sum_name)
        self.rename(name)

    def _clip(self, name: str, bound: float) -> str:
        return self.add("Clip", name, self.number(-bound), self.number(bound))

    def _narrow(self, name: str) -> str:
        return self.add("Cast", self.add("Cast", name, to=self._half), to=_FLOAT)

    def _move(self, name: str, step: str) -> str:
        """The tensor, changed at random by up to a share of a step: about FLIPS elements are quantized otherwise.

        If elements are anywhere between two grid points, changes of up to e steps flip the share e / 2 of them. Zeros,
        as after Relu or in a mask, are grid points and do not flip; only the other elements are counted.
        """
        add, number = self.add, self.number
        nonzero_count = add("Max", add("ReduceL1", add("Sign", name), keepdims=0), number(1.0))
        flip_share = add("Max", add("Div", add("Mul", FLIPS, number(2.0)), nonzero_count), number(STEP))
        share = add("Mul", add("Min", flip_share, number(0.5)), step)
        return add("Add", name, add("Mul", self._draw(name, name, 1.0), share))

    def _draw(self, like: str, name: str, bound: float) -> str:
        """Random numbers that broadcast over the first axis of a tensor: drawing is the greatest cost of a run."""
        if self._ranks.get(name, 0) > 1:
            start, stop = self.number([0]), self.number([1])
            like = self.add("Slice", like, start, stop, start)
        return self.draw(like, bound)

    def _step(self, node: "NodeProto") -> str:
        """The distance of neighbouring points of a quantizer's grid; for float8 it is relative to the value."""
        if self._types.get(node.output[0]) in _FP8:
            return self.add("Mul", self.add("Abs", node.input[0]), self.number(0.125))
        scale = self.constant(node.input[1])
        if scale is None or scale.size != 1:
            raise ValueError(f"{node.name or node.op_type} rounds by a scale that is not one constant")
        return str(node.input[1])

    def _bias(self, node: "NodeProto", place: int, product: "NodeProto", makers: Mapping[str, "NodeProto"]) -> None:
        """Change an integer product's float bias by up to half a step of its sums: a kernel may add it as an integer.

        place: the index of the bias among the node's inputs.
        """
        scales = []
        for name in product.input[:2]:
            maker = _maker(makers, name)
            scales.append(self.constant(maker.input[1]) if maker and maker.op_type == "DequantizeLinear" else None)
        left, right = scales
        bias = self.constant(node.input[place])
        if left is None or right is None or bias is None or not {left.size, right.size} <= {1, bias.size}:
            return
        step = left.reshape(-1) * right.reshape(-1)
        draw_name = self.add("Mul", self.draw(node.input[place], 0.5), self.number(step))
        node.input[place] = self.add("Add", node.input[place], draw_name)

    def _blocks(self, node: "NodeProto", makers: Mapping[str, "NodeProto"]) -> None:
        """Round the activations of a product with weights in blocks to 8 bits, symmetrically, in the same blocks."""
        maker = _maker(makers, node.input[1])
        if maker is None or maker.op_type != "DequantizeLinear" or self._types.get(maker.input[0]) not in _INT4:
            return
        size = next(attr.i for attr in maker.attribute if attr.name == "block_size")
        blocks = self.add("Reshape", node.input[0], self.number([-1, size]))
        block_max = self.add("ReduceMax", self.add("Abs", blocks), self.number([1]))
        step = self.add("Max", self.add("Mul", block_max, self.number(1 / 127)), self.number(2.0**-126))
        rounded_name = self.add("Mul", self.add("Round", self.add("Div", blocks, step)), step)
        node.input[0] = self.add("Reshape", rounded_name, self.add("Shape", node.input[0]))


def _maker(makers: Mapping[str, "NodeProto"], name: str) -> "NodeProto | None":
    """The node that computes a tensor, before any casts."""
    maker = makers.get(name)
    return _maker(makers, maker.input[0]) if maker is not None and maker.op_type == "Cast" else maker


def _casts_to(node: "NodeProto", *kinds: int) -> bool:
    return node.op_type == "Cast" and any(attr.name == "to" and attr.i in kinds for attr in node.attribute)


# Sessions of graphs that round like other kernels, controlled by `SKIP` and `FLIPS` at each call.


@dataclass(frozen=True)
class Perturbed:
    """A session with the inputs SKIP and FLIPS beside the model's. halves: whether its graph rounds to 16 bits.
    grids: whether its graph quantizes tensors."""

    session: Session
    halves: bool
    grids: bool


@contextmanager
def perturb_graph(
    graph: Path, opener: "Opener", workdir: Path, half: "Precision | None" = None, activation_blocks: bool = False
) -> Iterator[Perturbed]:
    """Open a graph with perturbed rounding. opener: opens an ONNX file without rewriting it.  workdir: for that file.
    half, activation_blocks: as in `with_rounding`. Raises as `with_rounding`."""
    from builders.onnx_graphs.outline import write_graph
    from builders.onnx_graphs.weights import load_graph

    path = workdir / "rounding.onnx"
    model = with_rounding(load_graph(graph), half, activation_blocks)
    write_graph(model, path)
    has_halves, has_grids = traits(model)
    with opener(path) as session:
        yield Perturbed(session, has_halves or half is not None, has_grids)


@contextmanager
def perturb_chain(
    opener: Callable[[Mapping[str, Session]], AbstractContextManager[Session]], graphs: Mapping[str, Perturbed]
) -> Iterator[Perturbed]:
    """A chain of perturbed graphs as a single one. opener: opens the chain with the given sessions as its graphs."""
    controls = dict[str, Array]()
    with opener({name: _Controlled(graph.session, controls) for name, graph in graphs.items()}) as chain:
        has_halves = any(graph.halves for graph in graphs.values())
        has_grids = any(graph.grids for graph in graphs.values())
        yield Perturbed(_Controls(chain, controls), has_halves, has_grids)


class _Controlled(Session):
    """A graph of a chain that gets SKIP and FLIPS from `controls`, by name, and not from its inputs."""

    def __init__(self, session: Session, controls: Mapping[str, Array]) -> None:
        self.inputs = [spec for spec in session.inputs if spec.name not in (SKIP, FLIPS)]
        self.outputs = session.outputs
        self._session, self._controls = session, controls

    def run(self, inputs: Tensors) -> dict[str, Array]:
        """Run the graph with SKIP and FLIPS added to its inputs."""
        return self._session.run({**inputs, **self._controls})


class _Controls(Session):
    """A chain of `_Controlled` graphs with the inputs SKIP and FLIPS. controls: receives the two for the graphs."""

    def __init__(self, chain: Session, controls: dict[str, Array]) -> None:
        self.inputs, self.outputs = chain.inputs, chain.outputs
        self._chain, self._controls = chain, controls

    def run(self, inputs: Tensors) -> dict[str, Array]:
        """Move SKIP and FLIPS from the inputs to `controls`, and run the chain."""
        model_inputs = dict(inputs)
        self._controls.update({name: model_inputs.pop(name) for name in (SKIP, FLIPS)})
        return self._chain.run(model_inputs)
