import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from builders.onnx_graphs.bodies import list_shards
from builders.onnx_graphs.outline import save_graph
from enginesmith.client.client import Client
from enginesmith.client.resolve import Policy
from enginesmith.core.codec import encode
from enginesmith.core.errors import DataError, IntegrityError, canonical_json, digest_of_file
from enginesmith.core.hardware.cpu_kinds import this_kind
from enginesmith.core.reports.latency import LatencyReport, MachineKind
from enginesmith.core.types import ShapeProfile
from enginesmith.opening import open_onnx
from enginesmith.registry.manifest import EngineEntry
from enginesmith.registry.store.base import open_store
from enginesmith.registry.versions.publish import add_latencies
from enginesmith.serving.router import Router, open_described
from tests.enginesmith.registries import engine, publish_engines
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
    entries = {
        "file": net.name,
        "digest": digest_of_file(net) if net.is_file() else "0" * 64,
        "target": name,
        "precision": "fp32",
        "backend": "onnxruntime",
        "inputs": spec,
        "outputs": [{"name": "y", "dtype": "float32", "shape": SHAPE}],
        "profiles": [],
    }
    path = net.with_name(f"{name}.json")
    path.write_text(json.dumps(entries | more))
    return path


def profiles(*bounds: tuple[tuple[int, int], tuple[int, int]]) -> list[object]:
    return [encode(ShapeProfile((("x", low, high, high),))) for low, high in bounds]


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


def test_a_router_over_descriptions_pads_by_their_rules_and_falls_back_to_the_graph(net):
    rules = {"padding": {"inputs": {"x": {"n": 0}}, "edges": {"n": [4, 8]}}}
    pulled = [
        At(described(net, "cpu", profiles=profiles(((1, 1), (4, 8))), **rules)),
        At(described(net, "onnx", **rules)),
    ]
    with Router.opened(pulled) as router:
        for shape in ((2, 3), (4, 8), (5, 3), (1, 9)):
            np.testing.assert_array_equal(router.run(x(*shape))["y"], expected(x(*shape)))
        counts = router.counts()
    assert [bucket.name for bucket in counts.buckets] == [
        f"cpu fp32 onnxruntime: batch 1..4, n <= {edge}" for edge in (4, 8)
    ]
    assert [bucket.requests for bucket in counts.buckets] == [1, 1] and counts.fallbacks["onnx fp32 onnxruntime"] == 2


def test_a_callers_function_opens_engines_of_other_compilers(net):
    engine = net.rename(net.with_suffix(".engine"))
    pulled = [At(described(engine, "gpu", profiles=profiles(((1, 1), (4, 8)))))]
    with pytest.raises(DataError, match=r"net\.engine is not an engine of onnxruntime; its own .*: give `opens`"):
        Router.opened(pulled)
    router = Router.opened(
        pulled, opens=lambda path: lambda inputs: {"y": expected(inputs), "from": np.array(path.name)}
    )
    assert str(router.run(x(1, 3))["from"]) == "net.engine"


def test_unroutable_engines_are_reported(net):
    with pytest.raises(DataError, match=r"a model with state, .* use enginesmith\.Streams"):
        open_described(described(net, "cpu", state=[]), None, None)
    (bad_path := net.with_name("bad.json")).write_text("{}")
    with pytest.raises(DataError, match=r"bad\.json describes no engine: inputs is missing"):
        open_described(bad_path, None, None)


def test_an_engine_opens_with_onnxruntime_alone(net, monkeypatch):
    """Without an option that changes numbers: what was proven is right in a plain session."""
    opened, plain = list[ort.SessionOptions](), ort.InferenceSession
    monkeypatch.setattr(
        ort, "InferenceSession", lambda model, options, **more: opened.append(options) or plain(model, options, **more)
    )
    description = described(net, "net")
    for inputs in (At(description), description, str(description), net):
        np.testing.assert_array_equal(open_onnx(inputs)(x(2, 3))["y"], expected(x(2, 3)))
    Router.opened([At(description)]).run(x(2, 3))
    assert [asks(options) for options in opened] == [False] * 5


def test_an_engine_is_opened_only_with_the_bytes_that_were_published(net):
    pulled = [At(described(net, "cpu", profiles=profiles(((1, 1), (4, 8)))))]
    net.write_bytes(net.read_bytes() + b"\n")
    opens = [lambda: open_onnx(pulled[0]), lambda: Router.opened(pulled)]
    opens.append(lambda: Router.opened(pulled, opens=lambda _: expected))
    for open_it in opens:
        with pytest.raises(IntegrityError, match=r"net\.onnx has the digest .* was published; pull it again"):
            open_it()


@pytest.mark.parametrize("file", ["../net.onnx", "/tmp/net.onnx", ".", "sub/net.onnx"])
def test_an_engine_outside_its_folder_is_not_opened(net, file):
    for open_it in (open_onnx, lambda path: open_described(path, lambda _: dict, None)):
        with pytest.raises(DataError, match=r"cpu\.json describes no engine: file is"):
            open_it(described(net, "cpu", file=file))


def test_sizes_that_an_engine_was_not_proven_for_are_refused(net):
    run = open_onnx(described(net, "cpu", profiles=profiles(((1, 1), (32, 8)))))
    np.testing.assert_array_equal(run(x(32, 8))["y"], expected(x(32, 8)))
    for wrong_arrays in (x(64, 8), x(1, 9), {"x": np.zeros((1, 2), np.float64)}, {}):
        with pytest.raises(DataError):
            run(wrong_arrays)
    with pytest.raises(DataError, match=r"no optimization profile holds x \(64, 8\); the engine was built for"):
        run(x(64, 8))
    any_runner = open_onnx(described(net, "onnx"))
    assert any_runner(x(64, 9))["y"].shape == (64, 9)


def test_weights_in_shards_are_found_and_checked(tmp_path):
    weights = np.arange(64 * 64, dtype=np.float32).reshape(64, 64)
    path = tmp_path / "net.onnx"
    save_graph(build("float[n,64] x", "float[n,64] y", "y = MatMul(x, w)", {"w": weights}), path, 4096)
    shards = list(list_shards(path))
    assert shards
    entries = {"x": np.eye(64, dtype=np.float32)}
    run = open_onnx(described(path, "cpu", shards=shards))
    np.testing.assert_array_equal(run(entries)["y"], weights)
    (tmp_path / shards[0]).write_bytes(b"other")
    with pytest.raises(IntegrityError, match="has the digest"):
        open_onnx(described(path, "cpu", shards=shards))


def test_other_engines_than_onnxruntimes_are_reported_before_opening(net):
    with pytest.raises(DataError, match=r"cpu\.json describes several graphs; use enginesmith\.Ensemble"):
        open_onnx(described(net, "cpu", graphs=[]))
    with pytest.raises(DataError, match=r"gone\.json describes no engine"):
        open_onnx(net.with_name("gone.onnx"))


def test_all_engines_of_a_version_are_pulled_best_first_with_their_rules_and_times(tmp_path):
    store = open_store(tmp_path / "registry", create=True)
    engines = [engine(store, "cpu", "fp32"), engine(store, "cpu", "int8")]
    actual = publish_engines(store, engines)
    add_latencies(store, actual.manifest, [store.put_bytes(canonical_json(encode(timed(engines[0]))))])
    client = Client(tmp_path / "registry", policy=Policy(fallback="onnx"))
    pulled_engines = client.pull_all("digits", tmp_path / "dest")
    assert [item.engine.precision for item in pulled_engines] == ["fp32", "int8", "fp32"]
    assert [item.engine.target for item in pulled_engines] == ["cpu", "cpu", "onnx"]
    assert [item.latency is not None for item in pulled_engines] == [True, False, False]
    assert all(item.path.is_file() and item.description.is_file() for item in pulled_engines)
    opened_engine, _ = open_described(pulled_engines[0].description, lambda _: dict, pulled_engines[0].latency)
    intervals = [bucket.interval("session") for bucket in pulled_engines[0].latency.buckets]
    assert [opened_engine.seconds({"batch": size}) for size in (1, 8, 32)] == intervals


def timed(entry: EngineEntry) -> LatencyReport:
    """A report about an entry on a machine of this kind."""
    machine = MachineKind("cpu", this_kind().name, 1, "Linux", ())
    return latency_report(engine=entry.digest, machine=machine, unit=entry.unit)
