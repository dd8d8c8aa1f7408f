import tempfile
from pathlib import Path

import numpy as np
import pytest
from onnx import ModelProto, TensorProto, helper

from builders.onnx_graphs.bodies import list_shards
from builders.onnx_graphs.outline import save_graph
from builders.onnx_graphs.weights import load_graph, set_place
from builders.reference import ReferenceSession
from enginesmith.core.errors import IntegrityError
from enginesmith.registry.store.base import Store
from pipeline.compile.steps.blobs import StoredGraph, fetch_graph, put_graph, runnable
from validation.attribution.onnx_graph import OnnxGraph

WIDTH = 32


def model_in(folder: Path, dtype: type = np.float32) -> ModelProto:
    """y = x times a weight that lies in a file of the folder."""
    (folder / "w").write_bytes(np.eye(WIDTH, dtype=dtype).tobytes())
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    weight = TensorProto(name="w", data_type=kind, dims=[WIDTH, WIDTH])
    set_place(weight, str(folder / "w"), 0, WIDTH * WIDTH * np.dtype(dtype).itemsize)
    value_infos = [[helper.make_tensor_value_info(name, kind, ["n", WIDTH])] for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"], name="m")], "g", *value_infos, [weight])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)


@pytest.fixture
def stored(tmp_path: Path, store: Store) -> StoredGraph:
    (tmp_path / "made").mkdir()
    save_graph(model_in(tmp_path / "made"), tmp_path / "made" / "graph.onnx")
    return put_graph(store, tmp_path / "made" / "graph.onnx")


def test_a_graph_and_its_shards_use_disk_space_once(tmp_path: Path, store: Store, stored: StoredGraph) -> None:
    ((shard, size),) = stored.shards
    (tmp_path / "work").mkdir()
    assert size == 4 * WIDTH * WIDTH == store.stored_size(shard)
    graph = fetch_graph(store, stored.blob.digest, tmp_path / "work" / "graph.onnx")
    for folder in (tmp_path / "made", graph.parent):
        assert (folder / shard).samefile(store.path(shard))
    assert graph.samefile(store.path(stored.blob.digest))
    load_graph(graph)


def test_another_file_system_gets_a_copy(store: Store, stored: StoredGraph) -> None:
    ((shard, _),) = stored.shards
    if not Path("/dev/shm").is_dir() or Path("/dev/shm").stat().st_dev == store.path(shard).stat().st_dev:
        pytest.skip("there is one file system here")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        graph = fetch_graph(store, stored.blob.digest, Path(folder) / "graph.onnx")
        assert graph.with_name(shard).read_bytes() == store.path(shard).read_bytes()


@pytest.mark.parametrize("which", ["graph", "shard"])
def test_a_damaged_blob_is_discarded(tmp_path: Path, store: Store, stored: StoredGraph, which: str) -> None:
    damaged_digest = stored.blob.digest if which == "graph" else stored.shards[0][0]
    store.path(damaged_digest).chmod(0o600)
    store.path(damaged_digest).write_bytes(bytes(store.size(damaged_digest)))
    (tmp_path / "work").mkdir()
    with pytest.raises(IntegrityError, match="the damaged blob was moved away"):
        fetch_graph(store, stored.blob.digest, tmp_path / "work" / "graph.onnx")
    assert not store.has(damaged_digest)


def test_stored_blobs_are_not_uploaded_again(tmp_path: Path, store: Store, stored: StoredGraph) -> None:
    ((shard, _),) = stored.shards
    ino_before = store.path(shard).stat().st_ino
    (tmp_path / "again").mkdir()
    save_graph(model_in(tmp_path / "again"), tmp_path / "again" / "graph.onnx")
    assert put_graph(store, tmp_path / "again" / "graph.onnx") == stored
    assert store.path(shard).stat().st_ino == ino_before


def test_an_emulated_graph_keeps_the_place_of_its_16_bit_weights(tmp_path: Path) -> None:
    path = tmp_path / "graph.onnx"
    save_graph(model_in(tmp_path, np.float16), path)
    emulated_path = runnable(path, "fp16")
    assert list_shards(emulated_path) == list_shards(path)
    assert [node.op_type for node in load_graph(emulated_path).graph.node].count("Cast") >= 2


def test_other_engines_have_no_shards(tmp_path: Path, store: Store) -> None:
    path = tmp_path / "engine.plan"
    save_graph(model_in(tmp_path), path)
    assert put_graph(store, path).shards == ()


def test_a_partial_graph_opens_over_its_shards(tmp_path: Path) -> None:
    path = tmp_path / "graph.onnx"
    save_graph(model_in(tmp_path), path)
    graph = OnnxGraph(path, tmp_path / "parts", ReferenceSession, fuses=False)
    x = np.ones((2, WIDTH), np.float32)
    with graph.open_tapped(["y"], whole=False) as session:
        assert np.array_equal(session.run({"x": x})["y"], x)
