import shutil

import numpy as np
import pytest

from builders.backends import discovery
from builders.backends.onnxruntime import OrtSession
from enginesmith.core.errors import EnginesmithError
from tests.builders import graphs, native_graphs
from tests.builders.native_graphs import ran


@pytest.fixture(params=["iree", "tvm"])
def compiler(request):
    result = discovery.configure(request.param, {})
    if not result.versions() or not shutil.which("g++"):
        pytest.skip(f"{request.param} is not installed, or g++, which TVM links with")
    return result


def test_odd_names_are_accepted(compiler, tmp_path):
    """TVM would read the dim 'seq-len' as the difference of two others."""
    model, request = native_graphs.odd_names(tmp_path / "m.onnx", compiler)
    x = {"in put/é": np.ones((5, 4), "f")}
    with OrtSession(model) as reference:
        expected = reference.run(x)["o'ut:0"]
    np.testing.assert_allclose(ran(compiler, request, model, x, tmp_path)["o'ut:0"], expected, rtol=1e-6)


def test_bool_and_int64_keep_their_types(compiler, tmp_path):
    model, request = native_graphs.flags(tmp_path / "m.onnx", compiler)
    x = np.array([[True, False, True, False]])
    result = ran(compiler, request, model, {"x": x}, tmp_path)
    assert (result["y"] == ~x).all() and (result["n"] == x).all() and result["n"].dtype == np.int64


def test_an_engine_for_a_better_cpu_is_not_opened(compiler, tmp_path, monkeypatch):
    options, toolchain = discovery.options_of(compiler), discovery.toolchain_of(compiler)
    request = graphs.request("cpu", backend=compiler.name, options=options, toolchain=toolchain)
    engine = compiler.build(request, graphs.mlp(tmp_path / "m.onnx"), tmp_path)
    monkeypatch.setattr("enginesmith.core.hardware.cpu_kinds.machine_flags", frozenset)
    with (
        pytest.raises(EnginesmithError, match=r"compiled for x86-64-v3, and this CPU has no .*avx2"),
        compiler.open(engine),
    ):
        pass
