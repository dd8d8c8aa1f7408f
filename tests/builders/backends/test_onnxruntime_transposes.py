import sys
from pathlib import Path
from subprocess import run

import numpy as np
import onnx
import pytest
from onnx import ModelProto, parser

from builders.backends.onnxruntime import OnnxRuntime, OrtSession
from builders.backends.onnxruntime.file import cast_first
from builders.backends.onnxruntime.session import open_model, session_options
from enginesmith.core.types import BuildRequest, Target
from pipeline.quantization.schemes.cast import cast_float
from tests.pipeline.quantization.small_nets import build

LEVELS = ("none", "extended", "all")


def recurrent(cell: str, gates: int) -> ModelProto:
    """Batch first, as PyTorch exports it, and a projection of each step: `x` [batch, steps, 6]."""
    rng = np.random.default_rng(1)
    weights = {
        "w": rng.normal(size=(1, 16 * gates, 6)) / 3, "r": rng.normal(size=(1, 16 * gates, 16)) / 4,
        "wo": rng.normal(size=(16, 5)), "axes": np.array([1]),
    }  # fmt: skip
    text = f"""
        t = Transpose<perm=[1,0,2]>(x) y4 = {cell}<hidden_size=16>(t, w, r) y3 = Squeeze(y4, axes)
        y = Transpose<perm=[1,0,2]>(y3) z = MatMul(y, wo)
    """
    return build("float[batch,steps,6] x", "float[batch,steps,5] z", text, weights)


def build_in_fp16(model: Path) -> None:
    """Build at each level, and open the file as whoever sets no option does."""
    for level in LEVELS:
        (model.parent / level).mkdir()
        request = BuildRequest("", "fp16", Target("cpu"), "onnxruntime", (), (), ())
        engine = OnnxRuntime(graph_optimization=level).build(request, model, model.parent / level)
        assert any("to before the Transpose: 1;" in note for note in engine.notes)
        open_model(engine.path, session_options("ORT_ENABLE_ALL", 1))


@pytest.mark.parametrize(("cell", "gates"), [("GRU", 3), ("LSTM", 4)])
def test_recurrent_layers_build_in_fp16_and_the_files_open_with_any_options(cell, gates, tmp_path):
    model = recurrent(cell, gates)
    onnx.save(model, tmp_path / "fp32.onnx")
    onnx.save(cast_float(model, "fp16")[0], tmp_path / "fp16.onnx")
    command = f"import pathlib, {__name__} as t; t.build_in_fp16(pathlib.Path('{tmp_path}/fp16.onnx'))"
    result = run([sys.executable, "-c", command], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-500:]
    x = {"x": np.random.default_rng(2).normal(size=(2, 7, 6)).astype(np.float32)}
    expected = OrtSession(tmp_path / "fp32.onnx", optimized=False).run(x)["z"]
    for level in LEVELS:
        actual = OrtSession(tmp_path / level / "engine.onnx").run(x)["z"]
        np.testing.assert_allclose(actual, expected, atol=0.02)


def chain(perm: str, more: str = "", outputs: str = "float[b,a,5] z") -> ModelProto:
    weights = {"w": np.random.default_rng(3).normal(size=(16, 5))}
    text = f"t = Transpose<perm={perm}>(x) c = Cast<to=1>(t) z = MatMul(c, w) {more}"
    return build("float16[a,b,16] x", outputs, text, weights)


def answers(model: ModelProto, path: Path) -> dict[str, np.ndarray]:
    onnx.save(model, path)
    return OrtSession(path, optimized=False).run({"x": np.random.default_rng(4).normal(size=(3, 4, 16)).astype("f2")})


@pytest.mark.parametrize(
    ("more", "outputs", "operators"),
    [
        ("", "", ["Cast", "Transpose", "MatMul"]),
        ("u = Relu(t)", ", float16[b,a,16] u", ["Transpose", "Cast", "Transpose", "MatMul", "Relu"]),
        ("u = MatMul(c, w)", ", float[b,a,5] u", ["Cast", "Transpose", "MatMul", "MatMul"]),
        ("d = Cast<to=1>(t) u = MatMul(d, w)", ", float[b,a,5] u", [*["Cast", "Transpose", "MatMul"] * 2]),
        ("", ", float16[b,a,16] t, float[b,a,16] c", ["Transpose", "Cast", "Transpose", "MatMul"]),
    ],
)  # fmt: skip
def test_the_cast_comes_first_and_readers_get_the_same_tensor(more, outputs, operators, tmp_path):
    model = chain("[1,0,2]", more, f"float[b,a,5] z{outputs}")
    model.graph.node[0].name = "t"
    answers_before = answers(model, tmp_path / "before.onnx")
    assert cast_first(model) == operators.count("Cast")
    onnx.checker.check_model(model)
    assert [node.op_type for node in model.graph.node] == operators
    names = [node.name for node in model.graph.node if node.name]  # onnxruntime opens no file with one twice
    assert "t" in names and len({*names}) == len(names)
    after = answers(model, tmp_path / "after.onnx")
    assert all((after[name] == answers_before[name]).all() for name in answers_before)
    assert not cast_first(model)


@pytest.mark.parametrize("perm", ["[0,2,1]", "[2,1,0]", "[0,1,2]"])
def test_transposes_of_the_first_axis_and_without_a_fusion_stay(perm: str) -> None:
    assert not cast_first(chain(perm))


BODIES = """<ir_version: 8, opset_import: ["": 20]>
g (bool yes, float16[a,b,16] x, float[16,5] w) => (float[b,a,5] y) {
    y = If(yes) <
        then_branch = g1 () => (float[b,a,5] z)
            { t = Transpose<perm=[1,0,2]>(x) c = Cast<to=1>(t) z = MatMul(c, w) },
        else_branch = g2 () => (float[b,a,5] z2)
            { u = Transpose<perm=[2,1,0]>(x) d = Cast<to=1>(u) z2 = MatMul(d, w) }
    >
}"""


def test_node_bodies_are_rewritten_too() -> None:
    model = parser.parse_model(BODIES)
    assert cast_first(model) == 1
    then_branch = next(item.g for item in model.graph.node[0].attribute if item.name == "then_branch")
    assert [node.op_type for node in then_branch.node] == ["Cast", "Transpose", "MatMul"]
