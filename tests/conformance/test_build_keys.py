"""What changes a build key and what does not. `pipeline/sources/canonical.py` says what the canonical form drops."""

import os
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import onnx
import pytest
from onnx import ModelProto, helper, numpy_helper

from builders.backends import discovery
from builders.backends.request_checks import profiles
from enginesmith.core.errors import digest_of_file
from enginesmith.core.hardware import machine
from enginesmith.core.types import BuildRequest, Dim, ShapeProfile, TensorSpec
from pipeline.sources.canonical import canonical
from pipeline.sources.onnx_model import load_onnx, save_onnx, specs_of
from tests.conformance.torture.graph import BATCH, model, noise

_W = noise(1, 4, 4)


def base() -> ModelProto:
    """Two branches, an attribute of each kind, a 0.0, a scale and a zero point."""
    return model(
        """g (float[n, 4] x, float[n, 4] z) => (float[n, 4] y, float[n, 4] u, float[2] kept) {
            a = MatMul(x, w)
            b = LeakyRelu <alpha = 0.125> (a)
            c = Concat <axis = 1> (b, z)
            y, v = Split <axis = 1, num_outputs = 2> (c)
            q = QuantizeLinear(v, s, o)
            u = DequantizeLinear(q, s, o)
            kept = Identity(zeros)
        }""",
        {"w": _W, "s": np.array(0.1, "f"), "o": np.array(0, "int8"), "zeros": np.array([0, 1], "f")},
    )


def key_of(model: ModelProto, folder, backend: str = "onnxruntime", dims: tuple[Dim, ...] = BATCH) -> str:
    """The key of a plan that builds this model, from a file."""
    folder.mkdir(parents=True, exist_ok=True)
    onnx.save(model, folder / "model.onnx")
    return key_of_file(folder / "model.onnx", backend, dims)


def key_of_file(path, backend: str = "onnxruntime", dims: tuple[Dim, ...] = BATCH) -> str:
    plain_model = canonical(load_onnx(path, path.parent))
    save_onnx(plain_model, path.with_name("canonical.onnx"))
    digest = digest_of_file(path.with_name("canonical.onnx"))
    inputs, outputs = specs_of(plain_model)
    tool = discovery.configure(backend, {})
    hardware = machine.parse_targets("cpu")[0]
    return BuildRequest(
        digest, "fp32", hardware, backend, inputs, outputs, tuple(profiles(inputs, dims)),
        discovery.options_of(tool), discovery.toolchain_of(tool),
    ).key  # fmt: skip


def node(model: ModelProto, op: str):
    return next(item for item in model.graph.node if item.op_type == op)


def weight(model: ModelProto, name: str, change: Callable[[np.ndarray], np.ndarray]) -> None:
    tensor = next(item for item in model.graph.initializer if item.name == name)
    tensor.CopyFrom(numpy_helper.from_array(change(numpy_helper.to_array(tensor).copy()), name))


def next_float(array: np.ndarray) -> np.ndarray:
    array.reshape(-1)[0] = np.nextafter(array.reshape(-1)[0], np.float32(np.inf))
    return array


def negative_zero(array: np.ndarray) -> np.ndarray:
    array[0] = -0.0
    return array


def other_nan(bits: int):
    def change(array: np.ndarray) -> np.ndarray:
        array.view("uint32")[0] = bits
        return array

    return change


def _alpha(model: ModelProto) -> None:
    node(model, "LeakyRelu").attribute[0].f = np.nextafter(np.float32(0.125), np.float32(1))


MATTERS: dict[str, Callable[[ModelProto], object]] = {
    "an attribute by one bit": _alpha,
    "an axis counted from behind": lambda m: setattr(node(m, "Concat").attribute[0], "i", -1),
    "an attribute that goes": lambda m: node(m, "LeakyRelu").attribute.pop(),
    "an edge": lambda m: node(m, "MatMul").input.__setitem__(0, "z"),
    "two inputs of a node change places": lambda m: node(m, "Concat").input.reverse(),
    "two outputs of a node change places": lambda m: node(m, "Split").output.reverse(),
    "an operator": lambda m: setattr(node(m, "Identity"), "op_type", "Abs"),
    "a weight by its last bit": lambda m: weight(m, "w", next_float),
    "the sign of a zero": lambda m: weight(m, "zeros", negative_zero),
    "a number becomes NaN": lambda m: weight(m, "zeros", other_nan(0x7FC00000)),
    "a weight transposed": lambda m: weight(m, "w", lambda array: array.T.copy()),
    "a weight of another dtype with the same bytes": lambda m: weight(m, "o", lambda array: array.view("uint8")),
    "a scale by its last bit": lambda m: weight(m, "s", next_float),
    "a zero point": lambda m: weight(m, "o", lambda array: array + np.int8(1)),
    "the opset": lambda m: setattr(m.opset_import[0], "version", 21),
    "the order of outputs": lambda m: _swapped(m.graph.output),
    "the order of inputs": lambda m: _swapped(m.graph.input),
    "the name of an input": lambda m: _input_renamed(m),
    "the name of an output": lambda m: _output_renamed(m),
    "an output more": lambda m: m.graph.output.append(helper.make_tensor_value_info("b", 1, ["n", 4])),
    "an output fewer": lambda m: m.graph.output.pop(),
    "a fixed size for a dynamic one": lambda m: _fixed(m),
}


def _swapped(values) -> None:
    first_message, second_message, *rest = [type(value).FromString(value.SerializeToString()) for value in values]
    del values[:]
    values.extend([second_message, first_message, *rest])


def _input_renamed(model: ModelProto) -> None:
    model.graph.input[0].name = node(model, "MatMul").input[0] = "image"


def _output_renamed(model: ModelProto) -> None:
    model.graph.output[1].name = node(model, "DequantizeLinear").output[0] = "answer"


def _fixed(model: ModelProto) -> None:
    for value in (*model.graph.input, *model.graph.output):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param:
                dim.dim_value = 4


def _documented(model: ModelProto) -> None:
    model.doc_string, model.graph.doc_string, node(model, "MatMul").doc_string = "a", "b", "c"


def _annotated(model: ModelProto) -> None:
    model.metadata_props.add(key="stack_trace", value="model.py:1")
    node(model, "MatMul").metadata_props.add(key="k", value="v")


def _signed(model: ModelProto) -> None:
    model.producer_name, model.producer_version, model.model_version, model.domain = "pytorch", "9", 7, "ai.acme"


def _spare(model: ModelProto) -> None:
    model.graph.initializer.append(numpy_helper.from_array(np.ones(3, "f"), "spare"))


FORGOTTEN: dict[str, Callable[[ModelProto], object]] = {
    "doc strings": _documented,
    "metadata": _annotated,
    "who wrote it": _signed,
    "the graph's name": lambda m: setattr(m.graph, "name", "other"),
    "a dead node": lambda m: m.graph.node.append(helper.make_node("Relu", ["x"], ["nobody"], name="dead")),
    "a weight that nothing reads": _spare,
    "the order of weights": lambda m: _reversed(m.graph.initializer),
    "shapes of inner values": lambda m: m.graph.value_info.append(helper.make_tensor_value_info("a", 1, ["n", 4])),
    "an operator set that nothing uses": lambda m: m.opset_import.append(helper.make_opsetid("ai.onnx.ml", 3)),
    "the version of the file format": lambda m: setattr(m, "ir_version", 9),
    "numbers as a list and not as bytes": lambda m: _listed(m),
    "weights that are inputs as well": lambda m: m.graph.input.append(helper.make_tensor_value_info("w", 1, [4, 4])),
}


def _reversed(values) -> None:
    copies = [type(value).FromString(value.SerializeToString()) for value in values]
    del values[:]
    values.extend(reversed(copies))


def _listed(model: ModelProto) -> None:
    tensor = next(item for item in model.graph.initializer if item.name == "w")
    tensor.CopyFrom(helper.make_tensor("w", 1, [4, 4], _W.reshape(-1).tolist()))


@pytest.mark.parametrize("what", MATTERS | FORGOTTEN)
def test_only_relevant_changes_change_the_key(what, tmp_path):
    changed_model = base()
    (MATTERS | FORGOTTEN)[what](changed_model)
    assert changed_model != base(), "the change is one"
    assert (key_of(changed_model, tmp_path / "b") != key_of(base(), tmp_path / "a")) is (what in MATTERS)


def test_the_files_place_and_time_do_not_change_the_key(tmp_path):
    first_key = key_of(base(), tmp_path / "a")
    remote_path = tmp_path / "a b" / "ü"
    remote_path.mkdir(parents=True)
    onnx.save(base(), remote_path / "ïmodel.onnx")
    os.utime(remote_path / "ïmodel.onnx", (1, 1))
    assert key_of_file(remote_path / "ïmodel.onnx") == first_key


def test_weights_in_the_file_or_beside_it_are_the_same(tmp_path):
    (tmp_path / "b").mkdir()
    onnx.save(base(), tmp_path / "b" / "model.onnx", save_as_external_data=True, location="w.bin", size_threshold=0)
    assert (tmp_path / "b" / "w.bin").stat().st_size
    assert key_of_file(tmp_path / "b" / "model.onnx") == key_of(base(), tmp_path / "a")
    data = bytearray((tmp_path / "b" / "w.bin").read_bytes())
    data[0] ^= 1
    (tmp_path / "b" / "w.bin").write_bytes(data)
    assert key_of_file(tmp_path / "b" / "model.onnx") != key_of(base(), tmp_path / "a")


def test_a_function_called_or_written_out_is_the_same(tmp_path):
    called_model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 20, "local" : 1]>
        g (float[n, 4] x) => (float[n, 4] y) { y = local.Twice(x) }
        <domain: "local", opset_import: ["" : 20]>
        Twice (a) => (b) { b = Add(a, a) }"""
    )
    plain_model = model("g (float[n, 4] x) => (float[n, 4] y) { y = Add(x, x) }")
    assert key_of(called_model, tmp_path / "a") == key_of(plain_model, tmp_path / "b")


REQUEST = BuildRequest(
    "a" * 64,
    "fp32",
    machine.parse_targets("sm_89")[0],
    "tensorrt-rtx",
    (TensorSpec("x", "float32", ("n", 4)), TensorSpec("z", "float32", ("n", 4))),
    (TensorSpec("y", "float32", ("n", 4)),),
    (ShapeProfile((("x", (1, 4), (4, 4), (8, 4)), ("z", (1, 4), (4, 4), (8, 4)))),),
    (("tf32", False), ("workspace_mib", 0)),
    (("tensorrt-rtx", "1.7.1"),),
)
_PROFILE = REQUEST.profiles[0].inputs
REQUESTS = {
    "the model": {"model": "c" * 64},
    "the precision": {"precision": "fp16"},
    "the generation": {"target": machine.parse_targets("sm_86")[0]},
    "a product of the generation": {"target": machine.parse_targets("l4")[0]},
    "another product of the generation": {"target": machine.parse_targets("l40s")[0]},
    "the backend": {"backend": "tensorrt"},
    "a dtype": {"inputs": (TensorSpec("x", "float16", ("n", 4)), REQUEST.inputs[1])},
    "a dim's name": {"inputs": (TensorSpec("x", "float32", ("m", 4)), REQUEST.inputs[1])},
    "a size": {"inputs": (TensorSpec("x", "float32", ("n", 5)), REQUEST.inputs[1])},
    "the order of inputs": {"inputs": REQUEST.inputs[::-1]},
    "an input's name": {"inputs": (TensorSpec("x2", "float32", ("n", 4)), REQUEST.inputs[1])},
    "an output's shape": {"outputs": (TensorSpec("y", "float32", ("n", 3)),)},
    "an output's name": {"outputs": (TensorSpec("y2", "float32", ("n", 4)),)},
    "a profile's least": {"profiles": (ShapeProfile((("x", (2, 4), (4, 4), (8, 4)), _PROFILE[1])),)},
    "what a profile is tuned for": {"profiles": (ShapeProfile((("x", (1, 4), (5, 4), (8, 4)), _PROFILE[1])),)},
    "a profile's most": {"profiles": (ShapeProfile((("x", (1, 4), (4, 4), (9, 4)), _PROFILE[1])),)},
    "a profile more": {"profiles": REQUEST.profiles * 2},
    "no profile": {"profiles": ()},
    "an option": {"options": (("tf32", True), ("workspace_mib", 0))},
    "an option's type": {"options": (("tf32", 0), ("workspace_mib", 0))},
    "an option fewer": {"options": (("workspace_mib", 0),)},
    "a version": {"toolchain": (("tensorrt-rtx", "1.7.2"),)},
    "a version more": {"toolchain": (("cuda", "13"), ("tensorrt-rtx", "1.7.1"))},
}


def test_every_part_of_a_request_changes_its_key():
    keys = {label: replace(REQUEST, **changes).key for label, changes in REQUESTS.items()}
    assert REQUEST.key not in keys.values(), [label for label, key in keys.items() if key == REQUEST.key]
    assert len(set(keys.values())) == len(keys), "two changes have one key"
    assert replace(REQUEST).key == REQUEST.key


@pytest.mark.parametrize("name", discovery.names())
def test_every_option_of_every_backend_is_in_the_key(name):
    tool = discovery.configure(name, {})
    options = dict(discovery.options_of(tool))
    keys = {replace(REQUEST, backend=name, options=tuple(sorted(options.items()))).key}
    for option, (kind, default) in discovery.option_fields(type(tool)).items():
        other_entry = {bool: not default, int: 7919, float: 0.123, str: "another"}[kind]
        keys.add(replace(REQUEST, backend=name, options=tuple(sorted({**options, option: other_entry}.items()))).key)
    assert len(keys) == 1 + len(options)


@pytest.mark.parametrize("name", discovery.names())
def test_every_version_and_the_revision_of_every_backend_are_in_the_key(name, monkeypatch):
    cls = discovery.load(name)
    monkeypatch.setattr(cls, "versions", lambda self: {"compiler": "1.0", "runtime": "2.0"})
    tool = discovery.configure(name, {})
    key_before = replace(REQUEST, toolchain=discovery.toolchain_of(tool)).key
    monkeypatch.setattr(cls, "revision", cls.revision + 1)
    revised_key = replace(REQUEST, toolchain=discovery.toolchain_of(tool)).key
    monkeypatch.setattr(cls, "versions", lambda self: {"compiler": "1.0", "runtime": "2.1"})
    assert len({key_before, revised_key, replace(REQUEST, toolchain=discovery.toolchain_of(tool)).key}) == 3
