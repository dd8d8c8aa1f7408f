import json
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest

from builders.backends import discovery
from builders.backends.aotinductor import AotInductor
from builders.backends.aotinductor import backend as module
from builders.backends.onnxruntime import OrtSession
from enginesmith.core.codec import encode
from enginesmith.core.errors import DataError, EnginesmithError
from enginesmith.core.hardware.cpu_kinds import host_level
from enginesmith.core.requirements import Cpu, Instructions, Runtime
from enginesmith.core.types import ShapeProfile, TensorSpec
from tests.builders import graphs

pytestmark = pytest.mark.skipif(host_level() not in ("x86-64-v3", "x86-64-v4"), reason="needs an x86-64 CPU with AVX2")

# What runs the compiler: an engine takes 12 s of CPU time, and one that fails 8 s.
compiled = pytest.mark.slow

# ids [n, m] -> rows of a table, their mean over m, and a product; both sizes also reach the output as numbers.
LOOKUP = """
    <ir_version: 10, opset_import: ["": 20]>
    g (int64[n, m] ids, float[n, 4] x) => (float[n, 3] y, float[n, m] ones, int64[2] sizes)
    <int64[1] one = {1}, float[1] unit = {1.0}>
    {
        rows = Gather (table, ids)
        mean = ReduceMean <keepdims = 0> (rows, one)
        sum = Add (mean, x)
        y = MatMul (sum, w)
        sizes = Shape (ids)
        ones = Expand (unit, sizes)
    }
"""
INPUTS = (TensorSpec("ids", "int64", ("n", "m")), TensorSpec("x", "float32", ("n", 4)))
OUTPUTS = (
    TensorSpec("y", "float32", ("n", 3)),
    TensorSpec("ones", "float32", ("n", "m")),
    TensorSpec("sizes", "int64", (2,)),
)
# Two buckets of m, which one engine serves.
PROFILES = (
    ShapeProfile((("ids", (1, 1), (2, 4), (8, 4)), ("x", (1, 4), (2, 4), (8, 4)))),
    ShapeProfile((("ids", (1, 5), (8, 16), (8, 16)), ("x", (1, 4), (8, 4), (8, 4)))),
)


def request(backend=None, **changes):
    backend = backend or AotInductor()
    fields = {"inputs": INPUTS, "outputs": OUTPUTS, "profiles": PROFILES, "toolchain": discovery.toolchain_of(backend)}
    return graphs.request("cpu", backend="aotinductor", **(fields | changes))


def arrays(n, m, highest=10):
    rng = np.random.default_rng(n * 100 + m)
    return {"ids": rng.integers(-10, highest, (n, m)), "x": rng.random((n, 4), dtype="f")}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    rng = np.random.default_rng(0)
    onnx_model = onnx.parser.parse_model(LOOKUP)
    for name, shape in (("table", (10, 4)), ("w", (4, 3))):
        onnx_model.graph.initializer.append(onnx.numpy_helper.from_array(rng.standard_normal(shape).astype("f"), name))
    path = tmp_path_factory.mktemp("model") / "model.onnx"
    onnx.save(onnx_model, path)
    return path


@pytest.fixture(scope="module")
def built(model, tmp_path_factory):
    """The engine, and what the folders that a build might write to held before and after."""
    import torch._inductor.config

    home = tmp_path_factory.mktemp("home")  # a home of its own: tests beside this one make folders in the user's
    watched_homes = [home, home / ".cache", Path(tempfile.gettempdir()) / "torchinductor_root"]
    # The wrapper's own optimization is most of the time that a build of a small graph takes.
    wrapper = torch._inductor.config.patch({"aot_inductor.compile_wrapper_opt_level": "O0"})
    with pytest.MonkeyPatch.context() as patch, wrapper:
        patch.setenv("HOME", str(home))
        names_before = [_names(folder) for folder in watched_homes], dict(os.environ)
        engine = AotInductor().build(request(), model, tmp_path_factory.mktemp("build"))
        after = [_names(folder) for folder in watched_homes], dict(os.environ)
    return engine, names_before, after


@pytest.fixture(scope="module")
def engine(built):
    return built[0]


@pytest.fixture(scope="module")
def session(engine):
    with AotInductor().open(engine) as opened_file:
        yield opened_file


def _at(engine, path: Path):
    return replace(engine, path=path, size_bytes=path.stat().st_size)


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


@compiled
@pytest.mark.parametrize(("n", "m"), [(1, 1), (3, 4), (8, 5), (2, 16)])
def test_an_engine_computes_its_graph_at_any_size_of_any_profile(session, model, n, m):
    expected = OrtSession(model, optimized=False).run(arrays(n, m))
    result = session.run(arrays(n, m))
    assert list(result) == ["y", "ones", "sizes"]
    for name, array in expected.items():
        assert result[name].dtype == array.dtype
        np.testing.assert_allclose(result[name], array, atol=1e-6, err_msg=name)


@compiled
@pytest.mark.parametrize("index", [10, -11, 1 << 40])
def test_an_index_out_of_range_raises_an_error(session, index):
    outer_arrays = arrays(2, 4)
    outer_arrays["ids"][1, 3] = index
    with pytest.raises(DataError, match=r"index is out of range at node 'rows'"):
        session.run(outer_arrays)
    assert np.isfinite(session.run(arrays(2, 4))["y"]).all()


@compiled
def test_a_build_leaves_only_the_engine(built):
    engine, built_before, after = built
    assert built_before == after
    assert _names(engine.path.parent) == ["engine.pt2"]
    assert engine.suffix == ".pt2" and engine.size_bytes == engine.path.stat().st_size


@compiled
def test_code_uses_only_instructions_of_its_x86_64_level(engine):
    """Left alone, inductor takes VNNI and AMX where the building host has them."""
    with zipfile.ZipFile(engine.path) as archive:
        notes = [json.loads(archive.read(name)) for name in archive.namelist() if name.endswith("_metadata.json")]
    expected = {"x86-64-v3": "AVX2", "x86-64-v4": "AVX512"}[host_level()]
    assert {note["AOTI_CPU_ISA"] for note in notes} == {expected}
    assert dict(engine.request.toolchain)["cpu"] == host_level()


@compiled
def test_an_engine_runs_without_the_model_and_without_onnx(engine, tmp_path):
    saved_fields = {"request": encode(engine.request), "path": str(engine.path), "size": engine.size_bytes}
    (tmp_path / "engine.json").write_text(json.dumps(saved_fields))
    code = """
import json, sys
from pathlib import Path
sys.modules["onnx"] = sys.modules["onnxruntime"] = None
import numpy as np
from builders.backends.aotinductor import AotInductor
from enginesmith.core.codec import (decode, encode)
from enginesmith.core.types import BuildRequest, Engine
saved = json.loads(Path(sys.argv[1]).read_text())
engine = Engine(decode(saved["request"], BuildRequest), Path(saved["path"]), "", saved["size"], ".pt2")
with AotInductor().open(engine) as session:
    print(session.run({"ids": np.zeros((1, 1), "int64"), "x": np.zeros((1, 4), "float32")})["sizes"].tolist())
"""
    result = subprocess.run([sys.executable, "-c", code, str(tmp_path / "engine.json")], capture_output=True, text=True)
    assert result.stdout.strip() == "[1, 1]", result.stderr


@compiled
def test_another_cpu_another_torch_and_a_closed_session_are_refused(engine, monkeypatch):
    with AotInductor().open(engine) as opened_file:
        pass
    with pytest.raises(EnginesmithError, match="closed"):
        opened_file.run(arrays(1, 1))
    other_names = tuple((name, "9.9" if name == "torch" else value) for name, value in engine.request.toolchain)
    wrong_engine = replace(engine, request=replace(engine.request, toolchain=other_names))
    with pytest.raises(EnginesmithError, match=r"needs torch 9.9, found 2"), AotInductor().open(wrong_engine):
        pass
    monkeypatch.setattr("enginesmith.core.hardware.cpu_kinds.machine_flags", frozenset)
    with pytest.raises(EnginesmithError, match=r"compiled for x86-64-v\d, and this CPU has no .*fma"):
        AotInductor().open(engine).__enter__()


@compiled
def test_opening_an_engine_requires_no_compiler(engine):
    built_toolchain = dict(engine.request.toolchain)
    level = built_toolchain["cpu"]
    assert engine.requires == (Cpu("cpu"), Runtime("torch", built_toolchain["torch"]), Instructions(level))


@compiled
def test_foreign_packages_are_refused_before_torch_reads_them(engine, tmp_path):
    cut_path = tmp_path / "cut.pt2"
    cut_path.write_bytes(engine.path.read_bytes()[:1000])
    more_path = tmp_path / "more.pt2"
    more_path.write_bytes(engine.path.read_bytes())
    with zipfile.ZipFile(more_path, "a") as archive:
        archive.writestr("engine/data/weights/weight_0", b"a pickle")
    for path, words in ((cut_path, "not an AOTInductor package"), (more_path, "holds 'engine/data/weights/weight_0'")):
        with pytest.raises(EnginesmithError, match=words), AotInductor().open(_at(engine, path)):
            pass


@pytest.mark.parametrize("name", ["a/../../b", "/etc/passwd", "e/data/aotinductor/model/../x", "e/models/model.json"])
def test_members_outside_the_code_are_refused(tmp_path, name):
    path = tmp_path / "engine.pt2"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(name, b"")
    with pytest.raises(EnginesmithError, match=re.escape(repr(name))):
        module.check_members(path)


def test_a_non_text_name_is_a_damaged_package(tmp_path):
    path = tmp_path / "engine.pt2"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("\u00fc" * 9, b"")
    path.write_bytes(path.read_bytes().replace("\u00fc".encode(), b"\xc3\xff"))
    with pytest.raises(EnginesmithError, match="not an AOTInductor package"):
        module.check_members(path)


@compiled
def test_a_compiler_failure_is_an_error_with_its_message(model, tmp_path):
    broken_path = tmp_path / "c++"
    broken_path.write_text(
        "#!/bin/sh\ncase $1 in -dump*|*-version) echo 1.0;; *) echo no room on device >&2; exit 1;; esac\n"
    )
    broken_path.chmod(0o755)
    backend = AotInductor(compiler=str(broken_path))
    assert backend.versions()["c++"] == "1.0"
    with pytest.raises(EnginesmithError, match=r"AOTInductor cannot compile the model: .*no room on device"):
        backend.build(request(backend), model, tmp_path)


def test_versions_of_torch_compiler_and_level_change_the_build_key(monkeypatch):
    versions = AotInductor().versions()
    assert set(versions) == {"torch", "c++", "cpu"} and versions["cpu"] == host_level()
    assert request(AotInductor(cpu="x86-64-v3")).key != request(AotInductor(cpu="x86-64-v4")).key
    key_before = request().key
    monkeypatch.setattr(module, "compiler_version", lambda command: "99.1")
    assert request().key != key_before


def test_refusals_come_before_work_and_name_the_remedy(monkeypatch):
    ask = AotInductor().refuses
    assert ask(request()) is None
    assert "use int8" in ask(request(precision="fp8"))
    assert "has no CUDA" in ask(graphs.request("sm_89", backend="aotinductor"))
    wide_specs = (TensorSpec("x", "uint64", (1,)),)
    assert "'x' is uint64" in ask(request(inputs=wide_specs, profiles=()))
    assert "apt-get install g++" in AotInductor(compiler="no-such-compiler").refuses(request())
    monkeypatch.setattr(module, "host_level", lambda: "aarch64")
    assert "this machine is aarch64" in ask(request())
    monkeypatch.setattr(module, "versions_of", lambda *names: {})
    assert AotInductor().versions() == {}
    assert "pip install" in ask(request())


def test_engines_run_on_cpus_and_on_a_present_gpu():
    assert AotInductor().runs(request().target) is None
    assert AotInductor().runs(graphs.request("sm_89").target) is not None
