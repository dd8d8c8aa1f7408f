import subprocess
import sys

import numpy as np
import onnx
import pytest

from builders.backends import discovery
from builders.backends.onnxruntime import OrtSession
from builders.onnx_graphs.bodies import guard_divisions
from enginesmith.core.types import ShapeProfile, TensorSpec
from tests.builders import graphs

DIVISORS = [0, -1, 3, -3, 1, 0]


def numerators(dtype: str) -> np.ndarray:
    return np.array([7, np.iinfo(dtype).min, 8, 8, -9 % 256 if dtype == "uint8" else -9, 0], dtype)


def parsed(text: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["": 20]> g {text}""")


def answers(model: onnx.ModelProto, path, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, path)
    with OrtSession(path) as session:
        return session.run(inputs)


@pytest.mark.parametrize("dtype", ["int32", "int64", "uint8"])
def test_division_by_zero_gives_zero_and_others_stay(tmp_path, dtype):
    distance = np.abs(DIVISORS).astype(dtype) if dtype == "uint8" else np.array(DIVISORS, dtype)
    model = parsed(
        f"({dtype}[n] x, {dtype}[n] by) => ({dtype}[n] y, {dtype}[n] z) {{ y = Div (x, by) z = Mod (x, by) }}"
    )
    guard_divisions(model)
    actual = answers(model, tmp_path / "m.onnx", {"x": numerators(dtype), "by": distance})
    low = int(np.iinfo(dtype).min)
    signed_numbers, numbers = ([0, low, 2, -2, -9, 0], [0, 0, 2, -1, 0, 0]), ([0, 0, 2, 2, 247, 0], [0, 0, 2, 2, 0, 0])
    expected = numbers if dtype == "uint8" else signed_numbers
    assert (actual["y"].tolist(), actual["z"].tolist()) == expected


def test_floats_constants_and_sizes_are_not_changed():
    model = parsed("""
        (float[n] x, float[n] by, int64[n, m] k) => (float[n] y, int64[n, m] z, int64[2] s)
        <int64 two = {2}>
        { y = Div (x, by) z = Div (k, two) sizes = Shape (k) s = Div (sizes, sizes) }
    """)
    model_bytes_before = model.SerializeToString()
    guard_divisions(model)
    assert model.SerializeToString() == model_bytes_before


def test_a_division_in_a_branch_by_a_captured_value_is_safe(tmp_path):
    text = "(bool c, int32[n] x, int32[n] by) => (int32[n] y) { same = Identity (by) y = If (c) <%s> }"
    branches = ("t () => (int32[n] q) { q = Div (x, same) }", "e () => (int32[n] p) { p = Mod (x, same) }")
    model = parsed(text % "then_branch = {}, else_branch = {}".format(*branches))
    guard_divisions(model)
    entries = {"x": np.array([6, 7], "i4"), "by": np.array([0, 2], "i4")}
    assert answers(model, tmp_path / "m.onnx", {**entries, "c": np.array(True)})["y"].tolist() == [0, 3]
    assert answers(model, tmp_path / "m.onnx", {**entries, "c": np.array(False)})["y"].tolist() == [0, 1]


PROFILE = ShapeProfile((("x", (1,), (4,), (16,)), ("by", (1,), (4,), (16,))))
RUN = """
import sys
from pathlib import Path
import numpy as np
from builders.backends import discovery
from enginesmith.core.errors import DataError
from tests.builders.onnx_graphs.test_safe_division import DIVISORS, numerators, wanted
name, model, workdir = sys.argv[1:]
tool = discovery.configure(name, {})
engine = tool.build(wanted(name), Path(model), Path(workdir))
with tool.open(engine) as session:
    for divisors in ([2] * 6, [-1] * 6, DIVISORS):
        try:
            made = session.run({"x": numerators("int64"), "by": np.array(divisors)})
            print({key: array.tolist() for key, array in made.items()})
        except DataError as error:
            print(error)
"""


def wanted(name: str):
    specs = {key: tuple(TensorSpec(item, "int64", ("n",)) for item in names) for key, names in
             (("inputs", ("x", "by")), ("outputs", ("y", "z")))}  # fmt: skip
    tool = discovery.configure(name, {})
    made_by = {"options": discovery.options_of(tool), "toolchain": discovery.toolchain_of(tool)}
    return graphs.request("cpu", backend=name, profiles=(PROFILE,), **made_by, **specs)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["aotinductor", "iree", "tvm", "xla"])
def test_no_divisor_kills_an_engines_process(tmp_path, name):
    if reason := discovery.configure(name, {}).refuses(wanted(name)):
        pytest.skip(reason)
    model = tmp_path / "m.onnx"
    onnx.save(
        parsed("(int64[n] x, int64[n] by) => (int64[n] y, int64[n] z) { y = Div (x, by) z = Mod (x, by) }"), model
    )
    command = [sys.executable, "-W", "ignore", "-c", RUN, name, str(model), str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-2000:]
    plain_line, minus_line, zero = result.stdout.splitlines()[-3:]
    low = np.iinfo("int64").min
    assert plain_line == str({"y": [3, low // 2, 4, 4, -4, 0], "z": [1, 0, 0, 0, 1, 0]})
    assert minus_line == str({"y": [-7, low, -8, -8, 9, 0], "z": [0] * 6})
    if name == "aotinductor":
        assert zero.startswith("an integer is divided by zero at node 'y'")
    elif name != "xla":  # which answers -1
        assert zero == str({"y": [0, low, 2, -2, -9, 0], "z": [0, 0, 2, -1, 0, 0]})
