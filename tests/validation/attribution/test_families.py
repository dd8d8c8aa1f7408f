from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import ModelProto

from builders.backends.onnxruntime import OnnxRuntime, OrtSession
from builders.backends.onnxruntime.file import restore_names
from enginesmith.core.types import BuildRequest, Precision, Target, TensorSpec
from pipeline.compile.steps.blobs import runnable
from pipeline.quantization.schemes.cast import cast_float
from pipeline.quantization.schemes.qdq import quantize_int8
from pipeline.quantization.schemes.write import write
from tests.faults.bench import Bench
from tests.faults.families import FAMILIES, Family, detector, floats_of, recurrent
from tests.pipeline.quantization.small_nets import CPU, build, maker, ranges_of, x_net, x_values
from tests.scheduling import slow_after_first
from tests.validation.attribution.planted import golden_of, weight, with_attribute, with_names, with_weight
from validation.attribution.cuts import GraphStep, list_shared
from validation.attribution.onnx_graph import OnnxGraph
from validation.attribution.result import Attribution
from validation.attribution.sweep import attribute
from validation.limits.budget import default_budget

PRECISIONS: tuple[Precision, ...] = ("fp32", "fp16", "int8")
Change = Callable[[ModelProto], ModelProto]


def mixed(name: str) -> Change:
    """Two slices of a weight in each other's place, along its largest axis."""

    def change(model: ModelProto) -> ModelProto:
        values = weight(model, name)
        return with_weight(model, name, np.roll(values, 1, int(np.argmax(values.shape))))

    return change


def filled(name: str, value: float = 0) -> Change:
    """A constant of one value."""
    return lambda model: with_weight(model, name, np.full_like(weight(model, name), value))


def changed(tensor: str, **attributes: object) -> Change:
    """Another attribute of the node that makes `tensor`."""
    return lambda model: with_attribute(model, tensor, **attributes)


# Of each family, the faults: the change, and the tensor whose maker it is in.
FAULTS: dict[str, dict[str, tuple[Change, str]]] = {
    "conv": {
        "swapped weight": (mixed("w2"), "c2"), "dropped bias": (filled("b1"), "c1"),
        "swapped last weight": (mixed("w4"), "logits"),
    },
    "mlp": {
        "swapped weight": (mixed("w2"), "m0"), "dropped bias": (filled("b1"), "h1"),
        "wrong epsilon": (changed("n", epsilon=2.0), "n"),
    },
    "encoder": {
        "swapped weight": (mixed("wv"), "v"), "dropped bias": (filled("bq"), "q"),
        "wrong epsilon": (changed("n", epsilon=2.0), "n"),
    },
    "recurrent": {
        "swapped weight": (mixed("r"), "y4"), "dropped bias": (filled("lb"), "l4"),
        "swapped last weight": (mixed("wo"), "z0"),
    },
    "detector": {
        "swapped weight": (mixed("w2"), "c2"), "dropped bias": (filled("b1"), "c1"),
        "other overlap": (filled("overlap", 0.05), "kept"), "smallest": (changed("top", largest=0), "top"),
    },
}  # fmt: skip


def chosen(seed: int) -> ModelProto:
    """`detector`, and which boxes are kept: NonMaxSuppression, and the best 8."""
    text = """
        classes = Transpose<perm=[0,2,1]>(scores)
        kept = NonMaxSuppression(boxes, classes, most, overlap, least)
        best = ReduceMax<keepdims=0>(classes, axis)
        top, places = TopK<axis=-1>(best, eight)
    """
    limits = {"overlap": np.float32(0.5), "least": np.float32(0.3), "most": np.array([5])}
    places = {"axis": np.array([1]), "eight": np.array([8])}
    return detector(seed, text, ", int64[n,3] kept, float[batch,8] top", **limits, **places)


def stacked(seed: int) -> ModelProto:
    """`recurrent` with an LSTM before the GRU."""
    rng = np.random.default_rng(seed)
    sizes = {"lw": (1, 24, 6), "lr": (1, 24, 6), "lb": (1, 48)}
    drawn_arrays = {name: rng.normal(size=size) / 2 for name, size in sizes.items()}
    text = "l4, state = LSTM<hidden_size=6>(xt, lw, lr, lb) l3 = Squeeze(l4, axes)"
    return recurrent(seed, text, "l3", **drawn_arrays)


MORE = {"detector": chosen, "recurrent": stacked}
SUBJECTS = {name: replace(FAMILIES[name], model=MORE.get(name, FAMILIES[name].model)) for name in FAULTS}


def variant(family: Family, clean: ModelProto, precision: Precision) -> Change:
    """What makes the graph of a precision; the ranges are those of the clean net."""
    if precision == "fp32":
        return lambda model: model
    if precision == "fp16":
        return lambda model: cast_float(model, "fp16")[0]
    ranges = ranges_of(clean, family.samples(1, 24), floats_of(clean))
    return lambda model: quantize_int8(model, ranges, CPU)[0]


def attributed(
    folder: Path, family: Family, graph: ModelProto, built_from: ModelProto, precision: Precision
) -> Attribution:
    """An engine built from `built_from`, against the graph that it says it was built from."""
    folder.mkdir()
    for name, model in (("graph", graph), ("built_from", built_from)):
        onnx.save(model, folder / f"{name}.onnx")
    request = BuildRequest("", precision, Target("cpu"), "onnxruntime", (), (), ())
    engine = OnnxRuntime(intra_op_threads=1).build(request, folder / "built_from.onnx", folder).path
    reference = runnable(folder / "graph.onnx", precision)
    pair = (
        OnnxGraph(reference, folder / "expected", lambda file: OrtSession(file, optimized=False), fuses=False),
        OnnxGraph(engine, folder / "actual", OnnxRuntime(intra_op_threads=1).open_part, fuses=True),
    )
    failed_names = [] if built_from is graph else ["sqnr_db"]
    return attribute(
        "engine", precision, *pair, golden_of(family.samples(1, 24)), default_budget("engine", precision), failed_names
    )


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", slow_after_first(FAULTS))
def test_a_fault_is_blamed_on_its_node_and_on_no_other(name: str, precision: Precision, tmp_path: Path) -> None:
    family = SUBJECTS[name]
    for seed, (fault, (change, tensor)) in enumerate(FAULTS[name].items()):
        clean_model = family.model(seed)
        make = variant(family, clean_model, precision)
        attribution = attributed(tmp_path / fault, family, make(clean_model), make(change(clean_model)), precision)
        planted = maker(clean_model, tensor).name
        # One kernel computes at most a weighted node with its bias and an activation of two nodes.
        nodes = [row.nodes for row in attribution.blamed if planted not in row.nodes or len(row.nodes) > 4]
        assert attribution.blamed and not nodes, f"{fault} in {planted}: {[row.nodes for row in attribution.blamed]}"
        assert not attribution.taps.changed


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", slow_after_first(FAULTS))
def test_a_clean_engine_is_cut_in_many_parts_and_none_is_blamed(name, precision, tmp_path):
    family = SUBJECTS[name]
    clean_model = family.model(0)
    graph = variant(family, clean_model, precision)(clean_model)
    result = attributed(tmp_path / "clean", family, graph, graph, precision)
    assert not result.blamed and result.cut >= 4


def test_a_converted_weight_belongs_to_its_reader() -> None:
    steps = [
        GraphStep("DequantizeLinear_w", "DequantizeLinear", (), ("w",)),
        GraphStep("Transpose_t", "Transpose", (), ("t",)),
        GraphStep("MatMul_y", "MatMul", ("x", "w", "t"), ("y",)),
    ]
    assert list_shared(steps, steps) == ["t", "y"]


def test_tensors_that_an_fp16_engine_computes_in_fp32_have_the_names_of_its_graph(tmp_path: Path) -> None:
    net = with_names(x_net("a = MatMul(x, w) b = Relu(a) y = Concat<axis=0>(a, b)"))
    graph = cast_float(net, "fp16")[0]
    (tmp_path / "engine").mkdir()
    onnx.save(graph, tmp_path / "graph.onnx")
    request = BuildRequest("", "fp16", Target("cpu"), "onnxruntime", (), (), ())
    path = OnnxRuntime().build(request, tmp_path / "graph.onnx", tmp_path / "engine").path
    model = onnx.load(path)
    output_before = OnnxRuntime().open_part(path).run(x_values())["y"]
    assert {value.name for value in model.graph.value_info} == {"a", "b", "x_fp16", "y_fp16"}
    restore_names(model)
    assert {value.name for value in model.graph.value_info} == {"x_fp16", "y_fp16"}, "a and b are fp32 now"
    ops = {name: node.op_type for node in model.graph.node for name in node.output}
    # 'a' is computed in fp32, and rounded for the Concat, which computes in fp16: its output is the graph's own.
    assert (ops["a"], ops["a/narrow"], ops["b"], ops["y_fp16"]) == ("MatMul", "Cast", "Relu", "Concat")
    onnx.save(model, tmp_path / "renamed.onnx")
    assert (OnnxRuntime().open_part(tmp_path / "renamed.onnx").run(x_values())["y"] == output_before).all()


def rms_net() -> ModelProto:
    """A product, a normalization by the root of its mean square, and another product."""
    rng = np.random.default_rng(0)
    weights = {
        "w": rng.normal(size=(16, 24)) / 4, "b": rng.normal(size=24) / 3, "v": rng.normal(size=(24, 10)) / 5,
        "two": np.float32(2), "eps": np.float32(1e-5), "rows": np.array([-1]),
    }  # fmt: skip
    text = """
        h0 = MatMul(x, w)
        h = Add(h0, b)
        sq = Pow(h, two)
        ms = ReduceMean<keepdims=1>(sq, rows)
        me = Add(ms, eps)
        rt = Sqrt(me)
        n = Div(h, rt)
        y = MatMul(n, v)
    """
    return with_names(build("float[batch,16] x", "float[batch,10] y", text, weights))


def test_a_kernel_that_exists_only_in_the_cut_part_is_not_blamed(tmp_path):
    """Cut before the product, ONNX Runtime rounds the 8-bit product's activation again: 47 dB; whole, it is exact."""
    samples = {"x": np.random.default_rng(1).normal(size=(48, 16)).astype(np.float32)}
    bench = Bench(tmp_path, rms_net(), samples, (TensorSpec("x", "float32", ("batch", 16)),))
    model = bench.canonical()
    graph = write(model, "int8", CPU, ranges_of(model, samples, floats_of(model)))[0]
    engine = bench.engine(with_weight(graph, "eps", np.float32(1e-3)), graph, "int8")
    assert any(not check.passed for check in engine.checks())
    names = {name for row in engine.attribution().blamed for name in (row.node, *row.nodes)}
    assert "Add_me" in names and "MatMul_h0" not in names
