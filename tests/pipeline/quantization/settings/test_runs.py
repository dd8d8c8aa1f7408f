"""Sessions of trials: Q/DQ as it is written, and weights that are dequantized once."""

import numpy as np
import pytest

from pipeline.quantization.schemes.qdq import quantize_int8
from pipeline.quantization.settings.runs import SessionRunner
from tests.pipeline.quantization.search.outlier_nets import all_ranges, noise, outlier_net
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
