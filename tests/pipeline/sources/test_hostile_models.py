import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from onnx import TensorProto, helper, numpy_helper

from builders.execution.jobs import ProcessLimits
from builders.execution.process import run_job
from enginesmith.core.errors import EnginesmithError, ModelError, StepError
from enginesmith.core.types import TensorSpec
from pipeline.quantization.schemes.qdq import carries_qdq
from pipeline.sources import canonical as canonical_module
from pipeline.sources import onnx_model
from pipeline.sources import onnx_model as external_data
from pipeline.sources.canonical import canonical
from pipeline.sources.onnx_model import external_files, load_onnx, save_onnx, specs_of
from pipeline.sources.walk import all_tensors
from tests.calls import call_job
from tests.hostile_onnx import WEIGHTS, hostile_models, valid_model

FEW = settings(max_examples=int(os.environ.get("ENGINESMITH_HOSTILE_EXAMPLES", "60")))
X = TensorSpec("x", "float32", ("batch", 3))
SECRET = b"root:x:0:0 is nobody's business"
node, value = helper.make_node, helper.make_tensor_value_info


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model's external data, and links that lead out of it or nowhere."""
    outer_folder = tmp_path_factory.mktemp("outer")
    (outer_folder / "secret").write_bytes(SECRET)
    (inner_path := outer_folder / "spec").mkdir()
    (inner_path / "weights.bin").write_bytes(WEIGHTS)
    (inner_path / "link.bin").symlink_to(outer_folder / "secret")
    (inner_path / "loop.bin").symlink_to("loop.bin")
    (inner_path / "folder").mkdir()
    return inner_path


def taken(folder: Path, data: bytes) -> onnx.ModelProto:
    """What a build does with a model file before it runs anything."""
    path = folder / "model.onnx"
    path.write_bytes(data)
    external_files(path, folder)
    model = load_onnx(path, folder)
    assert all(tensor.data_location != TensorProto.EXTERNAL for tensor in all_tensors(model))
    tidy = canonical(model, [X], ["out"])
    save_onnx(tidy, path)
    specs_of(tidy)
    carries_qdq(tidy)
    return tidy


def test_the_attacked_model_is_sound(folder: Path) -> None:
    assert specs_of(taken(folder, valid_model().SerializeToString()))[0] == (X,)


def test_hostile_models_give_a_clear_error(folder: Path) -> None:
    names_before = {path.name for path in folder.iterdir()} | {"model.onnx"}

    @FEW
    @given(hostile_models())
    def attack(data: bytes) -> None:
        try:
            assert SECRET not in taken(folder, data).SerializeToString()
        except EnginesmithError as error:
            assert 0 < len(str(error)) < 20_000 and SECRET.decode() not in str(error)
        assert {path.name for path in folder.iterdir()} == names_before

    attack()


def refused(folder: Path, model: onnx.ModelProto, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        taken(folder, model.SerializeToString())


def far(tensor: TensorProto, location: str, **numbers: object) -> None:
    """Lead a tensor's bytes elsewhere."""
    tensor.ClearField("raw_data")
    del tensor.external_data[:]
    tensor.data_location = TensorProto.EXTERNAL
    for key, message in {"location": location, **numbers}.items():
        tensor.external_data.add(key=key, value=str(message))


PLACES = [
    ("../secret", "leads outside"),
    ("link.bin", "leads outside"),
    ("/etc/hostname", "leads outside"),
    ("a\0b", "cannot be the path of a file"),
    ("loop.bin", "cannot be the path of a file|does not exist"),
    ("n" * 5000, "cannot be the path of a file"),
    ("folder", "is not a file"),
    ("", "is not a file"),
]


@pytest.mark.parametrize(("location", "words"), PLACES)
def test_data_elsewhere_is_refused_for_every_tensor(folder: Path, location: str, words: str) -> None:
    def graph_inside(model: onnx.ModelProto) -> TensorProto:
        return model.graph.node[3].attribute[0].g.initializer.add(name="z", data_type=1, dims=[1])

    def in_function(model: onnx.ModelProto) -> TensorProto:
        inner_node = node("Constant", [], ["t"], value=numpy_helper.from_array(np.ones(1, np.float32)))
        model.functions[0].node.append(inner_node)
        return model.functions[0].node[-1].attribute[0].t

    def default_of_function(model: onnx.ModelProto) -> TensorProto:
        model.functions[0].attribute_proto.append(helper.make_attribute("k", numpy_helper.from_array(np.ones(1))))
        return model.functions[0].attribute_proto[0].t

    for find in (lambda model: model.graph.initializer[0], graph_inside, in_function, default_of_function):
        model = valid_model()
        far(find(model), location, offset=0, length=4)
        refused(folder, model, words)


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ({"length": -1}, "not a number of bytes"),
        ({"offset": -5, "length": 4}, "not a number of bytes"),
        ({"length": 10**30}, "not a number of bytes"),
        ({"length": "4" * 5000}, "broken external data entry"),
        ({"offset": 40, "length": 40}, "ends at byte 80 of weights.bin, which has 48"),
    ],
)
def test_hostile_external_data_numbers_are_refused(folder: Path, numbers: dict[str, object], words: str) -> None:
    model = valid_model()
    far(model.graph.initializer[0], "weights.bin", **numbers)
    refused(folder, model, words)


@pytest.mark.parametrize("dims", [[2**62] * 3000, [-3, 4], [3, 2**31]])
def test_impossible_dims_are_refused(folder: Path, dims: list[int]) -> None:
    model = valid_model()
    far(model.graph.initializer[0], "weights.bin")
    model.graph.initializer[0].dims[:] = dims
    refused(folder, model, "its dims are|which has 48|not a number of bytes")


def overlapping(count: int, step: int) -> onnx.ModelProto:
    """A model with so many weights out of the 48 bytes of external data, each `step` bytes behind the one before."""
    model = valid_model()
    far(model.graph.initializer[0], "weights.bin", offset=0, length=16)
    model.graph.initializer[0].dims[:] = [4]
    for index in range(1, count):
        model.graph.initializer.add().CopyFrom(model.graph.initializer[0])
        model.graph.initializer[-1].name = f"w{index}"
        model.graph.initializer[-1].external_data[1].value = str(index * step)
    return model


def test_shards_are_no_larger_than_their_source_files(folder: Path) -> None:
    path = folder / "model.onnx"
    path.write_bytes(overlapping(30, 0).SerializeToString())
    load_onnx(path, folder, most_embedded_bytes=0)  # all are the same tensor: written once
    path.write_bytes(overlapping(9, 4).SerializeToString())
    with pytest.raises(ModelError, match="tensors overlap in its external data files"):
        load_onnx(path, folder, most_embedded_bytes=0)


def test_constants_inside_nodes_are_embedded_up_to_2_gb(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = valid_model()
    far(model.graph.node[3].attribute[0].g.initializer.add(name="z", data_type=1, dims=[12]), "weights.bin")
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    monkeypatch.setattr(external_data, "LARGEST_BYTES", 47)
    monkeypatch.setattr(onnx_model, "_parse", lambda _, weights: model)
    with pytest.raises(ModelError, match="constants of over 2 GB"):
        load_onnx(folder / "model.onnx", folder)


def calling(bodies: Sequence[Sequence[onnx.NodeProto]], called: str) -> onnx.ModelProto:
    """A model that calls one of the functions f0, f1 ... with these bodies, each from 'a' to 'b'."""
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("f", 1)]
    functions = [helper.make_function("f", f"f{i}", ["a"], ["b"], body, opsets) for i, body in enumerate(bodies)]
    graph = helper.make_graph(
        [node(called, ["x"], ["y"], domain="f")], "g", [value("x", 1, ["N", 3])], [value("y", 1, None)]
    )
    return helper.make_model(graph, opset_imports=opsets, functions=functions, ir_version=10)


def test_functions_that_expand_beyond_memory_are_refused(folder: Path) -> None:
    nodes = [node("Relu", ["a"], ["b"])]
    doubling = [[node(f"f{i}", ["a"], ["t"], domain="f"), node(f"f{i}", ["t"], ["b"], domain="f")] for i in range(200)]
    refused(folder, calling([nodes, *doubling], "f60"), "1000000000000000000 nodes or more")
    refused(folder, calling([nodes, *doubling], "f200"), "nodes or more")
    assert len(taken(folder, calling([nodes, *doubling[:9]], "f9").SerializeToString()).graph.node) == 512
    refused(folder, calling([[node("f1", ["a"], ["b"], domain="f")], [node("f0", ["a"], ["b"], domain="f")]], "f0"),
            "functions call themselves: f::f0 -> f::f1 -> f::f0")  # fmt: skip
    doubled_model = calling([nodes, nodes], "f0")
    doubled_model.functions[1].name = "f0"
    refused(folder, doubled_model, "defines a function twice")
    refused(folder, calling([nodes, *([node(f"f{i}", ["a"], ["b"], domain="f")] for i in range(150))], "f150"), "depth")


def test_functions_inside_branches_inside_functions_are_refused(folder: Path) -> None:
    def nested(count: int) -> onnx.ModelProto:
        bodies = [[node("Relu", ["a"], ["b"])]]
        for index in range(count):
            graph = helper.make_graph([node(f"f{index}", ["a"], ["t"], domain="f")], "t", [], [value("t", 1, None)])
            other_graph = helper.make_graph([node("Relu", ["a"], ["e"])], "e", [], [value("e", 1, None)])
            condition = node("Constant", [], ["c"], value=numpy_helper.from_array(np.array(True)))
            bodies.append([condition, node("If", ["c"], ["b"], then_branch=graph, else_branch=other_graph)])
        return calling(bodies, f"f{count}")

    taken(folder, nested(5).SerializeToString())
    for count in (31, 90):
        refused(folder, nested(count), f"graphs {count} deep")


def job_with_little_memory(path: str, workdir: Path) -> None:
    """What a job does with a model, where checking may take 256 MiB."""
    canonical_module._CHECKING_BYTES = 256 << 20
    canonical(load_onnx(Path(path), Path(path).parent), [X])


@pytest.mark.slow
def test_a_long_inferred_list_uses_only_the_jobs_memory(folder, tmp_path):
    model = valid_model()
    del model.graph.node[:], model.graph.output[:]
    concats = [node("Concat", [f"s{i}", f"s{i}"], [f"s{i + 1}"], axis=0) for i in range(40)]
    model.graph.node.extend([node("Shape", ["x"], ["s0"]), *concats, node("ConstantOfShape", ["s40"], ["y"])])
    model.graph.output.append(value("y", 1, None))
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    function = f"{__name__}:{job_with_little_memory.__name__}"
    limits = ProcessLimits(timeout_s=120, memory_mib=2000)
    job = call_job("export", function, {"path": str(folder / "model.onnx")}, limits=limits)
    with pytest.raises(EnginesmithError) as err:
        run_job(job, tmp_path)
    # The library is not made for memory that ends: it may die of it, alone.
    is_died = isinstance(err.value, StepError) and err.value.kind in ("crash", "error") and "held" not in str(err.value)
    assert is_died or "comes from a very long list" in str(err.value)


@pytest.mark.parametrize("name", [b"matmul", b"mine", b"weights.bin", b"hidden", b"Relu", b"shape", b"location", b"b"])
def test_non_text_names_are_refused(folder: Path, name: bytes) -> None:
    data = valid_model().SerializeToString()
    damaged_data = data.replace(name, name[:-1] + b"\xff")
    assert damaged_data != data
    with pytest.raises(ModelError, match=r"is not UTF-8|is truncated"):
        taken(folder, damaged_data)


def test_unread_parts_are_refused_or_dropped(folder: Path) -> None:
    model = valid_model()
    few_tensor = helper.make_sparse_tensor(
        helper.make_tensor("few", 1, [1], [2.0]), helper.make_tensor("at", 7, [1], [1]), [4]
    )
    model.graph.sparse_initializer.append(few_tensor)
    refused(folder, model, "sparse tensors")
    model = valid_model()
    model.graph.node.append(node("Constant", [], ["s"], sparse_value=few_tensor))
    refused(folder, model, "sparse tensors")
    model = valid_model()
    far(model.training_info.add().initialization.initializer.add(name="t", data_type=1, dims=[1]), "../secret")
    taken(folder, model.SerializeToString())
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    assert not load_onnx(folder / "model.onnx", folder).training_info


@pytest.mark.parametrize("kind", [0, 8, 99])
def test_types_without_a_numpy_type_are_refused(folder: Path, kind: int) -> None:
    model = valid_model()
    model.graph.input[0].type.tensor_type.elem_type = kind
    refused(folder, model, "input 'x' is|malformed")
