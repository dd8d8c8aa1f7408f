"""A fault planted in an engine is blamed on its node, in every family and precision, on the engine's own graph."""

from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
from onnx import ModelProto

from builders.onnxruntime import OnnxRuntime, OrtSession
from builders.onnxruntime.file import restore_names
from builders.types import BuildRequest, Precision, Target
from pipeline.jobs.blobs import runnable
from pipeline.quantization.schemes.cast import cast_float
from pipeline.quantization.schemes.qdq import quantize_int8
from tests.pipeline.quantization.small_nets import CPU, ranges_of, x_net, x_values
from tests.validation.attribution.families import FAMILIES, Family, node_of
from tests.validation.attribution.planted import golden_of, with_names
from validation.attribution.attribute import attribute
from validation.attribution.cuts import shared
from validation.attribution.onnx_graph import OnnxGraph
from validation.attribution.result import Attribution
from validation.attribution.tappable import Step
from validation.budget import default_budget

PRECISIONS: tuple[Precision, ...] = ("fp32", "fp16", "int8")


def variant(family: Family, clean: ModelProto, precision: Precision) -> Callable[[ModelProto], ModelProto]:
    """What makes the graph of a precision; the ranges are those of the clean net."""
    if precision == "fp32":
        return lambda model: model
    if precision == "fp16":
        return lambda model: cast_float(model, "fp16")[0]
    known = onnx.shape_inference.infer_shapes(clean).graph
    floats = (v.name for v in (*known.input, *known.value_info, *known.output) if v.type.tensor_type.elem_type == 1)
    ranges = ranges_of(clean, family.data(), tuple(dict.fromkeys(floats)))
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
        OnnxGraph(engine, folder / "actual", OnnxRuntime(intra_op_threads=1).session, fuses=True),
    )
    failed = [] if built_from is graph else ["sqnr_db"]
    return attribute("engine", precision, *pair, golden_of(family.data()), default_budget("engine", precision), failed)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_fault_is_blamed_on_its_node_and_on_no_other(name: str, precision: Precision, tmp_path: Path) -> None:
    family = FAMILIES[name]
    for seed, (fault, (change, tensor)) in enumerate(family.faults.items()):
        clean = family.net(seed)
        make = variant(family, clean, precision)
        found = attributed(tmp_path / fault, family, make(clean), make(change(clean)), precision)
        planted = node_of(clean, tensor)
        # One kernel computes at most a weighted node with its bias and an activation of two nodes.
        wrong = [row.nodes for row in found.blamed if planted not in row.nodes or len(row.nodes) > 4]
        assert found.blamed and not wrong, f"{fault} in {planted}: {[row.nodes for row in found.blamed]}"
        assert not found.taps.changed


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_clean_engine_is_blamed_nowhere_and_cut_in_many_parts(
    name: str, precision: Precision, tmp_path: Path
) -> None:
    family = FAMILIES[name]
    clean = family.net(0)
    graph = variant(family, clean, precision)(clean)
    found = attributed(tmp_path / "clean", family, graph, graph, precision)
    assert not found.blamed and found.cut >= 4


def test_a_converted_weight_is_no_cut_but_a_part_of_its_reader() -> None:
    steps = [
        Step("DequantizeLinear_w", "DequantizeLinear", (), ("w",)),
        Step("Transpose_t", "Transpose", (), ("t",)),
        Step("MatMul_y", "MatMul", ("x", "w", "t"), ("y",)),
    ]
    assert shared(steps, steps) == ["t", "y"]


def test_tensors_that_an_fp16_engine_computes_in_fp32_have_the_names_of_its_graph(tmp_path: Path) -> None:
    net = with_names(x_net("a = MatMul(x, w) b = Relu(a) y = Concat<axis=0>(a, b)"))
    graph = cast_float(net, "fp16")[0]
    (tmp_path / "engine").mkdir()
    onnx.save(graph, tmp_path / "graph.onnx")
    request = BuildRequest("", "fp16", Target("cpu"), "onnxruntime", (), (), ())
    path = OnnxRuntime().build(request, tmp_path / "graph.onnx", tmp_path / "engine").path
    model = onnx.load(path)
    before = OnnxRuntime().session(path).run(x_values())["y"]
    restore_names(model)
    made = {name: node.op_type for node in model.graph.node for name in node.output}
    # 'a' is computed in fp32, and rounded for the Concat, which computes in fp16: its output is the graph's own.
    assert (made["a"], made["a/narrow"], made["b"], made["y_fp16"]) == ("MatMul", "Cast", "Relu", "Concat")
    onnx.save(model, tmp_path / "renamed.onnx")
    assert (OnnxRuntime().session(tmp_path / "renamed.onnx").run(x_values())["y"] == before).all()
