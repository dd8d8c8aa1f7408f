"""Faults as changes of any graph in any precision: what an engine computes that was built from another model.

Each returns the changed copy and where the fault is, or None where the graph has no place for it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper, shape_inference

from enginesmith.core.types import Precision
from tests.faults.nets import COUNTED, add_constants, after, put_nodes
from tests.validation.attribution.planted import copy_of, weight, with_attribute, with_weight

# The changed model, and the nodes of which one must be blamed: none where the fault is in no single one.
Planted = tuple[ModelProto, tuple[str, ...]] | None
FLOATS: tuple[Precision, ...] = ("fp32", "fp16")
ALL: tuple[Precision, ...] = ("fp32", "fp16", "int8", "int8-dynamic")
# Where the output's channels are in the weight of an operator.
CHANNELS = {"MatMul": -1, "MatMulInteger": -1, "Gemm": -1, "Conv": 0, "GRU": 1}


@dataclass(frozen=True)
class Plant:
    """A fault. change: of a graph, with a generator to choose a place by.  precisions: it exists in."""

    name: str
    change: Callable[[ModelProto, np.random.Generator], Planted]
    precisions: tuple[Precision, ...] = ALL


def sources(model: ModelProto) -> dict[str, NodeProto]:
    """Which node makes a tensor."""
    return {name: node for node in model.graph.node for name in node.output}


def weighted(model: ModelProto) -> list[tuple[NodeProto, str]]:
    """Nodes with a weight of two dims or more, and its initializer, maybe behind a DequantizeLinear or a cast."""
    makers, ranks = sources(model), {item.name: len(item.dims) for item in model.graph.initializer}
    items = []
    for node in model.graph.node:
        for name in node.input[:2] if node.op_type in CHANNELS else ():
            while name in makers and makers[name].op_type in ("DequantizeLinear", "Cast", "Transpose"):
                name = makers[name].input[0]
            if ranks.get(name, 0) >= 2 and not any(name == other_item for _, other_item in items):
                items.append((node, name))
    return items


def of(node: NodeProto) -> str:
    """The name of the original's node that a node of a quantized graph belongs to."""
    return node.name.partition("/")[0]


def swapped(model: ModelProto, rng: np.random.Generator) -> Planted:
    node, name = _drawn(weighted(model), rng)
    values = np.moveaxis(weight(model, name).copy(), CHANNELS[node.op_type], 0)
    choice, other_choice = rng.choice(len(values), 2, replace=False)
    values[[choice, other_choice]] = values[[other_choice, choice]]
    return with_weight(model, name, np.moveaxis(values, 0, CHANNELS[node.op_type])), (of(node),)


def without_bias(model: ModelProto, rng: np.random.Generator) -> Planted:
    """A bias of zeros: of an Add, or the third input of a convolution or Gemm."""
    makers, constants = sources(model), {item.name for item in model.graph.initializer}
    items = []
    for node in model.graph.node:
        place = {"Add": 1, "Conv": 2, "Gemm": 2}.get(node.op_type, 9)
        name = node.input[place] if place < len(node.input) else ""
        if name in makers and makers[name].op_type == "DequantizeLinear":
            name = makers[name].input[0]
        if name in constants and weight(model, name).ndim == 1 and np.abs(weight(model, name)).max() > 0:
            items.append((node, name))
    if not items:
        return None
    node, name = _drawn(items, rng)
    return with_weight(model, name, np.zeros_like(weight(model, name))), (of(node),)


def epsilon(model: ModelProto, rng: np.random.Generator) -> Planted:
    node = next((node for node in model.graph.node if node.op_type == "LayerNormalization"), None)
    return node and (with_attribute(model, node.output[0], epsilon=1e-3), (of(node),))


def tanh_gelu(model: ModelProto, rng: np.random.Generator) -> Planted:
    """Hendrycks and Gimpel's approximation of GELU by tanh in place of the erf."""
    node = next((node for node in model.graph.node if node.op_type == "Erf"), None)
    if node is None:
        return None
    kind = element_type(model, node.output[0])
    text = f"z = Cast<to=1>({node.input[0]}) sq = Mul(z, z) cube = Mul(sq, k_0_0894) more = Add(cube, k_1) "
    text += f"wide = Mul(z, more) arg = Mul(wide, k_1_128379) t = Tanh(arg) {node.output[0]} = Cast<to={kind}>(t)"
    return after(model, node.output[0], text), (of(node),)


def rounded_weights(bits: int) -> Callable[[ModelProto, np.random.Generator], Planted]:
    """All weights with so many bits of mantissa, as TF32 (10 bits) has them: rounded to nearest."""

    def change(model: ModelProto, rng: np.random.Generator) -> Planted:
        for _, name in weighted(model):
            raw_view = weight(model, name).astype(np.float32).view(np.uint32).astype(np.uint64)
            rounded_bits = (raw_view + (1 << (22 - bits))) >> (23 - bits) << (23 - bits)
            model = with_weight(model, name, rounded_bits.astype(np.uint32).view(np.float32))
        return model, ()

    return change


def channel(change_of: Callable[[np.ndarray], np.ndarray]) -> Callable[[ModelProto, np.random.Generator], Planted]:
    """The least channel of an output's last node, changed: behind it, in float."""

    def change(model: ModelProto, rng: np.random.Generator) -> Planted:
        node, name = weighted(model)[-1]
        values = np.moveaxis(weight(model, name).copy(), CHANNELS[node.op_type], 0)
        if node.op_type == "GRU":
            return None
        least_index = int(np.argmin(np.abs(values.reshape(len(values), -1)).sum(1)))
        values[least_index] = change_of(values[least_index].astype(np.float64)).astype(values.dtype)
        return with_weight(model, name, np.moveaxis(values, 0, CHANNELS[node.op_type])), (of(node),)

    return change


def behind(text: str) -> Callable[[ModelProto, np.random.Generator], Planted]:
    """Nodes behind the output, which they read as `was` and make again."""

    def change(model: ModelProto, rng: np.random.Generator) -> Planted:
        output = model.graph.output[0].name
        counted_text = COUNTED.replace("Shape(x)", f"Shape({model.graph.input[0].name})")
        shape = [1] * len(model.graph.output[0].type.tensor_type.shape.dim)
        message = text.replace("COUNTED", counted_text).replace("OUT", output)
        changed_text = after(model, output, message)
        if "COLUMN" in message:
            add_constants(changed_text, {"COLUMN": np.array([-1, *shape[1:]])})
        return changed_text, ()

    return change


def slice_ruined(model: ModelProto, rng: np.random.Generator) -> Planted:
    """The scores of a detector, halved, beside boxes of 640 pixels."""
    node = next((node for node in model.graph.node if node.op_type == "Split"), None)
    if node is None:
        return None
    copied_model, tensor = copy_of(model), node.output[1]
    maker = next(item for item in copied_model.graph.node if tensor in item.output)
    maker.output[1] = f"{tensor}/whole"
    half_array = np.asarray(0.5, np.float16 if element_type(model, tensor) == TensorProto.FLOAT16 else np.float32)
    add_constants(copied_model, {"planted/half": half_array})
    added_node = helper.make_node("Mul", [f"{tensor}/whole", "planted/half"], [tensor], name="Mul_planted")
    put_nodes(copied_model, maker, [maker, added_node])
    return copied_model, ()


def element_type(model: ModelProto, tensor: str) -> int:
    """ONNX's number of a tensor's type."""
    inferred_graph = shape_inference.infer_shapes(model).graph
    values = (*inferred_graph.input, *inferred_graph.value_info, *inferred_graph.output)
    return next((item.type.tensor_type.elem_type for item in values if item.name == tensor), TensorProto.FLOAT)


def activations(model: ModelProto) -> list[NodeProto]:
    """The DequantizeLinear nodes of activations."""
    makers = sources(model)
    return [n for n in model.graph.node if n.op_type == "DequantizeLinear" and n.input[0] in makers]


def readers(model: ModelProto, tensor: str) -> list[NodeProto]:
    return [node for node in model.graph.node if tensor in node.input]


def zero_point(by: int) -> Callable[[ModelProto, np.random.Generator], Planted]:
    """An engine that takes off another zero point than was added."""

    def change(model: ModelProto, rng: np.random.Generator) -> Planted:
        if not (nodes := activations(model)):
            return None
        node = _drawn(nodes, rng)
        zero = weight(model, node.input[2])
        limits = np.iinfo(zero.dtype)
        moved_number = int(zero) + by if int(zero) + by <= limits.max else int(zero) - by
        other_nodes = readers(model, node.output[0])
        return _with_input(model, node, 2, np.asarray(moved_number, zero.dtype)), (node.name, *map(of, other_nodes))

    return change


def scales(factor: float) -> Callable[[ModelProto, np.random.Generator], Planted]:
    """All activations' scales are wrong where they are taken off."""

    def change(model: ModelProto, rng: np.random.Generator) -> Planted:
        for node in activations(model):
            model = _with_input(model, node, 1, (weight(model, node.input[1]) * np.float32(factor)))
        return (model, ()) if activations(model) else None

    return change


def flipped_scale(model: ModelProto, rng: np.random.Generator) -> Planted:
    return _weight_scale(model, rng, lambda scale, at: -scale)


def channel_scale(model: ModelProto, rng: np.random.Generator) -> Planted:
    """One channel of a weight has a scale of 1.5 times."""

    def change(scale: np.ndarray, at: int) -> np.ndarray:
        scale = scale.copy()
        scale[at] *= np.float32(1.5)
        return scale

    return _weight_scale(model, rng, change)


def _weight_scale(
    model: ModelProto, rng: np.random.Generator, change: Callable[[np.ndarray, int], np.ndarray]
) -> Planted:
    constants = {item.name for item in model.graph.initializer}
    nodes = [
        node for node in model.graph.node
        if node.op_type == "DequantizeLinear" and node.input[0] in constants and weight(model, node.input[1]).ndim == 1
        and weight(model, node.input[0]).ndim > 1
    ]  # fmt: skip
    if not nodes:
        return None
    node = _drawn(nodes, rng)
    scale = weight(model, node.input[1])
    return _with_input(model, node, 1, change(scale, int(rng.integers(len(scale))))), tuple(
        map(of, readers(model, node.output[0]))
    )


def saturating(model: ModelProto, rng: np.random.Generator) -> Planted:
    """Products of uint8 and int8 added in pairs in 16 bits, as vpmaddubsw does on CPUs without VNNI: every MatMul."""
    items = [
        node for node in activations(model) for reader in readers(model, node.output[0]) if reader.op_type == "MatMul"
    ]
    changed_model = copy_of(model)
    for node in items:
        for reader in readers(changed_model, node.output[0]):
            if reader.op_type == "MatMul" and reader.input[0] == node.output[0]:
                saturate(changed_model, node, reader)
    return (changed_model, ()) if items else None


def saturate(model: ModelProto, activation: NodeProto, reader: NodeProto) -> None:
    """In place. (x, w) -> clipped sums of pairs, less the zero point's part, times the scales."""
    makers, prefix = sources(model), f"{reader.name}/pairs"
    of_weight = makers.get(reader.input[1])
    if of_weight is None or of_weight.op_type != "DequantizeLinear" or of_weight.input[0] in makers:
        return
    integers = weight(model, of_weight.input[0]).astype(np.float32)
    scale = weight(model, of_weight.input[1]) * weight(model, activation.input[1])
    zero = weight(model, activation.input[2]).astype(np.float32)
    entries = {"low": np.float32(-32768), "high": np.float32(32767)}
    entries |= {"scale": scale.astype(np.float32), "less": zero * integers.sum(0)}
    nodes = [helper.make_node("Cast", [activation.input[0]], [f"{prefix}/x"], f"{prefix}/Cast", to=1)]
    sums = []
    for start in range(0, len(integers), 2):
        entries[f"w{start}"] = integers[start : start + 2]
        entries[f"i{start}"] = np.arange(start, min(start + 2, len(integers)))
        part = f"{prefix}/{start}"
        nodes += [
            helper.make_node("Gather", [f"{prefix}/x", f"{prefix}/i{start}"], [f"{part}/x"], f"{part}/Gather", axis=-1),
            helper.make_node("MatMul", [f"{part}/x", f"{prefix}/w{start}"], [f"{part}/y"], f"{part}/MatMul"),
            helper.make_node("Clip", [f"{part}/y", f"{prefix}/low", f"{prefix}/high"], [f"{part}/z"], f"{part}/Clip"),
        ]
        sums.append(f"{part}/z")
    nodes += [
        helper.make_node("Sum", sums, [f"{prefix}/sum"], f"{prefix}/Sum"),
        helper.make_node("Sub", [f"{prefix}/sum", f"{prefix}/less"], [f"{prefix}/centred"], f"{prefix}/Sub"),
        helper.make_node("Mul", [f"{prefix}/centred", f"{prefix}/scale"], [reader.output[0]], reader.name),
    ]
    add_constants(model, {f"{prefix}/{name}": value for name, value in entries.items()})
    put_nodes(model, reader, nodes)


def narrow_sums(model: ModelProto, rng: np.random.Generator) -> Planted:
    """The longest sum, carried in fp16: after each product."""
    node, name = max(weighted(model), key=lambda pair: weight(model, pair[1]).shape[0])
    values = weight(model, name)
    if node.op_type != "MatMul" or len(values) < 1024:
        return None
    changed_model, prefix, step = copy_of(model), f"{node.name}/narrow", 16
    add_constants(changed_model, {"narrow/c": np.float32(2**13 + 1)})
    reader = next(item for item in changed_model.graph.node if item.name == node.name)
    nodes, total = [], ""
    for start in range(0, len(values), step):
        part = f"{prefix}/{start}"
        span = values[start : start + step].astype(np.float32)
        add_constants(changed_model, {f"{part}/w": span, f"{part}/i": np.arange(start, start + step)})
        nodes += [
            helper.make_node("Gather", [node.input[0], f"{part}/i"], [f"{part}/x"], f"{part}/Gather", axis=-1),
            helper.make_node("Cast", [f"{part}/x"], [f"{part}/wide"], f"{part}/Wide", to=1),
            helper.make_node("MatMul", [f"{part}/wide", f"{part}/w"], [f"{part}/y"], f"{part}/MatMul"),
            *_rounded(f"{part}/y", f"{part}/r"),
        ]
        if total:
            nodes.append(helper.make_node("Add", [total, f"{part}/r"], [f"{part}/s"], f"{part}/Add"))
            nodes += _rounded(f"{part}/s", f"{part}/t")
        total = f"{part}/t" if total else f"{part}/r"
    nodes.append(helper.make_node("Cast", [total], [node.output[0]], node.name, to=10))
    put_nodes(changed_model, reader, nodes)
    return changed_model, (node.name,)


def _rounded(tensor: str, to: str) -> list[NodeProto]:
    """To fp16's 11 bits: x c - (x c - x) with c = 2^13 + 1 (Dekker 1971), which no optimization takes for nothing."""
    return [
        helper.make_node("Mul", [tensor, "narrow/c"], [f"{to}/c"], f"{to}/Mul"),
        helper.make_node("Sub", [f"{to}/c", tensor], [f"{to}/d"], f"{to}/Far"),
        helper.make_node("Sub", [f"{to}/c", f"{to}/d"], [to], f"{to}/Near"),
    ]


def _with_input(model: ModelProto, node: NodeProto, index: int, value: np.ndarray) -> ModelProto:
    """Another constant for one input of one node."""
    copied_model, name = copy_of(model), f"{node.name}/other{index}"
    add_constants(copied_model, {name: value})
    next(item for item in copied_model.graph.node if item.name == node.name).input[index] = name
    return copied_model


def _drawn(items: list, rng: np.random.Generator):
    return items[int(rng.integers(len(items)))]


def _walk() -> Iterator[Plant]:
    yield Plant("two channels of a weight swapped", swapped)
    yield Plant("a bias dropped", without_bias)
    yield Plant("epsilon 1e-3 for 1e-5", epsilon)
    yield Plant("tanh for erf in GELU", tanh_gelu)
    yield Plant("weights of 10 bits (TF32)", rounded_weights(10), ("fp32",))
    yield Plant("the least channel dead", channel(lambda w: w * 0), ("fp32", "fp16", "int8"))
    yield Plant("one column x1.02", channel(lambda w: w * 1.02), FLOATS)
    yield Plant("the scores of a detector halved", slice_ruined)
    yield Plant("a constant answer", behind("none = Mul(was, k_0) mean = ReduceMean(was) OUT = Add(none, mean)"))
    for number in (1, 4, 8):
        yield Plant(f"zero point +{number}", zero_point(number), ("int8",))
    yield Plant("all scales x1.2", scales(1.2), ("int8",))
    yield Plant("one channel's scale x1.5", channel_scale, ("int8",))
    yield Plant("one weight's scale flipped", flipped_scale, ("int8",))
    yield Plant("sums of pairs saturate at 16 bits", saturating, ("int8",))
    yield Plant("a long sum carried in fp16", narrow_sums, ("fp16",))


PLANTS = tuple(plant for plant in _walk() if plant.precisions)
