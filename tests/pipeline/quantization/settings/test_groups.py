"""Multiplications are counted from inferred shapes, or from those of a run where these cannot be inferred."""

from typing import Any

import numpy as np
import pytest

from pipeline.quantization.insertion_points import find_sites, prepare_model
from pipeline.quantization.settings import groups
from pipeline.quantization.settings.groups import find_groups, gather
from tests.pipeline.quantization.small_nets import attention_net, build, conv_net, images, sentences


@pytest.mark.parametrize(("net", "data"), [(conv_net, images), (attention_net, sentences)])
def test_inferred_shapes_count_what_a_run_counts(net: Any, data: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = prepare_model(net())
    found, runs = find_groups(graph, find_sites(graph)[0]), [(5, data(5, 1)), (3, data(3, 2))]
    inferred = gather(graph, found, runs)[1]
    monkeypatch.setattr(groups, "_infer_sizes", lambda *_: {})
    assert gather(graph, found, runs)[1] == inferred and inferred


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
