import hashlib
import subprocess
import sys

import numpy as np
import onnx
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

from builders.onnx_graphs.bodies import graph_bytes, has_shards, list_shards, list_weight_files
from builders.onnx_graphs.outline import in_shards, link_shards, save_graph, write_graph
from builders.onnx_graphs.weights import (
    LOOSE,
    check_lengths,
    from_array,
    is_external,
    load_graph,
    place_of,
    set_place,
    size_of,
    to_array,
    with_weights,
    without_weights,
)
from builders.reference import ReferenceSession
from enginesmith.core.errors import ModelError

WIDTH = 32
SHARD = 3 * 4 * WIDTH * WIDTH  # three weights


def weight(index: int) -> np.ndarray:
    return np.random.default_rng(index).standard_normal((WIDTH, WIDTH)).astype(np.float32)


def chain(count: int, folder, **other: np.ndarray) -> ModelProto:
    """x times `count` weights w0, w1 ..., which lie in one file of the folder; `other` replaces some."""
    value = helper.make_tensor_value_info
    nodes = [helper.make_node("MatMul", [f"x{i}" if i else "x", f"w{i}"], [f"x{i + 1}"]) for i in range(count)]
    nodes.append(helper.make_node("Add", [f"x{count}", "bias"], ["y"]))
    data, weights = b"", [numpy_helper.from_array(np.zeros(WIDTH, np.float32), "bias")]
    for index in range(count):
        array = other.get(f"w{index}", weight(index))
        tensor = TensorProto(name=f"w{index}", data_type=TensorProto.FLOAT, dims=array.shape)
        set_place(tensor, str(folder / "weights.bin"), len(data), array.nbytes)
        data += array.tobytes()
        weights.append(tensor)
    (folder / "weights.bin").write_bytes(data)
    end_values = [[value(name, TensorProto.FLOAT, ["n", WIDTH])] for name in ("x", "y")]
    graph = helper.make_graph(nodes, "chain", *end_values, weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)


def saved(folder, count=6, **other):
    folder.mkdir()
    path = folder / "graph.onnx"
    save_graph(chain(count, folder, **other), path, SHARD)
    (folder / "weights.bin").unlink()
    return path


def test_a_shard_is_named_by_its_bytes_and_the_graph_runs_from_there(tmp_path):
    path = saved(tmp_path / "a")
    names = list_shards(path)
    assert len(names) == 2 and {item.name for item in path.parent.iterdir()} == {"graph.onnx", *names}
    for name in names:
        assert hashlib.sha256((path.parent / name).read_bytes()).hexdigest() == name
    x = np.ones((2, WIDTH), np.float32)
    expected = x
    for index in range(6):
        expected = expected @ weight(index)
    with ReferenceSession(path) as session:
        assert np.allclose(session.run({"x": x})["y"], expected, rtol=1e-4)
    model = load_graph(path)
    assert np.array_equal(to_array(model.graph.initializer[1]), weight(0))
    assert in_shards(model) and size_of(model) > 6 * 4 * WIDTH * WIDTH > path.stat().st_size


def test_a_changed_weight_changes_its_shard_alone(tmp_path):
    path_before, after = saved(tmp_path / "a"), saved(tmp_path / "b", w4=weight(99))
    assert len({*list_shards(path_before)} & {*list_shards(after)}) == 1
    assert list_shards(saved(tmp_path / "c")) == list_shards(path_before)
    assert saved(tmp_path / "d").read_bytes() == path_before.read_bytes()


def test_vectors_have_shards_of_their_own(tmp_path):
    """An int8 graph's biases change with the ranges of activations, and so with any weight before them."""
    names = []
    for index, folder in enumerate((tmp_path / "a", tmp_path / "b")):
        folder.mkdir()
        model = chain(2, folder)
        biases = [np.full(300, 7 + number * index, np.int8) for number in range(2)]
        items = [numpy_helper.from_array(np.repeat(array, 4), f"w{n}_bias") for n, array in enumerate(biases)]
        model.graph.initializer.extend(items)
        save_graph(model, folder / "graph.onnx")
        names.append({*list_shards(folder / "graph.onnx")})
    assert len(names[0]) == len(names[1]) == 2 and len(names[0] & names[1]) == 1


def test_weights_are_widened_just_before_they_are_used(tmp_path):
    model = chain(3, tmp_path)
    narrow_tensor = numpy_helper.from_array(weight(7).astype(np.float16), "narrow")
    model.graph.initializer.append(narrow_tensor)
    makes = [helper.make_node("Cast", ["narrow"], ["wide"], to=1), helper.make_node("Transpose", ["wide"], ["turned"])]
    last_node = helper.make_node("MatMul", ["y", "turned"], ["z"])
    model.graph.node.extend([*makes, last_node])
    model.graph.output[0].name = "z"
    types_before = [node.op_type for node in model.graph.node]
    save_graph(model, tmp_path / "graph.onnx", SHARD)
    after = [node.op_type for node in load_graph(tmp_path / "graph.onnx").graph.node]
    assert types_before == ["MatMul"] * 3 + ["Add", "Cast", "Transpose", "MatMul"]
    assert after == ["Cast", "Transpose", *["MatMul"] * 3, "Add", "MatMul"]
    onnx.checker.check_model(without_weights(load_graph(tmp_path / "graph.onnx")))


def test_a_run_holds_one_wide_weight_at_a_time(tmp_path):
    """ONNX Runtime's own order, which the place of the nodes decides: 8 weights of 16 MiB in float32."""
    width, count, value = 2048, 8, helper.make_tensor_value_info
    nodes, weights, data = [], [], np.zeros((width, width), np.float16)
    for index in range(count):
        nodes.append(helper.make_node("Cast", [f"w{index}"], [f"wide{index}"], to=1))
        nodes.append(helper.make_node("MatMul", [f"x{index}" if index else "x", f"wide{index}"], [f"x{index + 1}"]))
        weights.append(numpy_helper.from_array(data, f"w{index}"))
    end_values = [[value(name, TensorProto.FLOAT, [1, width])] for name in ("x", f"x{count}")]
    graph = helper.make_graph(nodes, "wide", *end_values, weights)
    save_graph(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9), tmp_path / "g.onnx")
    code = (
        "import sys, numpy as np; from pathlib import Path; from builders.reference import ReferenceSession\n"
        "import os; from builders.execution.process import held_mib\n"
        "with ReferenceSession(Path(sys.argv[1])) as session:\n"
        "    before = held_mib(os.getpid()); session.run({'x': np.zeros((1, 2048), np.float32)})\n"
        "    print(held_mib(os.getpid()) - before)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "g.onnx"], capture_output=True, text=True, check=True
    )
    assert float(result.stdout) < 64 < 16 * count


def test_a_half_used_shard_stays(tmp_path):
    path = saved(tmp_path / "a")
    model = load_graph(path)
    model.graph.initializer[2].CopyFrom(numpy_helper.from_array(weight(50), "w1"))  # two of three weights stay
    save_graph(model, tmp_path / "a" / "two.onnx", SHARD)
    assert {*list_shards(path)} < {*list_shards(tmp_path / "a" / "two.onnx")}
    model.graph.initializer[1].CopyFrom(numpy_helper.from_array(weight(51), "w0"))  # one stays: it moves
    save_graph(model, tmp_path / "a" / "one.onnx", SHARD)
    first_place = place_of(load_graph(path).graph.initializer[1])[0]
    assert first_place.rpartition("/")[2] not in list_shards(tmp_path / "a" / "one.onnx")
    assert np.array_equal(to_array(load_graph(tmp_path / "a" / "one.onnx").graph.initializer[3]), weight(2))


def test_tensors_of_the_same_bytes_are_written_once(tmp_path):
    model = chain(2, tmp_path)
    set_place(model.graph.initializer[2], *place_of(model.graph.initializer[1]))
    save_graph(model, tmp_path / "graph.onnx")
    (shard,) = list_shards(tmp_path / "graph.onnx")
    assert (tmp_path / shard).stat().st_size == 4 * WIDTH * WIDTH


def test_shapes_and_small_constants_stay_in_the_graph(tmp_path):
    model = chain(2, tmp_path)
    indices = numpy_helper.from_array(np.arange(1000), "indices")
    model.graph.initializer.append(indices)
    set_place(indices := model.graph.initializer[-1], str(tmp_path / "weights.bin"), 0, 8000)
    save_graph(model, tmp_path / "graph.onnx")
    assert [is_external(item) for item in load_graph(tmp_path / "graph.onnx").graph.initializer] == [
        False, True, True, False,
    ]  # fmt: skip


def test_new_weights_go_to_their_own_files(tmp_path):
    path = saved(tmp_path / "a")
    model = load_graph(path)
    halved_tensor = from_array(weight(0).astype(np.float16), "w0", model.graph.initializer[1])
    assert is_external(halved_tensor) and place_of(halved_tensor)[0].rpartition("/")[2].startswith(LOOSE)
    assert np.array_equal(to_array(halved_tensor), weight(0).astype(np.float16))
    assert not is_external(from_array(np.ones(4, np.float32), "small", halved_tensor))
    assert not is_external(from_array(weight(0), "w0", numpy_helper.from_array(weight(0))))
    model.graph.initializer[1].CopyFrom(halved_tensor)
    save_graph(model, path)
    assert not list(path.parent.glob(f"{LOOSE}*"))


def test_four_bit_weights_are_read_unpacked(tmp_path):
    import ml_dtypes

    values = np.arange(-8, 8).astype(ml_dtypes.int4).repeat(200).reshape(40, 80)
    model = load_graph(saved(tmp_path / "a"))
    packed_tensor = from_array(values, "w", model.graph.initializer[1])
    assert is_external(packed_tensor) and place_of(packed_tensor)[2] == 1600
    assert np.array_equal(to_array(packed_tensor), values)


def test_links_in_another_folder_are_the_same_files(tmp_path):
    path = saved(tmp_path / "a")
    model = load_graph(path)
    (tmp_path / "b").mkdir()
    link_shards(model, tmp_path / "b")
    (tmp_path / "b" / "graph.onnx").write_bytes(model.SerializeToString())
    for name in list_shards(path):
        assert (tmp_path / "b" / name).samefile(path.parent / name)
    with ReferenceSession(tmp_path / "b" / "graph.onnx") as session:
        session.run({"x": np.ones((1, WIDTH), np.float32)})


def test_a_graph_in_one_piece_stays_so(tmp_path):
    model = chain(1, tmp_path)
    model.graph.initializer[1].CopyFrom(numpy_helper.from_array(weight(0), "w0"))
    write_graph(model, tmp_path / "graph.onnx")
    assert list_shards(tmp_path / "graph.onnx") == () and onnx.load(tmp_path / "graph.onnx") == model
    (tmp_path / "other.onnx").write_bytes(b"\xff\xff")
    assert list_shards(tmp_path / "other.onnx") == ()


def test_weights_return_to_their_places(tmp_path):
    model = load_graph(saved(tmp_path / "a"))
    light_model = without_weights(model)
    onnx.checker.check_model(onnx.shape_inference.infer_shapes(light_model, strict_mode=True))
    assert {value.name for value in light_model.graph.input} == {"x", *(f"w{i}" for i in range(6))}
    assert with_weights(light_model, model) == model


def test_large_weights_are_left_out_of_a_graph_in_one_piece_too(tmp_path):
    model = chain(2, tmp_path)
    for index, item in enumerate(model.graph.initializer[1:]):
        item.CopyFrom(numpy_helper.from_array(weight(index), item.name))
    model.graph.initializer.append(numpy_helper.from_array(np.arange(500), "rows"))  # its values may give shapes
    light_model = without_weights(model)
    assert [value.name for value in light_model.graph.input] == ["x", "w0", "w1"]
    assert {item.name for item in with_weights(light_model, model).graph.initializer} == {"bias", "rows", "w0", "w1"}
    check_lengths(model)
    model.graph.initializer[1].raw_data = model.graph.initializer[1].raw_data[4:]
    with pytest.raises(ModelError, match=r"tensor 'w0' has 4092 bytes, but its shape needs 4096"):
        check_lengths(model)


@pytest.mark.parametrize("location", ["../a/weights.bin", "/etc/hostname", "", "..", "link", "absent"])
def test_only_files_beside_the_graph_are_read(tmp_path, location):
    path = saved(tmp_path / "a")
    (path.parent / "link").symlink_to("/etc/hostname")
    model = onnx.load(path, load_external_data=False)
    set_place(model.graph.initializer[1], location, 0, 4 * WIDTH * WIDTH)
    path.write_bytes(model.SerializeToString())
    with pytest.raises(ModelError, match="which is not a plain file beside the model"):
        load_graph(path)
    assert location in list_weight_files(path)
    with pytest.raises(ModelError, match="which is not a shard"):
        list_shards(path)


def test_a_file_that_is_too_short_and_a_wrong_length_are_refused(tmp_path):
    path = saved(tmp_path / "a")
    model = onnx.load(path, load_external_data=False)
    name, _, length = place_of(model.graph.initializer[1])
    set_place(model.graph.initializer[1], name, 10**9, length)
    path.write_bytes(model.SerializeToString())
    with pytest.raises(ModelError, match="ends before the end of weight"):
        load_graph(path)
    set_place(model.graph.initializer[1], name, 0, 8)
    path.write_bytes(model.SerializeToString())
    with pytest.raises(ModelError, match=f"tensor 'w0' has 8 bytes, but its shape needs {length}"):
        to_array(load_graph(path).graph.initializer[1])


def test_the_size_of_a_graph_is_that_of_its_files(tmp_path):
    path = saved(tmp_path / "a")
    files = list(path.parent.iterdir())
    assert graph_bytes(path) == sum(file.stat().st_size for file in files) > 6 * 4 * WIDTH * WIDTH
    assert has_shards(path) and not has_shards(tmp_path / "absent.onnx")
    (tmp_path / "whole.onnx").write_bytes(helper.make_model(helper.make_graph([], "g", [], [])).SerializeToString())
    assert not has_shards(tmp_path / "whole.onnx")
    assert graph_bytes(tmp_path / "whole.onnx") == (tmp_path / "whole.onnx").stat().st_size
