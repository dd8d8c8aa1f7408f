import math
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import ModelProto, helper

from builders.backends.onnxruntime import OnnxRuntime
from enginesmith.core.types import BuildRequest, Target
from pipeline.quantization.schemes.cast import cast_float, emulate
from tests.pipeline.quantization.small_nets import (
    attention_net,
    build,
    conv_net,
    images,
    maker,
    sentences,
    sqnr_db,
    x_net,
    x_values,
)
from tests.validation.attribution.planted import (
    found,
    golden_of,
    graph,
    weight,
    with_attribute,
    with_names,
    with_weight,
)
from validation.attribution.onnx_graph import OnnxGraph
from validation.attribution.result import describe_taps, summarize
from validation.attribution.sweep import Size, attribute
from validation.limits.budget import default_budget

ATTENTION, CONV = with_names(attention_net()), with_names(conv_net())


def swapped(model: ModelProto, name: str) -> ModelProto:
    return with_weight(model, name, weight(model, name)[::-1])


def with_nan(model: ModelProto, name: str) -> ModelProto:
    values = weight(model, name).copy()
    values.flat[3] = np.nan
    return with_weight(model, name, values)


FAULTS: dict[str, tuple[Callable[[], ModelProto], str]] = {
    "swapped weight": (lambda: swapped(ATTENTION, "wv"), "MatMul_v"),
    "transposed weight": (lambda: with_weight(ATTENTION, "wo", weight(ATTENTION, "wo").T), "MatMul_o"),
    "wrong epsilon": (lambda: with_attribute(ATTENTION, "n", epsilon=1e-3), "LayerNormalization_n"),
    "NaN from one node": (lambda: with_nan(ATTENTION, "bq"), "Add_q"),
    "another table": (lambda: swapped(ATTENTION, "table"), "Gather_x"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_blamed_on_the_node_it_was_planted_in(fault: str, tmp_path: Path) -> None:
    make, node = FAULTS[fault]
    result = found(ATTENTION, make(), sentences(), tmp_path)
    expected = [node, "Transpose_back"] if fault == "another table" else [node]
    assert sorted(row.node for row in result.blamed) == sorted(expected)
    assert result.finding == "blamed" and node in summarize(result) + "".join(expected[1:])
    assert not result.taps.changed and result.taps.compared == 2
    output = next(row for row in result.rows if row.tensor == "scores")
    assert output.inherited.sqnr_db < 80 or output.inherited.nonfinite
    assert fault == "another table" or (output.local.sqnr_db > 100 and not output.local.nonfinite)


def test_a_quantized_tensor_is_measured_from_its_zero(tmp_path: Path) -> None:
    text = "q = QuantizeLinear(x, s, z) d = DequantizeLinear(q, s, z) y = Relu(d)"
    net = with_names(x_net(text, s=np.float32(0.05), z=np.uint8(200), other=np.float32(0.1)))
    bad_model = ModelProto()
    bad_model.CopyFrom(net)
    maker(bad_model, "q").input[1] = "other"
    result = found(net, bad_model, x_values(), tmp_path)
    steps, wrong_array = (np.rint(x_values()["x"] / np.float32(scale)).clip(-200, 55) for scale in (0.05, 0.1))
    assert [row.node for row in result.blamed] == ["QuantizeLinear_q"]
    assert result.blamed[0].local.sqnr_db == pytest.approx(sqnr_db(steps, wrong_array), abs=0.01)


@pytest.mark.parametrize("mask", [float(np.finfo(np.float32).min), -1e9, -np.inf])
def test_a_mask_does_not_hide_its_neighbours(mask: float, tmp_path: Path) -> None:
    net = with_names(x_net("a = MatMul(x, w) b = Add(a, m) y = Softmax(b)", m=np.float32([0, 0, 0, 0, mask])))
    clean_findings = found(net, net, x_values(), tmp_path / "clean", optimized=True)
    assert not clean_findings.blamed
    result = found(net, swapped(net, "w"), x_values(), tmp_path / "faulty", optimized=True)
    assert [(row.node, row.tensor) for row in result.blamed] == [("MatMul_a", "b")]
    wider_findings = found(net, with_weight(net, "m", np.float32([0, 0, 0, 0, -65504])), x_values(), tmp_path / "fp16")
    assert not wider_findings.blamed


@pytest.mark.parametrize("mask", [-3e38, -1e4, -300.0])
def test_a_mask_hides_no_wrong_scores_and_a_dropped_mask_is_blamed(mask: float, tmp_path: Path) -> None:
    """Padding at either end, so that each column is masked somewhere; below -1000 also one whole sample."""
    text = (
        "a = MatMul(x, w) m = Where(pad, fill, o) n = Unsqueeze(m, at) b = Add(a, n) c = Reshape(b, to) y = Softmax(c)"
    )
    weights = {"w": np.random.default_rng(0).normal(size=(5, 5)), "fill": np.float32(mask), "o": np.float32(0)}
    weights |= {"at": np.array([1]), "to": np.array([0, 1, 3, 5])}
    net = with_names(build("float[batch,3,5] x, bool[batch,5] pad", "float[batch,1,3,5] y", text, weights))
    values = np.random.default_rng(1).normal(size=(16, 3, 5)).astype(np.float32)
    columns, rows = np.arange(5), np.arange(16)[:, None]
    pad = (columns < rows % 3) | (columns > 4 - rows % 2) | ((rows == 7) & (mask < -1000))
    arrays, limits = {"x": values, "pad": pad}, replace(default_budget("engine", "int8"), sqnr_db=30)
    faults = [("w", weights["w"] * 1.2, "MatMul_a"), ("fill", 0.0, "Where_m"), ("fill", -np.inf, "Where_m")]
    for index, (name, value, node) in enumerate(faults[: 2 if mask < -1e9 else 3]):
        faulty_model = with_weight(net, name, np.float32(value))
        (row,) = found(net, faulty_model, arrays, tmp_path / str(index), limits, optimized=True).blamed
        assert row.node == node and ("dB by itself, limit" if index < 2 else "NaN or infinite") in row.blamed


@pytest.mark.parametrize(
    "text",
    [
        "y = MatMul(x, w) p = Softmax(y)",
        "a = MatMul(x, w) p = Softmax(a) y = Add(a, p)",
        "a = MatMul(x, w) b = Add(a, one) p = Softmax(b) y = Add(b, p)",
        "a = MatMul(x, w) t = Unsqueeze(a, last) p = Softmax<axis=1>(t) y = Squeeze(p, last)",
        "a = MatMul(x, w) t = Unsqueeze<axes=[2]>(a) p = Softmax(t) y = Squeeze<axes=[2]>(p)",
        "a = MatMul(x, w) t = Reshape(a, parts) p = Softmax(t) y = Reshape(p, whole)",
        "a = MatMul(x, w) t = Unsqueeze(a, last) s = Where(at, t, low) p = Softmax(s) y = Gather<axis=2>(p, first)",
    ],
)
def test_a_large_error_in_a_small_element_is_found_if_it_can_matter(text: str, tmp_path: Path) -> None:
    w = np.float32([[1, 0, 0, 0, -300]]).repeat(5, axis=0)
    names = {"one": np.float32(1), "last": np.array([2]), "parts": np.array([5, -1]), "whole": np.array([-1, 5])}
    names |= {"at": np.array([True, False]), "low": np.float32(-3000), "first": np.array(0)}
    net = with_names(x_net(text, 12 if "axes=" in text else 20, w=w, **names))
    faulty_model, arrays = with_weight(net, "w", w * np.float32([1, 1, 1, 1, 1.5])), {"x": np.abs(x_values()["x"]) + 1}
    (row,) = found(net, faulty_model, arrays, tmp_path).blamed
    assert row.node.startswith("MatMul")


def engine(model: ModelProto, folder: Path, change: Callable[[ModelProto], ModelProto] = lambda model: model) -> Path:
    folder.mkdir()
    onnx.save(model, folder / "model.onnx")
    request = BuildRequest("", "fp32", Target("cpu"), "onnxruntime", (), (), ())
    path = OnnxRuntime().build(request, folder / "model.onnx", folder).path
    onnx.save(change(onnx.load(path)), path)
    return path


def test_an_error_within_the_limit_is_blamed_if_it_is_the_only_one(tmp_path: Path) -> None:
    """What lies behind it makes more of it, and every segment keeps the limit by itself."""
    changed_model = with_weight(ATTENTION, "down", weight(ATTENTION, "down") * np.float32(1 + 1e-4))
    limits = replace(default_budget("engine", "fp32"), sqnr_db=20.0, centered_sqnr_db=None, slice_sqnr_db=None)
    (row,) = found(ATTENTION, changed_model, sentences(), tmp_path, limits).blamed
    assert "MatMul_f" in row.nodes and "within the limit" in row.blamed


def test_many_slices_that_become_one_split_are_taken_apart(tmp_path: Path) -> None:
    """The lengths of the Split are 1024 bytes of integers, which shape inference reads from the model alone."""
    count = 128
    weights = {f"k{i}": np.float32(i + 1) for i in range(count)}
    weights |= {f"i{i}": np.array([i]) for i in range(count + 1)}
    text = " ".join(f"s{i} = Slice(x, i{i}, i{i + 1}, i1) p{i} = Mul(s{i}, k{i})" for i in range(count))
    joined_text = f"y = Concat<axis=1>({', '.join(f'p{i}' for i in range(count))})"
    net = with_names(build(f"float[batch,{count}] x", f"float[batch,{count}] y", f"{text} {joined_text}", weights))
    faulty_model = with_weight(net, "k77", np.float32(5))
    reference = graph(net, tmp_path, "graph")
    path = engine(faulty_model, tmp_path / "engine")
    assert [item.op_type for item in onnx.load(path).graph.node].count("Split") == 1
    tapped_graph = OnnxGraph(path, tmp_path / "taps", OnnxRuntime().open_part, fuses=True)
    values = {"x": np.random.default_rng(0).normal(size=(8, count)).astype(np.float32)}
    limits = default_budget("engine", "fp32")
    attribution = attribute("engine", "fp32", reference, tapped_graph, golden_of(values), limits, ["sqnr_db"])
    assert [row.node for row in attribution.blamed] == ["Mul_p77"]


def chain(length: int, wrong: int | None = None) -> ModelProto:
    rng = np.random.default_rng(0)
    weights = {f"w{i}": np.linalg.qr(rng.normal(size=(5, 5)))[0] for i in range(length)}
    if wrong is not None:
        weights[f"w{wrong}"] = weights[f"w{wrong}"][::-1]
    steps = [f"t{i} = MatMul({'x' if i == 0 else f't{i - 1}'}, w{i})" for i in range(length)]
    return with_names(x_net(" ".join([*steps, f"y = Relu(t{length - 1})"]), **weights))


def test_a_long_model_is_cut_finely_only_where_it_is_worst(tmp_path: Path) -> None:
    lines = list[str]()
    result = found(chain(120), chain(120, wrong=77), x_values(), tmp_path, size=Size(cuts=6), tell=lines.append)
    assert [row.node for row in result.blamed] == ["MatMul_t77"] and result.blamed[0].nodes == ("MatMul_t77",)
    assert result.points == 121 and result.cut < 30
    assert lines[1].startswith("round 1: ") and lines[-1].endswith(f": {result.cut} cuts of 121 possible")


def test_memory_is_bounded_by_windows_and_the_answer_is_the_same(tmp_path: Path) -> None:
    faulty_model = swapped(ATTENTION, "wv")
    whole_findings = found(ATTENTION, faulty_model, sentences(), tmp_path / "whole")
    small_findings = found(ATTENTION, faulty_model, sentences(), tmp_path / "small", size=Size(window_bytes=1 << 13))
    assert small_findings.rows == whole_findings.rows and small_findings.taps.compared > whole_findings.taps.compared


def test_a_tap_that_changes_the_outputs_is_reported(tmp_path: Path) -> None:
    reference, candidate = graph(CONV, tmp_path, "a"), Shifted(graph(CONV, tmp_path, "b"))
    result = attribute("engine", "fp32", reference, candidate, golden_of(images()), default_budget("engine", "fp32"))
    assert 0 < result.taps.changed["logits"].max_rel < 1e-2
    assert "the ranking is of the tapped model" in describe_taps(result) and "logits by" in describe_taps(result)


class Shifted:
    """A model whose outputs move when it is tapped, as when a runtime then chooses other kernels."""

    def __init__(self, inner: OnnxGraph) -> None:
        self.inner, self.steps, self.outputs, self.fuses = inner, inner.steps, inner.outputs, True
        self.whole, self.open_segment, self.shapes = inner.whole, inner.open_segment, inner.shapes

    @contextmanager
    def open_tapped(self, tensors, whole):
        with self.inner.open_tapped(tensors, whole) as session:
            plain_run = session.run
            session.run = lambda inputs: {name: value + np.float32(0.001) for name, value in plain_run(inputs).items()}
            yield session


def test_a_node_that_fails_to_run_is_named(tmp_path: Path) -> None:
    text = "a = Mul(x, x) b = Reshape(a, to) c = Reshape(b, back) y = MatMul(c, w)"
    net = with_names(x_net(text, to=np.array([-1]), back=np.array([-1, 5])))
    bad_model = with_weight(net, "to", np.array([35]))
    result = found(net, bad_model, x_values(), tmp_path)
    assert [row.node for row in result.blamed] == ["Reshape_b"] and "failed while running" in result.blamed[0].blamed
    assert result.taps.compared == 0 and "did not run" in describe_taps(result)
    assert all(row.local.sqnr_db == math.inf for row in result.rows if row.node != "Reshape_b")


def test_control_flow_reads_given_activations_and_integers_are_decisions(tmp_path: Path) -> None:
    later_graph, other_graph = (
        onnx.parser.parse_graph(f"{kind} () => (float[] {kind}_out) {{ {kind}_out = {kind}(a, a) }}")
        for kind in ("Add", "Mul")
    )
    net = build("float[batch,5] x", "int64[batch] y", "a = Mul(x, w) z = Add(b, b) y = ArgMax<axis=1,keepdims=0>(z)",
                {"w": np.float32(2), "yes": np.array(True)})  # fmt: skip
    branch = helper.make_node("If", ["yes"], ["b"], name="If_b", then_branch=later_graph, else_branch=other_graph)
    net.graph.node.insert(1, branch)
    net = with_names(net)
    result = found(net, with_weight(net, "w", np.float32(-2)), x_values(), tmp_path)
    assert [row.node for row in result.blamed] == ["Mul_a"]
    result = found(net, with_attribute(net, "y", axis=0), x_values(), tmp_path / "axis")
    assert [row.node for row in result.blamed] == ["ArgMax_y"]


def test_a_sequence_is_not_cut_but_tensors_made_from_it_are(tmp_path: Path) -> None:
    text = "a = Mul(x, w) s = SequenceConstruct(a, x) b = ConcatFromSequence<axis=1>(s) y = Neg(b)"
    net = with_names(build("float[batch,5] x", "float[batch,10] y", text, {"w": np.float32(2)}))
    result = found(net, with_weight(net, "w", np.float32(-2)), x_values(), tmp_path)
    assert [row.node for row in result.blamed] == ["Mul_a"] and result.points == 3


def test_the_cases_are_those_where_the_outputs_are_furthest_apart(tmp_path: Path) -> None:
    values = x_values()["x"]
    values[9] = 1e4  # only this one overflows
    net = with_names(x_net("a = MatMul(x, w) c = Abs(a) b = Mul(a, c) y = Neg(b)"))
    pair = graph(net, tmp_path, "a"), graph(emulate(cast_float(net, "fp16")[0]), tmp_path, "b")
    golden = golden_of({"x": values}, groups=16)
    result = attribute("quantization", "fp16", *pair, golden, default_budget("quantization", "fp16"), ["nonfinite"],
                       replace(Size(), cases=1))  # fmt: skip
    assert result.cases == ("golden 9",)
    assert result.rows[0].local.nonfinite


def test_attribution_of_a_slice_uses_enough_samples_to_judge_it(tmp_path: Path) -> None:
    """Four cases of one sample hold slices of four elements, of which none is judged: no node would be blamed."""
    net = with_names(x_net("a = MatMul(x, w) y = Add(a, a)", w=np.eye(5) * [1e3, 1e3, 1e3, 1e3, 1.0]))
    off_eye = np.eye(5) * [1e3, 1e3, 1e3, 1e3, 1.02]
    pair = graph(net, tmp_path, "a"), graph(with_weight(net, "w", off_eye), tmp_path, "b")
    limits = replace(default_budget("engine", "fp32"), sqnr_db=40.0, max_rel=0.1)
    for failed_text, cases in (("engine slice_sqnr_db of y", 16), ("engine sqnr_db of y", 4)):
        result = attribute("engine", "fp32", *pair, golden_of(x_values(), groups=16), limits, [failed_text])
        assert len(result.cases) == cases
        assert cases == 4 or [row.node for row in result.blamed] == ["MatMul_a"]


def test_outputs_in_the_golden_set_replace_runs_of_the_reference(tmp_path: Path) -> None:
    golden, limits = golden_of(sentences()), default_budget("engine", "fp32")
    pair = graph(ATTENTION, tmp_path, "clean"), graph(swapped(ATTENTION, "wv"), tmp_path, "faulty")
    with pair[0].whole() as session:
        answered_golden = replace(
            golden, cases=tuple(replace(case, expected=session.run(case.inputs)) for case in golden.cases)
        )
    run = attribute("engine", "fp32", *pair, golden, limits, ("engine sqnr_db",))
    pair[0].whole = lambda: pytest.fail("the reference was run whole")  # type: ignore[method-assign]
    assert attribute("engine", "fp32", *pair, answered_golden, limits, ("engine sqnr_db",), answered=True) == run
