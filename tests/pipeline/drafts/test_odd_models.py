from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from enginesmith.core.errors import ModelError, SpecError
from pipeline.drafts.onnx_model import _name, look_at_onnx
from pipeline.drafts.text import write_spec
from pipeline.spec.model import ModelSpec, load_spec
from tests.pipeline.drafts.graphs import value
from tests.pipeline.quantization.small_nets import build

node = helper.make_node
X, Y = value("x", ["batch", 8]), value("y", ["batch", 4])
ZIPMAP = helper.make_sequence_type_proto(
    helper.make_map_type_proto(TensorProto.INT64, helper.make_tensor_type_proto(TensorProto.FLOAT, None))
)
OPTIONAL = helper.make_optional_type_proto(helper.make_tensor_type_proto(TensorProto.FLOAT, ["batch", 8]))
Values = Sequence[onnx.ValueInfoProto]


def write(
    path: Path, nodes: Sequence[onnx.NodeProto], inputs: Values = (X,), outputs: Values = (Y,), opset: int = 17
) -> Path:
    """A model with a weight `w` of 8 rows and 4 columns."""
    weight = numpy_helper.from_array(np.ones((8, 4), "f4"), "w")
    graph = helper.make_graph(nodes, "g", inputs, outputs, [weight])
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("ai.onnx.ml", 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), path)
    return path


def drafted(path: Path) -> ModelSpec:
    text = write_spec(look_at_onnx(path, path.name))
    spec = path.with_suffix(".yaml")
    spec.write_text(text)
    return load_spec(spec)


PRODUCT = node("MatMul", ["x", "w"], ["y"])
CLASSIFIED = [
    node("LinearClassifier", ["x"], ["label", "scores"], domain="ai.onnx.ml", coefficients=[0.5] * 16,
         intercepts=[0.0, 1.0], classlabels_ints=[0, 1]),
    node("ZipMap", ["scores"], ["probabilities"], domain="ai.onnx.ml", classlabels_int64s=[0, 1]),
]  # fmt: skip


def test_unsupported_outputs_are_omitted(tmp_path: Path) -> None:
    outputs = [value("label", ["batch"], TensorProto.INT64), helper.make_value_info("probabilities", ZIPMAP)]
    assert drafted(write(tmp_path / "m.onnx", CLASSIFIED, outputs=outputs)).outputs == ("label",)
    assert "'zipmap': False" in (tmp_path / "m.yaml").read_text()


def test_a_passed_through_input_is_no_output(tmp_path: Path) -> None:
    assert drafted(write(tmp_path / "m.onnx", [PRODUCT], outputs=[X, Y])).outputs == ("y",)


def test_an_output_of_unknown_rank_is_inferred(tmp_path: Path) -> None:
    unranked_value_info = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    assert drafted(write(tmp_path / "m.onnx", [PRODUCT], outputs=[unranked_value_info])).outputs is None
    foreign_nodes = [node("Normalizer", ["x"], ["y"], domain="ai.onnx.ml", norm="L2")]
    with pytest.raises(ModelError, match=r"^output 'y' does not say how many axes.*give it a shape"):
        look_at_onnx(write(tmp_path / "n.onnx", foreign_nodes, outputs=[unranked_value_info]), "n.onnx")


def test_a_table_of_one_row_is_probed_within_it(tmp_path: Path) -> None:
    model = build("int64[batch,n] i", "float[batch,n,4] y", "y = Gather(one_row, i)", {"one_row": np.ones((1, 4))})
    onnx.save(model, tmp_path / "m.onnx")
    dims = look_at_onnx(tmp_path / "m.onnx", "m.onnx").dims
    assert not any(dim.guessed for dim in dims.values())


def test_float64_weights_are_not_changed(tmp_path: Path) -> None:
    weight = numpy_helper.from_array(np.ones((8, 4)), "w")
    end_values = [value("x", ["batch", 8], TensorProto.DOUBLE)], [value("y", ["batch", 4], TensorProto.DOUBLE)]
    graph = helper.make_graph([PRODUCT], "g", *end_values, [weight])
    path = tmp_path / "m.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10), path)
    assert drafted(path).precisions == ("fp32",)
    assert "its weights are float64" in (tmp_path / "m.yaml").read_text()


def test_an_input_of_unknown_rank_is_a_line_to_fill_in(tmp_path: Path) -> None:
    path = write(tmp_path / "m.onnx", [PRODUCT], [helper.make_tensor_value_info("x", TensorProto.FLOAT, None)])
    with pytest.raises(SpecError, match="FILL_IN"):
        drafted(path)
    assert "does not say how many axes" in (tmp_path / "m.yaml").read_text()


@pytest.mark.parametrize(("text", "axes", "axis", "size"), [
    ("y = MatMul(x, w)", "batch,features", -1, 8),
    ("y = Conv(x, k)", "batch,channels,height,width", 1, 3),
    ("t = Transpose<perm=[0, 3, 1, 2]>(x) y = Conv(t, k)", "batch,height,width,channels", 3, 3),
])  # fmt: skip
def test_axes_fixed_by_the_weights_are_no_dims(tmp_path: Path, text: str, axes: str, axis: int, size: int) -> None:
    weights, rank = {"w": np.ones((8, 4)), "k": np.ones((4, 3, 1, 1))}, len(axes.split(","))
    onnx.save(build(f"float[{axes}] x", f"float[{','.join('abcd'[:rank])}] y", text, weights), tmp_path / "m.onnx")
    spec = drafted(tmp_path / "m.onnx")
    assert spec.inputs["x"].shape[axis] == size and len(spec.dims) == rank - 1


def test_a_newer_ir_version_is_accepted(tmp_path: Path) -> None:
    path = write(tmp_path / "m.onnx", [PRODUCT])
    model = onnx.load(path)
    model.ir_version = 99
    onnx.save(model, path)
    assert "the graph ran at 1 and 8" in look_at_onnx(path, "m.onnx").dims["batch"].why


def test_exported_sizes_are_tried(tmp_path: Path) -> None:
    shape = node("Constant", [], ["s"], value=numpy_helper.from_array(np.array([13, -1])))
    nodes = [
        shape,
        node("Transpose", ["x"], ["t"]),
        node("Reshape", ["t", "s"], ["r"]),
        node("MatMul", ["r", "w"], ["y"]),
    ]
    path = write(tmp_path / "m.onnx", nodes, [value("x", [8, "length"])], [value("y", ["rows", 4])])
    (dim,) = drafted(path).named_dims()
    assert (dim.min, dim.max) == (13, 13)


def test_a_batch_of_multiples_is_found(tmp_path: Path) -> None:
    shape = node("Constant", [], ["s"], value=numpy_helper.from_array(np.array([-1, 4, 8])))
    path = write(tmp_path / "m.onnx", [shape, node("Reshape", ["x", "s"], ["y"])], [X], [value("y", ["n", 4, 8])])
    (dim,) = drafted(path).named_dims()
    assert (dim.name, dim.min, dim.max, dim.multiple) == ("batch", 4, 8, 4)


@pytest.mark.parametrize("name", ["x\nprecisions: [int8]", "a: b", "on", "\x1b[31m", "日本/語:0", "n" * 400])
def test_any_tensor_name_is_valid_in_the_spec(tmp_path: Path, name: str) -> None:
    spec = drafted(write(tmp_path / "m.onnx", [node("MatMul", [name, "w"], ["y"])], [value(name, ["null", 8])]))
    assert list(spec.inputs) == [name] and list(spec.dims) == ["null"]


@pytest.mark.parametrize(("nodes", "inputs", "outputs", "words"), [
    ([PRODUCT], [value("x", [1, 8], TensorProto.BFLOAT16)], [Y], "valid ONNX|is bfloat16; inputs can be float32"),
    ([node("Cast", ["x"], ["c"], to=TensorProto.FLOAT), node("MatMul", ["c", "w"], ["y"])],
     [value("x", ["batch", 8], TensorProto.UINT32)], [Y], "is uint32; inputs can be .* a cast behind it"),
    ([node("Concat", ["p", "x"], ["y"], axis=1)], [X, value("p", ["batch", 0])], [value("y", ["batch", 8])],
     r"\[batch, 0\], which is always empty"),
    ([PRODUCT], [X, value("p", ["batch", 1 << 40])], [Y], r"\[batch, 1099511627776\], which is larger than any"),
    ([node("Relu", ["w"], ["y"])], [], [value("y", [8, 4])], "has no inputs"),
    ([PRODUCT], [X, X], [Y], "two inputs called 'x'"),
    ([node("OptionalGetElement", ["x"], ["y"])], [helper.make_value_info("x", OPTIONAL)], [X],
     "is optional, which no engine takes or gives; export the model without it"),
    ([node("SplitToSequence", ["x"], ["s"])], [X], [helper.make_tensor_sequence_value_info("s", 1, None)],
     "output 's' is a sequence"),
])  # fmt: skip
def test_inputs_that_no_engine_supports_are_one_error_with_a_remedy(tmp_path, nodes, inputs, outputs, words):
    outputs = [value("y", ["batch", 8])] if words.startswith("is optional") else outputs
    path = write(tmp_path / "m.onnx", nodes, inputs, outputs, opset=18)
    with pytest.raises(ModelError, match=words):
        look_at_onnx(path, "m.onnx")


def test_sizes_beyond_the_memory_are_not_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried_numbers: list[int] = []

    def watch(_self: object, spec: object, sizes: dict[str, int]) -> np.ndarray:
        tried_numbers.append(int(np.prod([sizes[name] for name in "ijk"], dtype=np.int64)))
        raise ValueError  # without words, as an assertion of a module is

    monkeypatch.setattr("pipeline.drafts.probing._Probe._array", watch)
    path = write(
        tmp_path / "m.onnx", [node("Relu", ["x"], ["y"])], [value("x", list("ijk"))], [value("y", list("ijk"))]
    )
    assert all("(ValueError)" in dim.why for dim in look_at_onnx(path, "m.onnx").dims.values())
    assert 256**3 in tried_numbers and max(tried_numbers) <= 1 << 26
    onnx.save(build(f"float[i,{1 << 27}] x", "float[i,j] y", "y = Relu(x)", {}), path := tmp_path / "n.onnx")
    assert "(inputs of more than 67108864 elements are not tried)" in look_at_onnx(path, "n.onnx").dims["i"].why


def test_the_trials_of_many_dims_have_a_time_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names, shape = [f"x{n}" for n in range(14)], {"shape": [-1, 100003]}
    text = f"c = Concat<axis=1>({', '.join(names)}) y = Reshape(c, shape)"
    model = build(", ".join(f"float[batch,?] {name}" for name in names), "float[rows,100003] y", text, shape)
    onnx.save(model, tmp_path / "many.onnx")
    monkeypatch.setattr("pipeline.drafts.probing._SECONDS", 0.1)
    assert len(drafted(tmp_path / "many.onnx").dims) == 15


def test_an_endless_loop_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = "body (int64 i, bool on, float[n] v) => (bool o, float[n] w) { o = Identity(on) w = Add(v, v) }"
    model = build("float[n] x", "float[n] y", f"y = Loop<body = {body}>(, always, x)", {"always": np.array(True)})
    onnx.save(model, tmp_path / "m.onnx")
    monkeypatch.setattr("pipeline.drafts.probing._SECONDS", 0.5)
    monkeypatch.setattr("pipeline.drafts.probing.RUN_SECONDS", 0.1)
    assert "(the run took longer than 0.1 s)" in look_at_onnx(tmp_path / "m.onnx", "m.onnx").dims["batch"].why


@pytest.mark.parametrize("runs", [1, 4, 5, 6])
def test_a_slow_model_is_drafted_from_timely_trials(tmp_path, runs, monkeypatch):
    timeouts = iter([False] * runs)
    monkeypatch.setattr("pipeline.drafts.probing._Probe.is_over", property(lambda _: next(timeouts, True)))
    end_values = [value("x", ["batch", "k"])], [value("y", ["batch", "k"])]
    spec = drafted(write(tmp_path / "m.onnx", [node("Relu", ["x"], ["y"])], *end_values))
    assert spec.dims["batch"].min == 1 and spec.dims["k"].min <= 64
    assert runs > 1 or "were over; widen it" in (tmp_path / "m.yaml").read_text()


def test_all_largest_sizes_together_fit_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.drafts.probing._MOST_ELEMENTS", 1 << 22)  # each is tried: of the real limit for 15 s
    end_values = [value("x", list("ijkl"))], [value("y", list("ijkl"))]
    spec = drafted(write(tmp_path / "m.onnx", [node("Relu", ["x"], ["y"])], *end_values))
    assert 1 << 16 < np.prod([dim.max for dim in spec.named_dims()]) <= 1 << 22


@pytest.mark.parametrize(("name", "places"), [
    ("bert", "bert.onnx bert/onnx/model.onnx bert/12/model.onnx bert/tmp/model.onnx"),
    ("bert", "bert/v2/model.onnx bert/1.0/model.onnx bert/2024-01/model.onnx"),
    ("model", "model.onnx Downloads/model.onnx /home/alice/Downloads/model.onnx /var/tmp/v1/model.onnx"),
    ("2", "bert/2.onnx"),
])  # fmt: skip
def test_the_name_is_that_of_the_nearest_meaningful_folder(tmp_path, name, places, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert {_name(tmp_path / place) for place in places.split()} == {name}
