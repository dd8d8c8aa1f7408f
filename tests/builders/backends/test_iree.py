import dataclasses
import re

import numpy as np
import onnx
import pytest

from builders.backends import discovery
from builders.backends.iree import Iree
from builders.backends.iree import backend as iree
from builders.backends.onnxruntime import OrtSession
from enginesmith.core.errors import DataError, EnginesmithError, ModelError, StepError
from enginesmith.core.types import TensorSpec
from tests.builders import graphs, native_graphs

IREE = Iree()


@pytest.fixture
def compiler():
    pytest.importorskip("iree.compiler")
    pytest.importorskip("iree.runtime")


@pytest.fixture
def installed(monkeypatch):
    monkeypatch.setattr(iree, "versions_of", lambda *names, together: dict.fromkeys(names, "3.13.0"))


def own_request(target="cpu", precision="fp32", backend=IREE, **changes):
    toolchain, options = discovery.toolchain_of(backend), discovery.options_of(backend)
    return graphs.request(target, precision, "iree", toolchain=toolchain, options=options, **changes)


@pytest.mark.parametrize(
    ("target", "precision", "words"),
    [
        ("sm_90", "fp32", "IREE makes no code for sm_90; use tvm"),
        ("sm_100", "fp16", "no code for sm_100"),
        ("sm_121", "int8", "no code for sm_121"),
        ("cpu", "bf16", "bfloat16 for CPUs only in part .*; use fp32"),
        ("cpu", "fp8", "FP8; use int8"),
        ("l4", "int8-dynamic", "MatMulInteger for CPUs only; use int8"),
        ("sm_89", "int4", "blockwise DequantizeLinear, .*; use int8"),
    ],
)
def test_unsupported_requests_are_refused_with_a_remedy(installed, target, precision, words):
    assert re.search(words, IREE.refuses(own_request(target, precision)))


@pytest.mark.parametrize("target", ["cpu", "t4", "sm_80", "a10", "l4", "sm_120"])
@pytest.mark.parametrize("precision", ["fp32", "fp16", "int8"])
def test_supported_requests_are_accepted(installed, target, precision):
    assert IREE.refuses(own_request(target, precision)) is None


def test_unenforceable_shapes_are_refused(installed):
    assert "no elements" in IREE.refuses(own_request(inputs=(TensorSpec("image", "float32", ("batch", 0)),)))


def test_host_adds_the_cpu_to_the_key_and_a_level_does_not(installed):
    assert Iree(cpu="host").versions()["cpu"] == iree.host_level()
    assert "cpu" not in IREE.versions()


def test_gpu_engines_run_where_the_gpu_is(installed):
    assert IREE.runs(own_request().target) is None
    assert IREE.runs(own_request("l4").target) == "no sm_89 GPU on this machine"


def test_an_engine_computes_what_its_model_computes_at_every_batch(compiler, tmp_path):
    model = graphs.mlp(tmp_path / "model.onnx")
    engine = IREE.build(own_request(), model, tmp_path)
    assert engine.path == tmp_path / "engine.vmfb" and engine.suffix == ".vmfb"
    (tmp_path / "again").mkdir()
    assert IREE.build(own_request(), model, tmp_path / "again").digest == engine.digest  # as `determinism` says
    with IREE.open(engine) as session, OrtSession(model, optimized=False) as reference:
        for batch in (1, 3, 16):
            x = {"image": np.random.default_rng(batch).standard_normal((batch, 8)).astype("f")}
            np.testing.assert_allclose(session.run(x)["logits"], reference.run(x)["logits"], rtol=1e-5, atol=1e-5)
        with pytest.raises(DataError, match="no optimization profile holds"):
            session.run({"image": np.zeros((17, 8), "f")})
    older_request = dataclasses.replace(engine.request, toolchain=(("iree-base-compiler", "3.1.0"),))
    with (
        pytest.raises(EnginesmithError, match=r"needs iree-base-compiler 3\.1\.0, found"),
        IREE.open(dataclasses.replace(engine, request=older_request)),
    ):
        pass


def test_differing_sizes_that_should_be_equal_are_reported(compiler, tmp_path):
    """By default IREE adds the first row and says nothing."""
    model, request = native_graphs.two_sizes(tmp_path / "m.onnx", IREE)
    x = {"x": np.ones((1, 4), "f"), "y": np.ones((3, 4), "f")}
    with pytest.raises(EnginesmithError, match=r"IREE failed while running: mismatched size for broadcast$"):
        native_graphs.ran(IREE, request, model, x, tmp_path)


def test_doubles_stay_doubles(compiler, tmp_path):
    model, request = native_graphs.doubles(tmp_path / "m.onnx", IREE)
    x = {"x": np.full((2, 4), 2.0)}
    np.testing.assert_array_equal(native_graphs.ran(IREE, request, model, x, tmp_path)["y"], np.sqrt(x["x"]))


def test_ptx_is_built_for_a_generation(compiler, tmp_path):
    engine = IREE.build(own_request("l4"), graphs.mlp(tmp_path / "m.onnx"), tmp_path)
    data = engine.path.read_bytes()
    assert b".target sm_89" in data and b".target sm_80" not in data
    with pytest.raises(EnginesmithError, match="no sm_89 GPU on this machine"), IREE.open(engine):
        pass


def test_an_operator_it_lacks_is_named_with_its_node(compiler, tmp_path):
    model = graphs.int4_mlp(tmp_path / "m.onnx")
    with pytest.raises(ModelError, match=r"node 'dequantize_w' \(DequantizeLinear\): failed to legalize"):
        IREE.build(own_request(), model, tmp_path)


def test_an_invalid_engine_is_refused_with_a_message(compiler, tmp_path):
    engine = IREE.build(own_request(), graphs.one_node(tmp_path / "m.onnx", "Relu", shape=(2, 8)), tmp_path)
    engine.path.write_bytes(b"x" * engine.size_bytes)
    with pytest.raises(EnginesmithError, match=r"IREE cannot load engine\.vmfb: .*; build it again"), IREE.open(engine):
        pass


def test_a_compiler_that_dies_is_a_crash_of_this_unit(compiler, tmp_path, monkeypatch):
    dying_path = tmp_path / "iree-compile"
    dying_path.write_text('#!/bin/sh\necho "x.mlir:1:1: error: loc(\\"n0\\"): it hurts" >&2\nkill -SEGV $$\n')
    dying_path.chmod(0o755)
    monkeypatch.setattr("builders.backends.iree.compile._compiler", lambda: dying_path)
    with pytest.raises(StepError, match=r"died of signal 11: node 'down' \(Cast\): it hurts") as error:
        IREE.build(own_request(), graphs.mlp(tmp_path / "m.onnx"), tmp_path)
    assert error.value.kind == "crash"


def test_external_data_is_embedded(compiler, tmp_path):
    model = onnx.load(graphs.mlp(tmp_path / "model.onnx"))
    (tmp_path / "apart").mkdir()
    place = tmp_path / "apart" / "model.onnx"
    onnx.save(model, place, save_as_external_data=True, location="weights.bin", size_threshold=0)
    whole_build = IREE.build(own_request(), tmp_path / "model.onnx", tmp_path)
    assert IREE.build(own_request(), place, tmp_path / "apart").digest == whole_build.digest
