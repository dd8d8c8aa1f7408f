"""Sources whose weights are too large for one file, with a threshold of some bytes: exported into shards."""

import numpy as np
import onnx
import pytest

from builders.onnx_graphs.bodies import list_shards
from builders.onnx_graphs.weights import load_graph, to_array
from enginesmith.core.errors import ModelError
from enginesmith.core.types import TensorSpec
from pipeline.sources.onnx_model import list_external, load_onnx
from pipeline.sources.request import ExportRequest
from tests.pipeline.quantization.small_nets import build
from tests.pipeline.sources.exports import BATCH, LINEAR, failed, run, torch_request
from validation.golden.golden_set import GoldenSet

WIDE = TensorSpec("x", "float32", ("batch", 40))


def large_onnx(folder, value: float = 2.0) -> ExportRequest:
    """y = relu(x w), with a weight that nothing reads beside it; both lie in weights.bin."""
    arrays = {"w": np.full((40, 40), value, np.float32), "unread": np.ones((40, 40), np.float32)}
    model = build("float[batch,40] x", "float[batch,40] y", "p = MatMul(x, w) y = Relu(p)", arrays)
    onnx.save(model, folder / "m.onnx", save_as_external_data=True, location="weights.bin", size_threshold=0)
    return ExportRequest("onnx", folder, "m.onnx", (WIDE,), (BATCH,), most_embedded_bytes=1000)


def test_an_onnx_file_is_exported_with_its_weights_in_shards(tmp_path):
    export_result = run(large_onnx(tmp_path))
    (shard,) = list_shards(export_result.onnx)
    assert export_result.onnx.with_name(shard).stat().st_size == 40 * 40 * 4  # without what nothing reads
    assert not failed(export_result)
    noise = GoldenSet.load(export_result.golden).noise
    assert noise is not None and "lie in shards" in noise.reason
    assert any("lie in shards" in note for note in export_result.notes)


@pytest.mark.slow
def test_a_sharded_torch_model_is_the_same(tmp_path):
    code = LINEAR.replace("width=4", "width=400")
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    whole_result = run(torch_request(tmp_path / "a", code))
    result = run(torch_request(tmp_path / "b", code, most_embedded_bytes=1000))
    assert list_shards(result.onnx) and not list_shards(whole_result.onnx) and not failed(result)
    arrays, other = (
        {item.name: to_array(item) for item in load_graph(exported_result.onnx).graph.initializer}
        for exported_result in (whole_result, result)
    )
    assert arrays.keys() == other.keys() and all(arrays[name].shape == other[name].shape for name in arrays)
    assert {item.name for item in result.onnx.parent.iterdir()} >= {"model.onnx", *list_shards(result.onnx)}
    assert not list(result.onnx.parent.glob("*.weights"))


def test_nan_in_an_external_weight_is_found(tmp_path):
    with pytest.raises(ModelError, match="'w'"):
        run(large_onnx(tmp_path, value=np.nan))


def test_a_length_that_contradicts_the_shape_is_refused(tmp_path):
    request = large_onnx(tmp_path)
    model = onnx.load(tmp_path / "m.onnx", load_external_data=False)
    next(entry for entry in model.graph.initializer[0].external_data if entry.key == "length").value = "6000"
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    assert len(list_external(model, tmp_path / "m.onnx")) == 2
    with pytest.raises(ModelError, match="tensor 'w' has 6000 bytes, but its shape needs 6400"):
        load_onnx(tmp_path / "m.onnx", tmp_path, request.most_embedded_bytes)
