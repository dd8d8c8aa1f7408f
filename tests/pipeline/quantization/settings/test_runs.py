"""Sessions of trials: Q/DQ as it is written, and weights that are dequantized once."""

import tempfile
from typing import Any

import numpy as np
import pytest

from builders.onnx_graphs.weights import has_external
from pipeline.quantization.insertion_points import find_sites, prepare_model
from pipeline.quantization.schemes.qdq import quantize_int8
from pipeline.quantization.settings import groups
from pipeline.quantization.settings.groups import find_groups, gather
from pipeline.quantization.settings.runs import SessionRunner, find_mask, with_weights_inside, with_weights_outside
from tests.pipeline.quantization.search.outlier_nets import all_ranges, choose, noise, outlier_net, runs
from tests.pipeline.quantization.small_nets import (
    CPU,
    TENSORRT_FP32,
    attention_net,
    build,
    conv_net,
    images,
    run,
    sentences,
)

NETS = {"outliers": (outlier_net, noise), "convolutions": (conv_net, images)}


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("scheme", [CPU, TENSORRT_FP32], ids=["cpu", "tensorrt"])
def test_an_exact_session_gives_the_bits_of_the_graph_as_it_is_written(name, scheme):
    net, data = NETS[name]
    model, inputs = net(), data(32, 1)
    graph, _ = quantize_int8(model, all_ranges(model, inputs), scheme)
    (result,) = SessionRunner(graph, exact=True).run(inputs).values()
    np.testing.assert_array_equal(result, run(graph, inputs, optimized=False))
    (fused,) = SessionRunner(graph).run(inputs).values()
    assert np.abs(fused - result).max() < 0.05 * np.abs(result).max()


def test_graphs_share_weights_that_lie_in_a_file_and_what_was_made_of_them_goes_once_it_is_open(tmp_path):
    model, inputs = outlier_net(), noise(8, 1)
    shared = with_weights_outside(model, tmp_path)
    graphs = [quantize_int8(item, all_ranges(model, inputs), CPU)[0] for item in (model, shared)]
    assert graphs[1].ByteSize() < graphs[0].ByteSize()
    assert len([*tmp_path.glob("loose-*")]) > 0, "int8 weights, beside the file that they were made of"
    opened = [SessionRunner(graph) for graph in graphs]
    assert [path.name for path in tmp_path.iterdir()] == ["weights"]
    (one, other) = (next(iter(session.run(inputs).values())) for session in opened)
    np.testing.assert_array_equal(one, other)


def test_a_chosen_model_holds_its_weights_and_none_that_nothing_reads(tmp_path):
    model, inputs = outlier_net(), noise(8, 1)
    shared = with_weights_outside(model, tmp_path)
    shared.graph.initializer.add().CopyFrom(shared.graph.initializer[0])
    shared.graph.initializer[-1].name = "unread"
    result = with_weights_inside(shared)
    assert not has_external(result) and has_external(shared)
    assert {item.name for item in result.graph.initializer} == {item.name for item in model.graph.initializer}
    np.testing.assert_array_equal(run(result, inputs), run(model, inputs))


def test_a_search_leaves_no_file_that_its_model_needs(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    model, inputs = outlier_net(residual=True), noise(64, 1)
    result = choose(model, all_ranges(model, inputs), CPU, runs(inputs))
    assert not [*tmp_path.iterdir()] and not has_external(result.model)
    assert any("_factors" in item.name for item in result.model.graph.initializer), "smoothed, and not folded"


@pytest.mark.parametrize(("net", "data"), [(conv_net, images), (attention_net, sentences)])
def test_inferred_shapes_count_what_a_run_counts(net: Any, data: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = prepare_model(net())
    result, runs = find_groups(graph, find_sites(graph)[0]), [(5, data(5, 1)), (3, data(3, 2))]
    inferred = gather(graph, result, runs)[1]
    monkeypatch.setattr(groups, "_infer_sizes", lambda *_: {})
    assert gather(graph, result, runs)[1] == inferred and inferred


def test_what_a_model_says_of_sizes_does_not_count() -> None:
    model = build(
        "float[batch,4,9,8] x", "float[1,6,9,8] y", "y = Conv<pads=[1,1,1,1]>(x, w)", {"w": np.ones((6, 4, 3, 3))}
    )
    graph, inputs = prepare_model(model), {"x": np.ones((2, 4, 9, 8), np.float32)}
    (work,) = gather(graph, find_groups(graph, find_sites(graph)[0]), [(2, inputs)])[1].values()
    assert work.macs == 6 * 9 * 8 * 4 * 3 * 3


def test_sizes_that_values_decide_are_seen_in_the_run() -> None:
    text = "n = NonZero(x)\n t = Transpose<perm=[1,0]>(n)\n f = Cast<to=1>(t)\n y = MatMul(f, w)"
    model = build("float[batch,4] x", "float[rows,6] y", text, {"w": np.ones((2, 6))})
    graph, inputs = prepare_model(model), {"x": np.eye(4, dtype=np.float32)}
    (work,) = gather(graph, find_groups(graph, find_sites(graph)[0]), [(4, inputs)])[1].values()
    assert work.macs == 4 * 6 * 2 / 4


@pytest.mark.parametrize(("last", "counted"), [("p = Mul(h, m)", 5), ("p = Identity(h)", 8)])
def test_rows_of_padding_count_in_no_statistics_where_no_output_depends_on_them(last: str, counted: int) -> None:
    text = f"""e = Gather(table, ids)
        h = MatMul(e, w)
        f = Cast<to=1>(mask)
        m = Unsqueeze(f, axis)
        {last}
        y = ReduceMean<keepdims=0>(p, row)"""
    tables = {"table": np.random.default_rng(0).normal(size=(9, 4)), "w": np.ones((4, 6)), "axis": [2], "row": [1]}
    model = prepare_model(build("int64[b,s] ids, int64[b,s] mask", "float[b,6] y", text, tables))
    whole = {"ids": np.arange(8).reshape(2, 4), "mask": np.ones((2, 4), np.int64)}
    padded = {**whole, "mask": np.array([[1, 1, 1, 0], [1, 1, 0, 0]])}
    mask = find_mask(SessionRunner(model), [(2, whole), (2, padded)])
    result = gather(model, find_groups(model, find_sites(model)[0]), [(2, padded)], mask=mask)[0]
    assert [statistics.count for statistics in result.values()] == [counted]


@pytest.mark.parametrize(
    ("given", "output", "text"),
    [
        ("int64", "int64[b] y", "y = ArgMax<axis=1, keepdims=0>(f)"),
        ("int64", "float[b,s] y", "y = Cast<to=1>(mask)"),
        ("int64", "float[n] y", "t = ReduceSum(ids)\n n = Reshape(t, flat)\n y = Reshape(f, n)"),
        ("float", "float[b,s] y", "m = Cast<to=9>(mask)\n y = Where(m, ids, zero)"),
    ],
)
def test_an_input_of_zeros_and_ones_is_not_always_a_mask(given: str, output: str, text: str) -> None:
    constants = {"zero": np.float32(0), "flat": [-1]}
    model = build(f"{given}[b,s] ids, int64[b,s] mask", output, f"f = Cast<to=1>(ids)\n {text}", constants)
    ids = np.array([[0, 3, 2, 1], [1, 0, 1, 0]], {"float": "f4"}.get(given, given))
    inputs = {"ids": ids, "mask": np.array([[1, 1, 1, 0], [1, 1, 1, 1]])}
    assert find_mask(SessionRunner(prepare_model(model)), [(2, inputs)]) is None
