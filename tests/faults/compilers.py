"""Faults of compilers as users have reported them, rebuilt small: the engine answers, and nothing warns.

`Report` says what a thread reports; `tests/faults/test_compilers.py` holds each plant near that figure, and proves the
same engine without the fault.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from onnx import ModelProto, helper, parser, shape_inference

from builders.backends.known_faults import gather_samples
from builders.onnx_graphs.rewriting import rewrite
from enginesmith.core.types import Dim, Precision, TensorSpec
from pipeline.quantization.schemes.cast import cast_float
from tests.faults.bench import Bench, BuiltEngine
from tests.faults.families import BATCH, series
from tests.faults.nets import ROWS, add_constants, put_nodes, rows
from tests.faults.table import Caught, Fault, blamed, caught
from tests.pipeline.quantization.small_nets import build, named, run, sqnr_db
from tests.validation.attribution.planted import copy_of, weight, with_attribute, with_names

TRT = "https://github.com/NVIDIA/TensorRT/issues"
SQNR, REL = "engine sqnr_db", "engine max_rel"
FAR = frozenset({REL})
Samples = Mapping[str, np.ndarray]
Run = Callable[[Samples], np.ndarray]


@dataclass(frozen=True)
class Report:
    """A plant. change: of the graph to what the engine computes, with the fault or without (`wrong`).

    reported: what the thread says.  figure: the like of it, of right and wrong outputs of inputs.  near: its bounds.
    check, place, also: as in `Fault`.
    """

    name: str
    source: str
    reported: str
    figure: Callable[[Run, Run], float]
    near: tuple[float, float]
    net: Callable[[], ModelProto]
    samples: Callable[[int, int], Samples]
    inputs: tuple[TensorSpec, ...]
    change: Callable[[ModelProto, bool], ModelProto]
    place: str
    check: str = SQNR
    also: frozenset[str] = FAR
    dims: tuple[Dim, ...] = (BATCH,)
    precision: Precision = "fp32"
    keep: tuple[str, ...] = ()

    def graph(self, model: ModelProto) -> ModelProto:
        """What the engine is built from."""
        return (
            model if self.precision == "fp32" else cast_float(model, "fp16", keep=dict.fromkeys(self.keep, "a test"))[0]
        )

    def engine(self, folder: Path, wrong: bool) -> BuiltEngine:
        """The engine, with the fault or without."""
        bench = Bench(folder, self.net(), self.samples(1, 48), self.inputs, self.dims)
        graph = self.graph(bench.canonical())
        return bench.engine(self.change(graph, wrong), graph, self.precision)

    def plant(self, folder: Path) -> Caught:
        """What the default proof says of the engine, and which node attribution blames."""
        built_engine = self.engine(folder, wrong=True)
        checks = built_engine.checks()
        extra_cases = [check.case for check in checks if not check.passed and check.name in ("sizes", "magnitudes")]
        return caught(checks, self.check, blamed(built_engine.attribution(extra_cases)))

    def measure(self) -> float:
        """The figure, of graph and engine as ONNX Runtime runs them."""
        graph = self.graph(self.net())
        engine = self.change(graph, True)
        return self.figure(lambda inputs: run(graph, inputs, optimized=False), lambda inputs: run(engine, inputs))


def instead(model: ModelProto, name: str, text: str, **constants: object) -> ModelProto:
    """Nodes that replace the named one, the last under its name; inputs are `in0`, `in1`..., the first output `out`."""
    copied_model = copy_of(model)
    node = named(copied_model, name)
    added = parser.parse_model(f'<ir_version: 8, opset_import: ["": 20]> g () => (float[N] out) {{{text}}}').graph.node
    names = {f"in{index}": entry for index, entry in enumerate(node.input)} | {"out": node.output[0]}
    for item in added:
        item.name = name if "out" in item.output else f"{name}/{item.output[0]}"
        item.input[:] = [names.get(entry, entry) for entry in item.input]
        item.output[:] = [names.get(entry, entry) for entry in item.output]
    put_nodes(copied_model, node, added)
    add_constants(copied_model, constants)
    return copied_model


def score_of(outputs: np.ndarray) -> np.ndarray:
    return outputs[..., -1]


def detected(right: Run, wrong: Run, samples: Samples) -> float:
    """The share of what the model detects that the engine detects, too."""
    flag, other_flag = (score_of(side(samples)) > 0.5 for side in (right, wrong))
    return float((flag & other_flag).sum() / flag.sum())


def images(seed: int, count: int) -> Samples:
    rng = np.random.default_rng(seed)
    smooth_array = rng.normal(size=(count, 3, 4, 4)).repeat(4, 2).repeat(4, 3)
    return {"image": (smooth_array + rng.normal(size=(count, 3, 16, 16)) / 4).astype(np.float32)}


IMAGES = (TensorSpec("image", "float32", ("batch", 3, 16, 16)),)


def deformable() -> ModelProto:
    """A detector whose 16 queries sample a feature map at four learned points each, many at its border."""
    rng = np.random.default_rng(0)
    weights = {
        "w1": rng.normal(size=(8, 3, 3, 3)) / 3, "b1": rng.normal(size=8) / 4 + 0.5,
        "wo": rng.normal(size=(8, 128)) / 3, "to_points": np.array([0, 16, 4, 2]), "reach": np.float32(0.1),
        "anchors": np.sign(rng.normal(size=(1, 16, 1, 2))) * rng.uniform(0.85, 1.05, (1, 16, 1, 2)),
        "last": np.array([3]), "wh": np.abs(rng.normal(size=(8, 16))) / 8, "wb": rng.normal(size=(16, 4)) / 4,
        "ws": np.abs(rng.normal(size=(16, 1))) / 8, "bs": np.float32(-3.7), "side": np.float32(640),
    }  # fmt: skip
    text = """
        c = Conv<kernel_shape=[3,3], pads=[1,1,1,1], strides=[2,2]>(image, w1, b1) f = Relu(c)
        pooled = GlobalAveragePool(f) flat = Flatten(pooled) o0 = MatMul(flat, wo) o1 = Tanh(o0)
        o2 = Reshape(o1, to_points) o3 = Mul(o2, reach) grid = Add(o3, anchors)
        sampled = GridSample<mode="linear", padding_mode="border", align_corners=1>(f, grid)
        summed = ReduceSum<keepdims=0>(sampled, last) rows = Transpose<perm=[0,2,1]>(summed)
        h0 = MatMul(rows, wh) h = Relu(h0) s0 = MatMul(h, ws) s1 = Add(s0, bs) scores = Sigmoid(s1)
        b0 = MatMul(h, wb) part = Sigmoid(b0) boxes = Mul(part, side) found = Concat<axis=-1>(boxes, scores)
    """
    return with_names(build("float[batch,3,16,16] image", "float[batch,16,5] found", text, weights))


def sampled_elsewhere(model: ModelProto, wrong: bool) -> ModelProto:
    """Both engines gather four pixels for each point; the wrong one aligns no corners, and has zeros around."""
    if wrong:
        model = with_attribute(model, "sampled", align_corners=0, padding_mode="zeros")
    typed_model = shape_inference.infer_shapes(model)
    rewrite(typed_model.graph, 20, {"GridSample": gather_samples})
    for node in typed_model.graph.node:  # ONNX Runtime takes no two of one name
        if node.name == "GridSample_sampled" and "sampled" not in node.output:
            node.name += f"/{node.output[0]}"
    return typed_model


WIDTH = 16
PATCHES = TensorSpec("x", "float32", ("batch", 6, WIDTH))
SEEN = TensorSpec("mask", "float32", ("batch", 6))


def sentences(seed: int, count: int) -> Samples:
    """Sentences of one to six words; every fourth fills all six places."""
    rng = np.random.default_rng(seed)
    lengths = np.where(np.arange(count) % 4, rng.integers(1, 7, count), 6)[:, None]
    return {
        "x": rng.normal(size=(count, 6, WIDTH)).astype(np.float32),
        "mask": (np.arange(6) < lengths).astype(np.float32),
    }


def attend(name: str, source: str, to: str, bias: str = "") -> str:
    """A layer of attention, as text; its tensors and weights begin with `name`."""
    masked_text = f"{name}s2 = Add({name}s1, {bias})" if bias else f"{name}s2 = Identity({name}s1)"
    return f"""
        {name}q = MatMul({source}, {name}wq) {name}k = MatMul({source}, {name}wk) {name}v = MatMul({source}, {name}wv)
        {name}kt = Transpose<perm=[0,2,1]>({name}k) {name}s0 = MatMul({name}q, {name}kt)
        {name}s1 = Mul({name}s0, {name}scale) {masked_text} {name}p = Softmax<axis=-1>({name}s2)
        {name}a = MatMul({name}p, {name}v) {name}o = MatMul({name}a, {name}wo) {to} = Add({source}, {name}o)
    """


def attention_weights(name: str, size: int, seed: int, sharp: float = 1.0) -> dict[str, object]:
    """size: of the head.  sharp: factor of its queries."""
    rng = np.random.default_rng(seed)
    result: dict[str, object] = {f"{name}w{letter}": rng.normal(size=(WIDTH, size)) / 4 for letter in "qkv"}
    result[f"{name}wq"] = result[f"{name}wq"] * sharp
    return result | {f"{name}wo": rng.normal(size=(size, WIDTH)) / 3, f"{name}scale": np.float32(size**-0.5)}


def encoder() -> ModelProto:
    """Two layers of masked attention, with heads of 8 and of 16."""
    weights = attention_weights("a", 8, 1) | attention_weights("b", 16, 2)
    weights |= {"one": np.float32(1), "fill": np.float32(-1e4), "axes": np.array([1]), "w": np.eye(WIDTH)[:, :10]}
    text = f"""
        m0 = Sub(one, mask) m1 = Mul(m0, fill) bias = Unsqueeze(m1, axes)
        {attend("a", "x", "y1", "bias")} {attend("b", "y1", "y2", "bias")} y = MatMul(y2, w)
    """
    return with_names(build(f"float[batch,6,{WIDTH}] x, float[batch,6] mask", "float[batch,6,10] y", text, weights))


def unmasked(model: ModelProto, wrong: bool) -> ModelProto:
    """The larger head's kernel leaves out the mask."""
    copied_model = copy_of(model)
    if wrong:
        node = named(copied_model, "Add_bs2")
        node.op_type, node.input[:] = "Identity", node.input[:1]
    return copied_model


def cosine(right: Run, wrong: Run) -> float:
    """Between outputs of sentences that end early."""
    samples = sentences(5, 96)
    is_short = samples["mask"].sum(1) < 6
    here, there = (side({name: array[is_short] for name, array in samples.items()}).ravel() for side in (right, wrong))
    return float(here @ there / np.linalg.norm(here) / np.linalg.norm(there))


def patches(seed: int, count: int) -> Samples:
    return {"x": np.random.default_rng(seed).normal(size=(count, 6, WIDTH)).astype(np.float32)}


def vision(sharp: float = 3.0) -> ModelProto:
    """A block of a vision transformer over six patches, with a score for each."""
    rng = np.random.default_rng(3)
    weights = attention_weights("a", 16, 4, sharp) | {
        "gamma": np.ones(WIDTH), "beta": np.zeros(WIDTH), "up": rng.normal(size=(WIDTH, 32)) / 3,
        "down": rng.normal(size=(32, 5)), "b": np.array([0, 0, 0, 0, -6.0]),
    }  # fmt: skip
    weights["awo"] = weights["awo"] * 6
    text = f"""
        {attend("a", "x", "y1")} n = LayerNormalization<axis=-1>(y1, gamma, beta)
        u0 = MatMul(n, up) u = Relu(u0) d0 = MatMul(u, down) d1 = Add(d0, b) found = Sigmoid(d1)
    """
    return with_names(build(f"float[batch,6,{WIDTH}] x", "float[batch,6,5] found", text, weights))


def scaled_twice(model: ModelProto, wrong: bool) -> ModelProto:
    """The fused kernel divides by the root of the head's size, and so does what is left of the graph."""
    copied_model = copy_of(model)
    if wrong:
        node = named(copied_model, "Mul_as1")
        scale = next(name for name in node.input if name.startswith("ascale"))
        add_constants(copied_model, {"twice": weight(model, scale) ** 2})
        node.input[list(node.input).index(scale)] = "twice"
    return copied_model


def least_score(right: Run, wrong: Run) -> float:
    """The least score that the engine gives where the model's is 0.9 or more."""
    samples = patches(6, 96)
    local_score, other_score = (score_of(side(samples)) for side in (right, wrong))
    return float(other_score[local_score > 0.9].min())


def outliers() -> ModelProto:
    """LayerNorm behind a channel that is 160 times as large as the others, as in transformers."""
    rng = np.random.default_rng(7)
    w1 = rng.normal(size=(8, WIDTH)) / 3
    w1[:, 5] *= 160
    weights = {
        "w1": w1, "gamma": 1 + rng.normal(size=WIDTH) / 4, "beta": rng.normal(size=WIDTH),
        "w2": rng.normal(size=(WIDTH, 10)),
    }  # fmt: skip
    text = "h = MatMul(x, w1) n = LayerNormalization<axis=-1, epsilon=1e-5>(h, gamma, beta) logits = MatMul(n, w2)"
    return with_names(build("float[batch,8] x", "float[batch,10] logits", text, weights))


def squared_in_half(model: ModelProto, wrong: bool) -> ModelProto:
    """Both engines normalize by parts; the wrong one squares in fp16, which ends at 65,504."""
    squares = "over = Greater(sq, most) squares = Where(over, beyond, sq)" if wrong else "squares = Identity(sq)"
    text = f"""
        wide = Cast<to=1>(in0) mean = ReduceMean(wide, inner) d = Sub(wide, mean) sq = Mul(d, d) {squares}
        var = ReduceMean(squares, inner) more = Add(var, small) root = Sqrt(more) unit = Div(d, root)
        g = Cast<to=1>(in1) b = Cast<to=1>(in2) scaled = Mul(unit, g) moved = Add(scaled, b) out = Cast<to=10>(moved)
    """
    numbers = {"most": 65504, "beyond": np.inf, "small": 1e-5}
    constants = {name: np.float32(value) for name, value in numbers.items()}
    return instead(model, "LayerNormalization_n", text, inner=np.array([-1]), **constants)


def decided(samples: Samples) -> Callable[[Run, Run], float]:
    """The share of equal decisions."""
    return lambda right, wrong: float((right(samples).argmax(-1) == wrong(samples).argmax(-1)).mean())


PLACES, PICKS = 12, 4
BOXES = (TensorSpec("x", "float32", ("batch", PLACES, 6)),)


def candidates(seed: int, count: int) -> Samples:
    return {"x": np.random.default_rng(seed).normal(size=(count, PLACES, 6)).astype(np.float32)}


def suppressing() -> ModelProto:
    """Scores below a threshold are all zero; the boxes of the four greatest, and their votes for one of six cells."""
    rng = np.random.default_rng(8)
    weights = {
        "ws": rng.normal(size=(6, 1)) / 2, "below": np.float32(0.5), "wb": rng.normal(size=(6, 4)),
        "k": np.array([PICKS]), "row": np.array([0, PLACES]), "inner": np.array([-1]), "cells": np.float32(6),
        "six": np.array([6]), "column": np.array([-1, 1, 1]), "z": np.int64(0), "o": np.int64(1),
        "first": np.array([0]), "picks": np.array([PICKS, 1]), "none": np.float32(0), "last": np.float32(5),
    }  # fmt: skip
    text = """
        s0 = MatMul(x, ws) s1 = Sub(s0, below) s2 = Relu(s1) s = Reshape(s2, row) boxes = MatMul(x, wb)
        best, at = TopK<axis=1>(s, k) at3 = Unsqueeze(at, inner)
        picked = GatherND<batch_dims=1>(boxes, at3) flat = Flatten(picked)
        left = Slice(picked, first, o1, axis2) share = Sigmoid(left) cell0 = Mul(share, cells)
        cell1 = Floor(cell0) cell2 = Clip(cell1, none, last) cell = Cast<to=7>(cell2)
        shape = Shape(x) many0 = Gather(shape, z) numbers = Range(z, many0, o) samples = Reshape(numbers, column)
        size1 = Gather(shape, first) wide = Concat<axis=0>(size1, picks) batch = Expand(samples, wide)
        where = Concat<axis=-1>(batch, cell) empty0 = Concat<axis=0>(size1, six) empty = Expand(none, empty0)
        votes = ScatterND<reduction="add">(empty, where, best) found = Concat<axis=1>(flat, votes)
    """
    weights |= {"o1": np.array([1]), "axis2": np.array([2])}
    return with_names(build(f"float[batch,{PLACES},6] x", f"float[batch,{4 * PICKS + 6}] found", text, weights))


def later_first(model: ModelProto, wrong: bool) -> ModelProto:
    """Both engines sort a reordered list; the wrong one's is backwards: of equal scores the last comes first."""
    copied_model, order = copy_of(model), np.arange(PLACES)[::-1] if wrong else np.arange(PLACES)
    add_constants(copied_model, {"order": order.copy()})
    node = named(copied_model, "TopK_best")
    turned_node = helper.make_node("Gather", [node.input[0], "order"], ["turned"], "TopK_best/turned", axis=1)
    restored_node = helper.make_node("Gather", ["order", "place"], [node.output[1]], "TopK_best/back")
    node.input[0], node.output[1] = "turned", "place"
    put_nodes(copied_model, node, [turned_node, node, restored_node])
    return copied_model


def overwritten(model: ModelProto, wrong: bool) -> ModelProto:
    """Votes for one cell take each other's place."""
    return with_attribute(model, "votes", reduction="none") if wrong else copy_of(model)


def equal_share(columns: slice, samples: Samples) -> Callable[[Run, Run], float]:
    """The share of samples whose answers in some columns are the same."""

    def figure(right: Run, wrong: Run) -> float:
        local_columns, other_columns = (side(samples)[:, columns] for side in (right, wrong))
        return float(np.isclose(local_columns, other_columns, rtol=1e-4, atol=1e-5).all(axis=1).mean())

    return figure


def pyramid() -> ModelProto:
    """A coarse map is enlarged and added to a fine one."""
    rng = np.random.default_rng(9)
    weights = {
        "w1": rng.normal(size=(8, 3, 3, 3)) / 4, "w2": rng.normal(size=(8, 8, 3, 3)) / 8,
        "w3": rng.normal(size=(2, 8, 1, 1)), "scales": np.float32([1, 1, 2, 2]),
    }  # fmt: skip
    text = """
        c1 = Conv<kernel_shape=[3,3], pads=[1,1,1,1], strides=[2,2]>(image, w1) r1 = Relu(c1)
        c2 = Conv<kernel_shape=[3,3], pads=[1,1,1,1], strides=[2,2]>(r1, w2) r2 = Relu(c2)
        large = Resize<mode="linear", coordinate_transformation_mode="half_pixel">(r2, "", scales)
        sum = Add(large, r1) y = Conv<kernel_shape=[1,1]>(sum, w3)
    """
    return with_names(build("float[batch,3,16,16] image", "float[batch,2,8,8] y", text, weights))


def asymmetric(model: ModelProto, wrong: bool) -> ModelProto:
    mode = "asymmetric" if wrong else "half_pixel"
    return with_attribute(model, "large", coordinate_transformation_mode=mode)


def tied() -> ModelProto:
    """Two layers with one weight, which is nearly symmetric."""
    rng = np.random.default_rng(10)
    half_array = rng.normal(size=(8, 8)) / 3
    weights = {"w": half_array + half_array.T + rng.normal(size=(8, 8)) / 100, "v": rng.normal(size=(8, 10))}
    text = "h0 = MatMul(x, w) h = Tanh(h0) g0 = MatMul(h, w) g = Tanh(g0) logits = MatMul(g, v)"
    return with_names(build("float[batch,8] x", "float[batch,10] logits", text, weights))


def transposed_again(model: ModelProto, wrong: bool) -> ModelProto:
    """The second layer finds the weight transposed, as the first one has left it."""
    values = weight(model, "w").T if wrong else weight(model, "w")
    copied_model = copy_of(model)
    add_constants(copied_model, {"w/kept": np.ascontiguousarray(values)})
    named(copied_model, "MatMul_g0").input[1] = "w/kept"
    return copied_model


def first_of_batch(model: ModelProto, wrong: bool) -> ModelProto:
    """All samples of a batch attend to the keys of the first."""
    nodes = "first = Slice(own, none, begin, none) out = Expand(first, shape)" if wrong else "out = Identity(own)"
    text = f"own = MatMul(in0, in1) shape = Shape(own) {nodes}"
    return instead(model, "MatMul_ak", text, none=np.array([0]), begin=np.array([1]))


def batch_error(right: Run, wrong: Run) -> float:
    """dB of a batch of two; raises AssertionError where the engine is wrong with one sample."""
    samples = patches(11, 2)
    single_fields = {"x": samples["x"][:1]}
    assert sqnr_db(right(single_fields), wrong(single_fields)) > 100
    return sqnr_db(right(samples)[1], wrong(samples)[1])


def far_logits() -> ModelProto:
    """Attention whose logits lie some 1,500 above zero, which a Softmax in fp32 takes off."""
    copied_model = vision(1.0)
    add_constants(copied_model, {"far": np.float32(1500)})
    node = named(copied_model, "Identity_as2")
    node.op_type, node.name, node.input[:] = "Add", "Add_as2", [node.input[0], "far"]
    return copied_model


LOGITS = ("MatMul_as0", "Mul_as1", "Add_as2", "Softmax_ap")


def half_softmax(model: ModelProto, wrong: bool) -> ModelProto:
    """The casts around the Softmax are moved: what it reads has 11 bits."""
    text = "c = Mul(in0, split) e = Sub(c, in0) r = Sub(c, e) out = Softmax<axis=-1>(r)"
    return instead(model, "Softmax_ap", text, split=np.float32(8193)) if wrong else copy_of(model)


def pooled() -> ModelProto:
    """The mean over a series of any length, by an operator of the user's own."""
    rng = np.random.default_rng(12)
    weights = {
        "w1": rng.normal(size=(6, 16)) / 2, "w2": rng.normal(size=(16, 5)), "steps": np.array([1]), "one": np.int64(1),
    }  # fmt: skip
    text = """
        h0 = MatMul(x, w1) h = Relu(h0) shape = Shape(h) many0 = Gather(shape, one) many = Cast<to=1>(many0)
        total = ReduceSum<keepdims=0>(h, steps) mean = Div(total, many) z = MatMul(mean, w2)
    """
    return with_names(build("float[batch,steps,6] x", "float[batch,5] z", text, weights))


def built_for_twelve(model: ModelProto, wrong: bool) -> ModelProto:
    """The operator keeps the length that it was configured with."""
    return instead(model, "Div_mean", "out = Div(in0, twelve)", twelve=np.float32(12)) if wrong else copy_of(model)


def other_length(right: Run, wrong: Run) -> float:
    """dB of a series of 24; raises AssertionError where the engine is wrong for 12."""
    twelve = series(13, 4)
    assert sqnr_db(right(twelve), wrong(twelve)) > 100
    double_fields = {"x": np.concatenate([twelve["x"]] * 2, axis=1)}
    return sqnr_db(right(double_fields), wrong(double_fields))


REPORTS: Sequence[Report] = (
    Report(
        "GridSample by other corners", f"{TRT}/4813", "1,481 of 6,269 detections at fp32, no warning",
        lambda right, wrong: detected(right, wrong, images(2, 200)), (0.1, 0.4),
        deformable, images, IMAGES, sampled_elsewhere,
        "node ReduceSum_summed (with GridSample_sampled)",
    ),
    Report(
        "a mask that a head of 16 leaves out, fp16", f"{TRT}/4822", "a cosine of 0.826 (bf16), 37 of 151 frames right",
        cosine, (0.7, 0.95), encoder, sentences, (PATCHES, SEEN), unmasked, "node Softmax_bp (with Add_bs2)",
        precision="fp16",
    ),
    Report(
        "fused attention that scales twice, fp16", f"{TRT}/4837", "a score of 0.933 falls to 0.045; fp32 is exact",
        least_score, (0.0, 0.1), vision, patches, (PATCHES,), scaled_twice, "node MatMul_as0 (with Mul_as1)",
        precision="fp16",
    ),
    Report(
        "LayerNorm whose square leaves fp16", f"{TRT}/2564", "an overflow, and another answer",
        decided(rows(14, 400)), (0.9, 0.99), outliers, rows, ROWS, squared_in_half,
        "node MatMul_logits (with LayerNormalization_n)", "engine magnitudes", frozenset(), precision="fp16",
    ),
    Report(
        "TopK that takes the later of ties", "https://github.com/onnx/onnx/issues/3501", "the higher index of equals",
        equal_share(slice(0, 16), candidates(15, 400)), (0.2, 0.9), suppressing, candidates, BOXES, later_first,
        "node GatherND_picked (with TopK_best, Unsqueeze_at3)",
    ),
    Report(
        "ScatterND that overwrites where it adds", f"{TRT}/3750", "scatter with add does not add",
        equal_share(slice(16, 22), candidates(15, 400)), (0.05, 0.4), suppressing, candidates, BOXES, overwritten,
        "node ScatterND_votes (with Shape_shape, Gather_many0, Range_numbers, Reshape_samples, Gather_size1, "
        "Concat_wide, Expand_batch, Concat_where)",
    ),
    Report(
        "Resize from asymmetric places", f"{TRT}/273", "another result than half_pixel's",
        lambda right, wrong: sqnr_db(right(images(16, 8)), wrong(images(16, 8))), (5, 30),
        pyramid, images, IMAGES, asymmetric, "node Resize_large",
    ),
    Report(
        "a shared weight transposed again", "https://github.com/PaddlePaddle/Paddle/pull/49687", "wrong results",
        decided(rows(17, 400)), (0.95, 0.999), tied, rows, ROWS, transposed_again, "node MatMul_g0 (with Tanh_g)",
    ),
    Report(
        "an engine that is right for batch 1", f"{TRT}/4853", "exact alone, wrong by orders of magnitude in two",
        batch_error, (-10, 20), vision, patches, (PATCHES,), first_of_batch, "node MatMul_ak",
    ),
    Report(
        "a Softmax whose casts were moved, fp16", "https://github.com/NVIDIA/TensorRT/issues/3136",
        "0.9975 right falls to 0.9136", decided(patches(18, 200)), (0.6, 0.98),
        far_logits, patches, (PATCHES,), half_softmax, "node Softmax_ap", precision="fp16", keep=LOGITS,
    ),
    Report(
        "an operator without its dynamic shape", f"{TRT}/2692", "the dims are always those of the profile",
        other_length, (-10, 20), pooled, series, (TensorSpec("x", "float32", ("batch", "steps", 6)),),
        built_for_twelve, "node MatMul_z (with Div_mean)", dims=(BATCH, Dim("steps", 1, 12, 30, (12, 30))),
    ),
)  # fmt: skip
FAULTS = tuple(Fault(each.name, each.plant, each.check, each.place, each.also) for each in REPORTS)
