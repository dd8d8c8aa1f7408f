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
from tests.pipeline.quantization import small_nets as nets
from tests.pipeline.quantization.search.outlier_nets import all_ranges, choose, noise, outlier_net, runs

NETS = {"outliers": (outlier_net, noise), "convolutions": (nets.conv_net, nets.images)}


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("scheme", [nets.CPU, nets.TENSORRT_FP32], ids=["cpu", "tensorrt"])
def test_an_exact_session_gives_the_written_graphs_bits(name, scheme):
    net, data = NETS[name]
    model, inputs = net(), data(32, 1)
    graph, _ = quantize_int8(model, all_ranges(model, inputs), scheme)
    (actual,) = SessionRunner(graph, exact=True).run(inputs).values()
    np.testing.assert_array_equal(actual, nets.run(graph, inputs, optimized=False))
    (fused_value,) = SessionRunner(graph).run(inputs).values()
    assert np.abs(fused_value - actual).max() < 0.05 * np.abs(actual).max()


def test_graphs_share_weights_in_a_file_and_free_their_copies(tmp_path):
    model, inputs = outlier_net(), noise(8, 1)
    shared_model = with_weights_outside(model, tmp_path)
    graphs = [quantize_int8(item, all_ranges(model, inputs), nets.CPU)[0] for item in (model, shared_model)]
    assert graphs[1].ByteSize() < graphs[0].ByteSize()
    assert len([*tmp_path.glob("loose-*")]) > 0, "int8 weights, beside the file that they were made of"
    opened_runners = [SessionRunner(graph) for graph in graphs]
    assert [path.name for path in tmp_path.iterdir()] == ["weights"]
    (output, other_output) = (next(iter(session.run(inputs).values())) for session in opened_runners)
    np.testing.assert_array_equal(output, other_output)


def test_a_chosen_model_has_only_weights_that_are_read(tmp_path):
    model, inputs = outlier_net(), noise(8, 1)
    shared_model = with_weights_outside(model, tmp_path)
    shared_model.graph.initializer.add().CopyFrom(shared_model.graph.initializer[0])
    shared_model.graph.initializer[-1].name = "unread"
    complete_model = with_weights_inside(shared_model)
    assert not has_external(complete_model) and has_external(shared_model)
    assert {item.name for item in complete_model.graph.initializer} == {item.name for item in model.graph.initializer}
    np.testing.assert_array_equal(nets.run(complete_model, inputs), nets.run(model, inputs))


def test_a_search_leaves_no_file_behind_and_its_model_needs_none(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    model, inputs = outlier_net(residual=True), noise(64, 1)
    choice = choose(model, all_ranges(model, inputs), nets.CPU, runs(inputs))
    assert not [*tmp_path.iterdir()] and not has_external(choice.model)
    assert any("_factors" in item.name for item in choice.model.graph.initializer), "smoothed, and not folded"


@pytest.mark.parametrize(("net", "data"), [(nets.conv_net, nets.images), (nets.attention_net, nets.sentences)])
def test_inferred_shapes_give_the_counts_of_a_run(net: Any, data: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = prepare_model(net())
    weighted_groups, runs = find_groups(graph, find_sites(graph)[0]), [(5, data(5, 1)), (3, data(3, 2))]
    inferred_sums = gather(graph, weighted_groups, runs)[1]
    monkeypatch.setattr(groups, "_infer_sizes", lambda *_: {})
    assert gather(graph, weighted_groups, runs)[1] == inferred_sums and inferred_sums


def test_declared_sizes_do_not_count() -> None:
    model = nets.build(
        "float[batch,4,9,8] x", "float[1,6,9,8] y", "y = Conv<pads=[1,1,1,1]>(x, w)", {"w": np.ones((6, 4, 3, 3))}
    )
    graph, inputs = prepare_model(model), {"x": np.ones((2, 4, 9, 8), np.float32)}
    (work,) = gather(graph, find_groups(graph, find_sites(graph)[0]), [(2, inputs)])[1].values()
    assert work.macs == 6 * 9 * 8 * 4 * 3 * 3


def test_data_dependent_sizes_are_observed_in_the_run() -> None:
    text = "n = NonZero(x)\n t = Transpose<perm=[1,0]>(n)\n f = Cast<to=1>(t)\n y = MatMul(f, w)"
    model = nets.build("float[batch,4] x", "float[rows,6] y", text, {"w": np.ones((2, 6))})
    graph, inputs = prepare_model(model), {"x": np.eye(4, dtype=np.float32)}
    (work,) = gather(graph, find_groups(graph, find_sites(graph)[0]), [(4, inputs)])[1].values()
    assert work.macs == 4 * 6 * 2 / 4


@pytest.mark.parametrize(("last", "counted"), [("p = Mul(h, m)", 5), ("p = Identity(h)", 8)])
def test_padding_rows_are_excluded_from_statistics_if_no_output_depends_on_them(last: str, counted: int) -> None:
    text = f"""e = Gather(table, ids)
        h = MatMul(e, w)
        f = Cast<to=1>(mask)
        m = Unsqueeze(f, axis)
        {last}
        y = ReduceMean<keepdims=0>(p, row)"""
    tables = {"table": np.random.default_rng(0).normal(size=(9, 4)), "w": np.ones((4, 6)), "axis": [2], "row": [1]}
    model = prepare_model(nets.build("int64[b,s] ids, int64[b,s] mask", "float[b,6] y", text, tables))
    whole_fields = {"ids": np.arange(8).reshape(2, 4), "mask": np.ones((2, 4), np.int64)}
    padded_fields = {**whole_fields, "mask": np.array([[1, 1, 1, 0], [1, 1, 0, 0]])}
    mask = find_mask(SessionRunner(model), [(2, whole_fields), (2, padded_fields)])
    gathered_sums = gather(model, find_groups(model, find_sites(model)[0]), [(2, padded_fields)], mask=mask)[0]
    assert [statistics.count for statistics in gathered_sums.values()] == [counted]


@pytest.mark.parametrize(
    ("dtype", "output", "text"),
    [
        ("int64", "int64[b] y", "y = ArgMax<axis=1, keepdims=0>(f)"),
        ("int64", "float[b,s] y", "y = Cast<to=1>(mask)"),
        ("int64", "float[n] y", "t = ReduceSum(ids)\n n = Reshape(t, flat)\n y = Reshape(f, n)"),
        ("float", "float[b,s] y", "m = Cast<to=9>(mask)\n y = Where(m, ids, zero)"),
    ],
)
def test_an_input_of_zeros_and_ones_is_not_always_a_mask(dtype: str, output: str, text: str) -> None:
    constants = {"zero": np.float32(0), "flat": [-1]}
    model = nets.build(f"{dtype}[b,s] ids, int64[b,s] mask", output, f"f = Cast<to=1>(ids)\n {text}", constants)
    ids = np.array([[0, 3, 2, 1], [1, 0, 1, 0]], {"float": "f4"}.get(dtype, dtype))
    inputs = {"ids": ids, "mask": np.array([[1, 1, 1, 0], [1, 1, 1, 1]])}
    assert find_mask(SessionRunner(prepare_model(model)), [(2, inputs)]) is None
