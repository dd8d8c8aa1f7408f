"""Sessions of trials: Q/DQ as it is written, and weights that are dequantized once."""

import tempfile

import numpy as np
import pytest

from builders.onnx_graphs.weights import has_external
from pipeline.quantization.schemes.qdq import quantize_int8
from pipeline.quantization.settings.runs import SessionRunner, with_weights_inside, with_weights_outside
from tests.pipeline.quantization.search.outlier_nets import all_ranges, choose, noise, outlier_net, runs
from tests.pipeline.quantization.small_nets import CPU, TENSORRT_FP32, conv_net, images, run

NETS = {"outliers": (outlier_net, noise), "convolutions": (conv_net, images)}


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("scheme", [CPU, TENSORRT_FP32], ids=["cpu", "tensorrt"])
def test_an_exact_session_gives_the_bits_of_the_graph_as_it_is_written(name, scheme):
    net, data = NETS[name]
    model, given = net(), data(32, 1)
    graph, _ = quantize_int8(model, all_ranges(model, given), scheme)
    (found,) = SessionRunner(graph, exact=True).run(given).values()
    np.testing.assert_array_equal(found, run(graph, given, optimized=False))
    (fused,) = SessionRunner(graph).run(given).values()
    assert np.abs(fused - found).max() < 0.05 * np.abs(found).max()


def test_graphs_share_weights_that_lie_in_a_file_and_what_was_made_of_them_goes_once_it_is_open(tmp_path):
    model, given = outlier_net(), noise(8, 1)
    shared = with_weights_outside(model, tmp_path)
    graphs = [quantize_int8(item, all_ranges(model, given), CPU)[0] for item in (model, shared)]
    assert graphs[1].ByteSize() < graphs[0].ByteSize()
    assert len([*tmp_path.glob("loose-*")]) > 0, "int8 weights, beside the file that they were made of"
    opened = [SessionRunner(graph) for graph in graphs]
    assert [path.name for path in tmp_path.iterdir()] == ["weights"]
    (one, other) = (next(iter(session.run(given).values())) for session in opened)
    np.testing.assert_array_equal(one, other)


def test_a_chosen_model_holds_its_weights_and_none_that_nothing_reads(tmp_path):
    model, given = outlier_net(), noise(8, 1)
    shared = with_weights_outside(model, tmp_path)
    shared.graph.initializer.add().CopyFrom(shared.graph.initializer[0])
    shared.graph.initializer[-1].name = "unread"
    found = with_weights_inside(shared)
    assert not has_external(found) and has_external(shared)
    assert {item.name for item in found.graph.initializer} == {item.name for item in model.graph.initializer}
    np.testing.assert_array_equal(run(found, given), run(model, given))


def test_a_search_leaves_no_file_that_its_model_needs(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    model, given = outlier_net(residual=True), noise(64, 1)
    found = choose(model, all_ranges(model, given), CPU, runs(given))
    assert not [*tmp_path.iterdir()] and not has_external(found.model)
    assert any("_factors" in item.name for item in found.model.graph.initializer), "smoothed, and not folded"
