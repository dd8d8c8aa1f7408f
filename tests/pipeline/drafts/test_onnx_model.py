from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from builders.onnx_graphs.outline import load_without_lists
from enginesmith.core.names import is_name
from enginesmith.core.types import TensorSpec
from pipeline.drafts import onnx_model
from pipeline.drafts.facts import find_sizes, model_name, name_axes
from pipeline.drafts.onnx_model import look_at_onnx
from pipeline.drafts.probing import _candidates
from pipeline.drafts.text import write_spec
from pipeline.spec.model import load_spec
from tests.pipeline.drafts.graphs import halving, value, with_state, write
from tests.pipeline.quantization.small_nets import build


def test_unnamed_dims_get_names_and_steps_are_found(tmp_path: Path) -> None:
    actual = look_at_onnx(halving(tmp_path / "m.onnx"), "m.onnx")
    assert [spec.shape for spec in actual.inputs] == [("batch", 3, "height", "width")]
    assert (actual.dims["batch"].min, actual.dims["batch"].max) == (1, 8)
    for name in ("height", "width"):
        dim = actual.dims[name]
        assert dim.min % 4 == dim.opt % 4 == dim.max % 4 == 0 and dim.min < dim.max
        assert dim.multiple == 4 and "only at multiples of 4" in dim.why
    (tmp_path / "spec.yaml").write_text(write_spec(actual))
    assert [dim.multiple for dim in load_spec(tmp_path / "spec.yaml").named_dims()] == [1, 4, 4]


@pytest.mark.parametrize("rows", [64, 77])
def test_a_table_of_positions_bounds_its_dim(tmp_path: Path, rows: int) -> None:
    text = "end = Shape<start=1, end=2>(x) places = Slice(table, zero, end, zero) y = Add(x, places)"
    weights = {"table": np.ones((rows, 2)), "zero": [0]}
    onnx.save(build("float[batch,time,2] x", "float[batch,time,2] y", text, weights), tmp_path / "m.onnx")
    dim = look_at_onnx(tmp_path / "m.onnx", "m.onnx").dims["time"]
    assert (dim.min, dim.max, dim.multiple) == (1, rows, 1)


def test_images_with_channels_last_have_height_and_width() -> None:
    (spec,) = name_axes((TensorSpec("x", "uint8", ("unk__1", "unk__2", "unk__3", 3)),))
    assert spec.shape == ("batch", "height", "width", 3)


def test_the_size_counts_the_weights_in_other_files(tmp_path: Path) -> None:
    weight = np.ones((512, 512), np.float32)
    write(tmp_path / "m.onnx", [helper.make_node("MatMul", ["x", "w"], ["y"])], [value("x", ["n", 512])], w=weight)
    onnx.save(onnx.load(tmp_path / "m.onnx"), tmp_path / "m.onnx", save_as_external_data=True, location="w.bin")
    assert look_at_onnx(tmp_path / "m.onnx", "m.onnx").notes[0].startswith("m.onnx: 1.0 MiB")


def test_dims_that_must_be_equal_are_joined(tmp_path: Path) -> None:
    actual = look_at_onnx(with_state(tmp_path / "m.onnx"), "m.onnx")
    assert [spec.shape for spec in actual.inputs] == [("batch", 5), (2, "batch", 3)]
    assert list(actual.dims) == ["batch"]
    nodes = [helper.make_node("Concat", ["a", "b", "c"], ["y"], axis=1)]  # none grows alone or with one other
    actual = look_at_onnx(write(tmp_path / "m.onnx", nodes, [value(name, [None, 4]) for name in "abc"]), "m.onnx")
    assert {spec.shape for spec in actual.inputs} == {("batch", 4)} and actual.dims["batch"].max == 8


def test_the_drafted_spec_is_valid(tmp_path: Path) -> None:
    nodes = [helper.make_node("Add", ["387", "no:0"], ["y"])]
    write(tmp_path / "My Model.onnx", nodes, [value("387", ["N", 2]), value("no:0", [1, 2])])
    actual = look_at_onnx(tmp_path / "My Model.onnx", "My Model.onnx")
    path = tmp_path / "spec.yaml"
    path.write_text(write_spec(actual))
    spec = load_spec(path)
    assert spec.model == "my-model" and spec.precisions == ("fp32",)
    assert list(spec.inputs) == ["387", "no:0"], "numbers and colons are quoted"


NARROW = [
    helper.make_node("Constant", [], ["v"], value=numpy_helper.from_array(np.ones((2, 2), np.int8))),
    helper.make_node("DequantizeLinear", ["v", "s"], ["f"]),
    helper.make_node("MatMul", ["x", "f"], ["y"]),
]


@pytest.mark.parametrize(
    ("nodes", "precisions"),
    [
        ([helper.make_node("MatMul", ["x", "w"], ["y"])], ["fp32", "fp16"]),
        ([helper.make_node("Relu", ["x"], ["y"])], ["fp32"]),
        ([helper.make_node("DynamicQuantizeLinear", ["x"], ["y", "t", "z"])], ["fp32"]),
        ([helper.make_node("QuantizeLinear", ["x", "s"], ["y"])], ["int8"]),
        (NARROW, ["fp32"]),
    ],
)
def test_precisions_follow_from_the_graphs_operators(tmp_path: Path, nodes: list, precisions: list[str]) -> None:
    path = write(tmp_path / "m.onnx", nodes, [value("x", ["n", 2])], w=[[1, 2], [3, 4]], s=0.5)
    assert [name for name, _ in look_at_onnx(path, "m.onnx").precisions] == precisions


def test_a_graph_that_never_runs_gets_marked_guesses(tmp_path: Path) -> None:
    sizes = {"to": np.array([7919, 7919])}
    onnx.save(build("float[n,k] x", "float[7919,7919] y", "y = Reshape(x, to)", sizes, 17), tmp_path / "m.onnx")
    actual = look_at_onnx(tmp_path / "m.onnx", "m.onnx")
    assert all(dim.why.startswith("a guess: the graph ran at no size") for dim in actual.dims.values())
    tried_candidates = [*_candidates(["h", "w"], [768, 3072, 512, 12, 2, 197])]
    assert {"h": 32, "w": 320} in tried_candidates and {"h": 64, "w": 197} in tried_candidates
    weights = {"s": [13, -1], "bias": np.ones(77), "t": np.ones((1, 197)), "u": np.ones((1, 197))}
    text = "r = Reshape(x, s) b = Add(r, bias) m = Mul(b, t) y = Mul(m, u)"
    assert find_sizes(build("float[n] x", "float[n] y", text, weights).graph) == [13, 197]


def test_sizes_that_fail_together_are_narrowed(tmp_path: Path) -> None:
    """A build runs the smallest of one dim with the largest of another."""
    text = "count = Shape<start=0, end=1>(x) last = Sub(count, one) y = Gather<axis=1>(x, last)"
    model = build("float[batch,length] x", "float[batch,1] y", text, {"one": np.array([1])})
    onnx.save(model, path := tmp_path / "m.onnx")
    actual = look_at_onnx(path, path.name)
    sizes = {name: (dim.min, dim.max) for name, dim in actual.dims.items()}
    assert sizes == {"batch": (1, 8), "length": (8, 128)}
    assert "all sizes of the other" in actual.dims["length"].why


def test_a_window_longer_than_usual_sizes_may_grow(tmp_path: Path) -> None:
    nodes = [helper.make_node("Conv", ["x", "w"], ["y"], strides=[160])]
    path = write(tmp_path / "m.onnx", nodes, [value("x", ["batch", 1, "samples"])], w=np.ones((1, 1, 400)))
    actual = look_at_onnx(path, path.name)
    assert (actual.dims["samples"].min, actual.dims["samples"].max) == (512, 1024)


def test_a_graph_that_selects_boxes_gets_a_deciding_metric(tmp_path: Path) -> None:
    text = """
        c = Conv(image, w) all = Reshape(c, rows) batch = Unsqueeze(all, zero)
        sums = ReduceSum<keepdims=0>(all, one) scores = Unsqueeze(sums, both)
        chosen = NonMaxSuppression(batch, scores) places = Gather<axis=1>(chosen, two) boxes = Gather(all, places)
    """
    numbers = {"rows": [-1, 4], "zero": [0], "one": [1], "both": [0, 1], "two": 2, "w": np.ones((4, 1, 3, 3))}
    onnx.save(build("float[1,1,6,6] image", "float[found,4] boxes", text, numbers, 17), tmp_path / "m.onnx")
    metric = look_at_onnx(tmp_path / "m.onnx", "m.onnx").metric
    assert (metric["name"], metric["decides"]) == ("detection", ["fp32", "fp16", "int8"])


@given(st.text(max_size=100))
def test_any_text_becomes_a_name_of_the_registry(text: str) -> None:
    assert is_name(model_name(text))


AXES = st.one_of(
    st.integers(1, 9),
    st.sampled_from(["?", "N", "unk__1", "a b", "class", "p2o.DynamicDimension.0", "DynamicDimension.1"]),
)
SHAPES = st.lists(st.lists(AXES, max_size=5), min_size=1, max_size=4)


@given(SHAPES)
def test_axis_names_become_dim_names(shapes: list[list[int | str]]) -> None:
    specs = tuple(TensorSpec(f"in put{index}", "float32", tuple(shape)) for index, shape in enumerate(shapes))
    named_axes = name_axes(specs)
    dims_before = [dim for spec in specs for dim in spec.shape]
    after = [dim for spec in named_axes for dim in spec.shape]
    of: dict[int | str, int | str] = {}
    for old_dim, new_dim in zip(dims_before, after, strict=True):
        if isinstance(old_dim, int):
            assert new_dim == old_dim
            continue
        assert isinstance(new_dim, str) and new_dim.isidentifier()
        if old_dim != "?":
            assert of.setdefault(old_dim, new_dim) == new_dim
    unknown_dims = [new_dim for old_dim, new_dim in zip(dims_before, after, strict=True) if old_dim == "?"]
    assert len({*unknown_dims, *of.values()}) == len(unknown_dims) + len(of), "no two dims of the model became one"


def test_a_sum_of_other_dims_stays_one() -> None:
    ids, past_spec = TensorSpec("ids", "int64", ("b", "seq len")), TensorSpec("past", "float32", ("b", "past_seq len"))
    masks = [
        TensorSpec("mask", "int64", ("b", text)) for text in ("past_seq len + seq len", "past_seq len+1", "seq len + x")
    ]
    named_dims = [spec.shape[1] for spec in name_axes((*masks, ids, past_spec))]
    assert named_dims == ["past_seq_len + seq_len", "past_seq_len + 1", "seq_len_x", "seq_len", "past_seq_len"]
    total = tuple(TensorSpec(name, "int64", (name,)) for name in ("total_length", "past_length", "length"))
    assert [spec.shape for spec in name_axes(total)] == [("past_length + length",), ("past_length",), ("length",)]
    assert name_axes(total[:2])[0].shape == ("total_length",)


def test_a_dim_n_is_a_batch_only_at_axis_0() -> None:
    audio = TensorSpec("audio", "float32", ("b", "n"))
    assert name_axes((audio,))[0].shape == ("batch", "length")
    state = TensorSpec("state", "float32", (2, "b", 64))
    assert [spec.shape for spec in name_axes((audio, state))] == [("batch", "length"), (2, "batch", 64)]


@pytest.mark.parametrize("name", ["batch_size", "N", "bs"])
def test_axis_0_of_samples_is_the_batching_dim(name: str) -> None:
    named_axes = name_axes((TensorSpec("x", "float32", (name, 3)), TensorSpec("y", "float32", (name,))))
    assert [spec.shape for spec in named_axes] == [("batch", 3), ("batch",)]


@pytest.mark.parametrize("ir_version", [8, onnx.IR_VERSION])  # the second is newer than onnxruntime reads
@pytest.mark.parametrize("location", ["w.bin", ""])
def test_weights_stay_in_their_file(tmp_path, monkeypatch, location, ir_version):
    weights, folder = {"w": np.ones((40, 40))}, tmp_path / "files"
    folder.mkdir()
    model = build("float[batch,40] x", "float[batch,40] y", "t = Transpose(w) y = MatMul(x, t)", weights)
    model.ir_version = ir_version
    onnx.save(model, folder / "m.onnx", save_as_external_data=bool(location), location=location, size_threshold=0)
    expected = look_at_onnx(folder / "m.onnx", "m.onnx")
    (tmp_path / "link.onnx").symlink_to(folder / "m.onnx")
    held_bytes = []
    monkeypatch.setattr(load_without_lists, "__defaults__", (0,))
    monkeypatch.setattr(onnx_model, "find_sizes", lambda graph: held_bytes.append(graph.ByteSize()) or ())
    actual = look_at_onnx(folder / "m.onnx" if location else tmp_path / "link.onnx", "m.onnx")
    assert "the graph ran at" in actual.dims["batch"].why
    assert (actual.dims, actual.notes[1:]) == (expected.dims, expected.notes[1:]) and "100 %" in actual.notes[1]
    assert held_bytes < [40 * 40 * 4] and {path.name for path in folder.iterdir()} == {"m.onnx", location} - {""}


def test_an_argument_is_given_to_a_file_that_keeps_its_weights(tmp_path, monkeypatch):
    text = "f = Cast<to=1>(n) p = MatMul(x, w) y = Mul(p, f)"
    model = build("float[batch,40] x, int64 n", "float[batch,40] y", text, {"w": np.ones((40, 40))})
    onnx.save(model, tmp_path / "m.onnx")
    monkeypatch.setattr(load_without_lists, "__defaults__", (0,))
    assert "the graph ran at" in look_at_onnx(tmp_path / "m.onnx", "m.onnx", {"n": 1}).dims["batch"].why


def test_an_ifs_condition_is_found_in_linear_time() -> None:
    """Forty sums of a tensor with itself are 2^40 paths to the input."""
    nodes = [helper.make_node("Add", [f"s{index}", f"s{index}"], [f"s{index + 1}"]) for index in range(40)]
    nodes += [helper.make_node("Cast", ["s40"], ["c"], to=TensorProto.BOOL), helper.make_node("If", ["c"], ["y"])]
    end_value_infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, []) for name in ("s0", "y")]
    model = helper.make_model(helper.make_graph(nodes, "g", end_value_infos[:1], end_value_infos[1:]))
    assert onnx_model._deciding_inputs(model) == {"s0"}
