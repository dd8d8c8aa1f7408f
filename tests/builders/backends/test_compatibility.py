from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import pytest

from builders.backends import discovery
from builders.backends.onnxruntime import OnnxRuntime
from enginesmith.core.errors import EnginesmithError, IntegrityError
from enginesmith.core.requirements import for_target, same_versions
from enginesmith.core.types import Engine
from tests.builders import graphs
from tests.builders.backends.test_onnxruntime import image, ort_request


@dataclass(frozen=True)
class Plain:
    """A backend whose engines are opened by the very versions that built them."""

    name: ClassVar[str] = "plain"
    install: ClassVar[str] = "pip install plain"
    here: str = "1.2.3"

    def versions(self):
        return {"plain": self.here} if self.here else {}

    def requires(self, request):
        return (for_target(request.target), *same_versions(dict(request.toolchain), "plain", "gone"))

    def runs(self, target):
        return None if target.is_cpu else f"no {target.sm} GPU on this machine"


def request(built: str = "1.2.3", target: str = "cpu", backend: str = "plain"):
    return replace(graphs.request(target, backend=backend), toolchain=(("enginesmith-plain", "9"), ("plain", built)))


@pytest.mark.parametrize(
    ("backend", "expected", "words"),
    [
        (Plain(), request(), None),
        (Plain(), request("1.2"), None),
        (Plain(), request("1.2.4"), "needs plain 1.2.4, found 1.2.3; install that version, or build it again here"),
        (Plain(), request("1.2.3+cpu"), "needs plain 1.2.3+cpu, found 1.2.3"),
        (Plain(), request(target="sm_89"), "built for sm_89, and cannot run here: no sm_89 GPU"),
        (Plain(), request(backend="other"), "built by other, not by plain; open it with other"),
        (Plain(""), request(), "built by plain, which is not installed here: pip install plain"),
        (Plain(), replace(request(), toolchain=()), None),
    ],
)
def test_an_engine_fits_or_the_reason_names_both_versions_and_the_remedy(backend, expected, words):
    reason = discovery.find_incompatibility(backend, expected)
    assert reason is None if words is None else words in reason


@pytest.mark.parametrize(("built", "fits"), [("1.30.9", True), ("1.31.1", True), ("99.0", False)])
def test_an_onnx_file_needs_a_runtime_as_new_as_its_writer(built, fits):
    request = replace(ort_request(), toolchain=(("onnxruntime", built),))
    reason = discovery.find_incompatibility(OnnxRuntime(), request)
    assert (reason is None) is fits
    assert fits or ("saved by onnxruntime 99.0; " in reason and "install that version" in reason)


@pytest.fixture
def engine(tmp_path) -> Engine:
    expected = replace(ort_request(), toolchain=discovery.toolchain_of(OnnxRuntime()))
    expected = replace(expected, options=discovery.options_of(OnnxRuntime()))
    return OnnxRuntime().build(expected, graphs.mlp(tmp_path / "model.onnx"), tmp_path)


def test_open_engine_opens_with_the_backend_and_the_options_of_the_request(engine):
    with discovery.open_engine(engine) as session:
        assert session.run(image(2))["logits"].shape == (2, 3)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"backend": "tensorrt-rtx"}, "built by tensorrt-rtx, not by onnxruntime"),
        ({"toolchain": (("onnxruntime", "99.0"),)}, "saved by onnxruntime 99.0"),
        ({"target": graphs.request("sm_89").target}, "cannot run here"),
    ],
)
def test_a_backend_itself_opens_no_foreign_engine(engine, changes, words):
    foreign_engine = replace(engine, request=replace(engine.request, **changes))
    with pytest.raises(EnginesmithError, match=words), OnnxRuntime().open(foreign_engine):
        pass


def test_a_truncated_or_missing_file_is_not_opened(engine):
    Path(engine.path).write_bytes(engine.path.read_bytes()[:-1])
    with pytest.raises(IntegrityError, match=f"has {engine.size_bytes - 1} bytes instead of {engine.size_bytes}"):
        discovery.open_engine(engine).__enter__()
    engine.path.unlink()
    with pytest.raises(IntegrityError, match="does not exist"):
        discovery.open_engine(engine).__enter__()
