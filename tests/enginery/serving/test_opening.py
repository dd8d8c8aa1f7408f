"""Routers over engines out of a registry, and compiles that are kept in a folder."""

import json
import threading
import time
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from enginery import opening
from enginery.client.client import Client
from enginery.client.resolve import Policy
from enginery.core.codec import encode
from enginery.core.digest import canonical_json
from enginery.core.errors import DataError
from enginery.core.hardware.cpu_kinds import CpuKind, this_kind
from enginery.core.reports.latency import LatencyReport, MachineKind
from enginery.core.types import ShapeProfile
from enginery.opening import open_onnx
from enginery.registry.manifest import EngineEntry
from enginery.registry.store.base import open_store
from enginery.registry.versions.additions import add_latencies
from enginery.serving.opening import open_described
from enginery.serving.ort_compiling import OrtCompiler
from enginery.serving.router import Router
from tests.enginery.registries import engine, publish_engines
from tests.pipeline.quantization.small_nets import build
from tests.validation.latency.reports import latency_report

SHAPE = ["batch", "n"]


@pytest.fixture
def net(tmp_path: Path) -> Path:
    """y = relu(x) + x, [batch, n]."""
    path = tmp_path / "net.onnx"
    text = "float[batch,n] y", "r = Relu(x)\ny = Add(r, x)"
    onnx.save(build("float[batch,n] x", *text, {}), path)
    return path


def described(net: Path, name: str, **more: object) -> Path:
    spec = [{"name": "x", "dtype": "float32", "shape": SHAPE}]
    found = {
        "file": net.name,
        "target": name,
        "precision": "fp32",
        "backend": "onnxruntime",
        "inputs": spec,
        "outputs": [{"name": "y", "dtype": "float32", "shape": SHAPE}],
        "profiles": [],
    }
    path = net.with_name(f"{name}.json")
    path.write_text(json.dumps(found | more))
    return path


def profiles(*bounds: tuple[tuple[int, int], tuple[int, int]]) -> list[object]:
    return [ShapeProfile((("x", low, high, high),)).to_json() for low, high in bounds]


def asks(options: ort.SessionOptions) -> bool:
    try:
        return options.get_session_config_entry("session.x64quantprecision") == "1"
    except RuntimeError:  # it was not set
        return False


class At:
    """What a router needs of a pulled engine."""

    latency = None

    def __init__(self, description: Path) -> None:
        self.description = description


def x(*shape: int) -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(0).standard_normal(shape, np.float32)}


def expected(inputs: dict[str, np.ndarray]) -> np.ndarray:
    return np.maximum(inputs["x"], 0) + inputs["x"]


def test_a_router_over_descriptions_pads_by_their_rules_and_falls_back_to_the_graph(net, tmp_path):
    rules = {"padding": {"inputs": {"x": {"n": 0}}, "edges": {"n": [4, 8]}}}
    pulled = [
        At(described(net, "cpu", profiles=profiles(((1, 1), (4, 8))), **rules)),
        At(described(net, "onnx", **rules)),
    ]
    with Router.opened(pulled, cache=tmp_path / "compiled") as router:
        for shape in ((2, 3), (4, 8), (5, 3), (1, 9)):
            np.testing.assert_array_equal(router.run(x(*shape))["y"], expected(x(*shape)))
        counts = router.counts()
    assert [each.name for each in counts.buckets] == [
        f"cpu fp32 onnxruntime: batch 1..4, n <= {edge}" for edge in (4, 8)
    ]
    assert [each.requests for each in counts.buckets] == [1, 1] and counts.fallbacks["onnx fp32 onnxruntime"] == 2


def test_a_callers_function_opens_engines_of_other_compilers(net):
    engine = net.rename(net.with_suffix(".engine"))
    pulled = [At(described(engine, "gpu", profiles=profiles(((1, 1), (4, 8)))))]
    with pytest.raises(DataError, match=r"net\.engine is no engine of onnxruntime, and its own .*: give `opens`"):
        Router.opened(pulled)
    router = Router.opened(
        pulled, opens=lambda path: lambda inputs: {"y": expected(inputs), "from": np.array(path.name)}
    )
    assert str(router.run(x(1, 3))["from"]) == "net.engine"


def test_what_no_router_runs_is_told(net):
    with pytest.raises(DataError, match=r"a model with state, .* use enginery\.Streams"):
        open_described(described(net, "cpu", state=[]), None, None)
    (bad := net.with_name("bad.json")).write_text("{}")
    with pytest.raises(DataError, match=r"bad\.json describes no engine: inputs is missing"):
        open_described(bad, None, None)


@pytest.mark.parametrize("saturates", [False, True])
def test_an_engine_is_opened_with_the_options_that_this_kind_of_cpu_needs(net, monkeypatch, saturates):
    monkeypatch.setattr(opening, "this_kind", lambda: CpuKind("any", "any", saturates=saturates))
    opened, plain = list[ort.SessionOptions](), ort.InferenceSession
    monkeypatch.setattr(
        ort, "InferenceSession", lambda file, options, **more: opened.append(options) or plain(file, options, **more)
    )
    description = described(net, "net", session_options_without_vnni={"session.x64quantprecision": "1"})
    for given in (At(description), description, str(description), net):
        np.testing.assert_array_equal(open_onnx(given)(x(2, 3))["y"], expected(x(2, 3)))
    Router.opened([At(description)]).run(x(2, 3))
    assert [asks(options) for options in opened] == [saturates] * 5


def test_what_is_no_engine_of_onnxruntime_is_told_before_it_is_opened(net):
    with pytest.raises(DataError, match=r"cpu\.json describes several graphs; use enginery\.Ensemble"):
        open_onnx(described(net, "cpu", graphs=[]))
    with pytest.raises(DataError, match=r"gone\.json describes no engine"):
        open_onnx(net.with_name("gone.onnx"))
    with pytest.raises(DataError, match=r"cpu\.json describes no engine: .*session_options_without_vnni"):
        open_onnx(described(net, "cpu", session_options_without_vnni=["a"]))


def test_a_size_is_compiled_once_for_all_routers_of_a_folder(net, tmp_path):
    cache = tmp_path / "cache"
    one, other = OrtCompiler(net, cache), OrtCompiler(net, cache)
    inputs = x(3, 5)
    np.testing.assert_array_equal(one({"batch": 3, "n": 5})(inputs)["y"], expected(inputs))
    (file,) = cache.glob("*.compiled.onnx")
    before = file.read_bytes()
    assert [dim.dim_value for dim in onnx.load(file).graph.input[0].type.tensor_type.shape.dim] == [3, 5]
    net.write_bytes(b"gone")  # what is in the folder is opened, not made again
    object.__setattr__(other, "_digest", one._digest)
    np.testing.assert_array_equal(other({"batch": 3, "n": 5})(inputs)["y"], expected(inputs))
    assert file.read_bytes() == before


def test_routers_that_compile_the_same_size_at_once_are_safe(net, tmp_path):
    cache, errors = tmp_path / "cache", []

    def compile_all():
        try:
            for n in range(1, 6):
                inputs = x(2, n)
                found = OrtCompiler(net, cache, most=3)({"batch": 2, "n": n})(inputs)["y"]
                np.testing.assert_array_equal(found, expected(inputs))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=compile_all) for _ in range(4)]
    [thread.start() for thread in threads], [thread.join(60) for thread in threads]
    assert errors == [] and len(list(cache.glob("*.compiled.onnx"))) <= 3
    assert [path.name for path in cache.iterdir() if path.suffix not in (".onnx", ".lock")] == []


def test_a_folder_that_cannot_be_used_is_told_and_requests_are_answered(net, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.warns(RuntimeWarning, match=r"using the cache .*file.*; no sizes are compiled"):
        router = Router.opened([At(described(net, "onnx"))], cache=tmp_path / "file")
    with router:
        np.testing.assert_array_equal(router.run(x(3, 5))["y"], expected(x(3, 5)))
        while not (compiles := router.counts().compiles).failed:
            time.sleep(0.005)
    assert "using the cache" in compiles.reason


def test_a_damaged_file_of_the_folder_is_made_again(net, tmp_path):
    compiler = OrtCompiler(net, tmp_path / "cache")
    compiler({"batch": 1, "n": 2})
    (file,) = (tmp_path / "cache").glob("*.compiled.onnx")
    file.write_bytes(b"half")
    np.testing.assert_array_equal(compiler({"batch": 1, "n": 2})(x(1, 2))["y"], expected(x(1, 2)))
    onnx.load(file)


def test_a_size_that_the_graph_cannot_have_is_the_compilers_reason(tmp_path):
    path = tmp_path / "fixed.onnx"
    onnx.save(build("float[batch,n] x, float[3] k", "float[batch,n] y", "y = Add(x, k)", {}), path)
    with pytest.raises(Exception, match=r"(?i)shape|broadcast|dimension"):
        OrtCompiler(path)({"batch": 1, "n": 4})({"x": np.ones((1, 4), np.float32), "k": np.ones(3, np.float32)})


def test_all_engines_of_a_version_are_pulled_best_first_with_their_rules_and_times(tmp_path):
    store = open_store(tmp_path / "registry", create=True)
    engines = [engine(store, "cpu", "fp32"), engine(store, "cpu", "int8")]
    found = publish_engines(store, engines)
    add_latencies(store, found.manifest, [store.put_bytes(canonical_json(encode(timed(engines[0]))))])
    client = Client(tmp_path / "registry", policy=Policy(fallback="onnx"))
    pulled = client.pull_all("digits", tmp_path / "dest")
    assert [each.engine.precision for each in pulled] == ["fp32", "int8", "fp32"]
    assert [each.engine.target for each in pulled] == ["cpu", "cpu", "onnx"]
    assert [each.latency is not None for each in pulled] == [True, False, False]
    assert all(each.path.is_file() and each.description.is_file() for each in pulled)
    opened = open_described(pulled[0].description, lambda _: dict, pulled[0].latency)
    intervals = [bucket.interval("session") for bucket in pulled[0].latency.buckets]
    assert [opened.engine.seconds({"batch": size}) for size in (1, 8, 32)] == intervals


def timed(entry: EngineEntry) -> LatencyReport:
    """A report about an entry on a machine of this kind."""
    machine = MachineKind("cpu", this_kind().name, 1, "Linux", ())
    return latency_report(engine=entry.digest, machine=machine, unit=entry.unit)
