import subprocess
import sys
from pathlib import Path

import pytest

import enginesmith
from enginesmith.client import Policy
from enginesmith.core.errors import UnavailableError, UnknownNameError
from enginesmith.registry.store.base import Store
from tests.enginesmith.registries import engine, publish_engines, refusal

HEAVY = {"torch", "ray", "prefect", "pydantic", "onnx", "onnxruntime", "numpy", "boto3", "botocore", "rich", "click",
         "yaml", "urllib3", "jinja2"}  # fmt: skip


@pytest.fixture
def published(store: Store) -> Store:
    publish_engines(store, [engine(store), engine(store, "l4", "int8", "unproven")], others=[refusal("sm_80")])
    return store


def test_the_client_imports_few_modules(published: Store, tmp_path: Path) -> None:
    code = (
        "import sys, enginesmith\n"
        "enginesmith.Client\n"
        "assert not {'importlib.metadata', 'builders'} & set(sys.modules), 'half of the import time'\n"
        f"client = enginesmith.Client({published.uri!r})\n"
        f"client.resolve('digits', 'cpu'); client.pull('digits', {str(tmp_path / 'out')!r}, target='cpu')\n"
        "print(*(name for name, module in sys.modules.items() if not hasattr(module, '__path__')))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    modules = set(result.stdout.split())
    assert not {name.partition(".")[0] for name in modules} & HEAVY and "builders.backends.discovery" not in modules
    own_modules = {name for name in modules if name.startswith("enginesmith.")}
    assert len(own_modules) <= 25, sorted(own_modules)
    assert not own_modules & {"enginesmith.registry.leases", "enginesmith.registry.versions.channel_writes"}


def test_resolve_and_pull(published: Store, tmp_path: Path) -> None:
    client = enginesmith.Client(published.uri, cache=tmp_path / "cache")
    answer = client.resolve("digits", "l4")
    assert [candidate.entry.unit for candidate in answer.candidates] == ["l4 int8 tensorrt-rtx"]
    assert dict(answer.rejected)["sm_80 fp32 tensorrt-rtx"] == "built for sm_80; this is sm_89 (l4)"
    strict_client = enginesmith.Client(published.uri, policy=Policy(proven_only=True))
    assert strict_client.resolve("digits", enginesmith.Machine((8, 9), "l4")).candidates == ()
    with pytest.raises(UnknownNameError, match="only proven engines"):
        strict_client.pull("digits", tmp_path / "out", target="l4")
    messages: list[int] = []
    engine = client.pull("digits", tmp_path / "out", target="cpu", progress=lambda there, _: messages.append(there))
    assert engine.origin == "registry" and messages == [engine.path.stat().st_size]
    assert client.pull("digits", tmp_path / "out", target="cpu").origin == "there"
    with pytest.raises(UnavailableError):
        enginesmith.Client(tmp_path / "absent").resolve("digits")


def test_the_onnx_model_is_the_last_resort(published: Store, tmp_path: Path) -> None:
    wants = enginesmith.Client(published.uri, policy=Policy(fallback="onnx"))
    assert [candidate.entry.target for candidate in wants.resolve("digits", "l4").candidates] == ["l4", "onnx"]
    pulled_engine = wants.pull("digits", tmp_path / "out", target="h100")
    assert pulled_engine.path.read_bytes() == b"onnx" and pulled_engine.path.name == "digits-1-onnx-fp32.onnx"
    assert "FALLBACK" in str(pulled_engine.warning) and pulled_engine.engine.inputs[0].name == "image"
    with pytest.raises(UnknownNameError):
        enginesmith.pull("digits", registry=published.uri, dest=tmp_path, target="h100")
    assert enginesmith.pull(
        "digits", registry=published.uri, dest=tmp_path, target="h100", fallback="onnx"
    ).path.is_file()
