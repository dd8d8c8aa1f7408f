import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import enginery
from enginery.core.errors import UnavailableError, UnknownNameError
from enginery.registry.store.base import Store
from pipeline.cli import enginery as cli
from tests.enginery.registries import engine, publish_engines, refusal

HEAVY = {"torch", "ray", "prefect", "pydantic", "onnx", "onnxruntime", "numpy", "boto3", "botocore", "rich", "click",
         "yaml", "urllib3", "jinja2"}  # fmt: skip


@pytest.fixture
def published(store: Store) -> Store:
    publish_engines(store, [engine(store), engine(store, "l4", "int8", "unproven")], others=[refusal("sm_80")])
    return store


def test_the_client_is_light(published: Store, tmp_path: Path) -> None:
    code = (
        "import sys, enginery\n"
        f"client = enginery.Client({published.uri!r})\n"
        f"client.resolve('digits', 'cpu'); client.pull('digits', {str(tmp_path / 'out')!r}, machine='cpu')\n"
        "print(*sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=dict(os.environ)
    )
    assert not {name.partition(".")[0] for name in done.stdout.split()} & HEAVY


def test_resolve_and_pull(published: Store, tmp_path: Path) -> None:
    client = enginery.Client(published.uri, cache=tmp_path / "cache")
    answer = client.resolve("digits", "l4")
    assert [candidate.entry.unit for candidate in answer.candidates] == ["l4 int8 tensorrt-rtx"]
    assert dict(answer.rejected)["sm_80 fp32 tensorrt-rtx"] == "built for sm_80; this is sm_89 (l4)"
    strict = enginery.Client(published.uri, policy=enginery.Policy(proven_only=True))
    assert strict.resolve("digits", enginery.Machine((8, 9), "l4")).candidates == ()
    with pytest.raises(UnknownNameError, match="only proven engines"):
        strict.pull("digits", tmp_path / "out", machine="l4")
    told: list[int] = []
    pulled = client.pull("digits", tmp_path / "out", machine="cpu", progress=lambda there, _: told.append(there))
    assert pulled.origin == "registry" and told == [pulled.path.stat().st_size]
    assert client.pull("digits", tmp_path / "out", machine="cpu").origin == "there"
    with pytest.raises(UnavailableError):
        enginery.Client(tmp_path / "absent").resolve("digits")


def test_the_onnx_model_is_the_last_resort(published: Store, tmp_path: Path) -> None:
    wants = enginery.Client(published.uri, policy=enginery.Policy(fallback="onnx"))
    assert [one.entry.target for one in wants.resolve("digits", "l4").candidates] == ["l4", "onnx"]
    pulled = wants.pull("digits", tmp_path / "out", machine="h100")
    assert pulled.path.read_bytes() == b"onnx" and pulled.path.name == "digits-1-onnx-fp32.onnx"
    assert "FALLBACK" in str(pulled.warning) and pulled.engine.inputs[0].name == "image"
    with pytest.raises(UnknownNameError):
        enginery.pull("digits", registry=published.uri, dest=tmp_path, target="h100")
    assert enginery.pull("digits", registry=published.uri, dest=tmp_path, target="h100", fallback="onnx").path.is_file()


def run(store: Store, *arguments: str) -> Result:
    return CliRunner().invoke(cli, [*arguments, "--registry", store.uri])


def test_the_table(published: Store, tmp_path: Path) -> None:
    shown = run(published, "resolve", "digits", "--target", "l4", "--memory", "24", "--driver", "580.65.06")
    assert shown.exit_code == 0
    assert "digits@1 on l4 (driver 580.65.06, memory 24.0 GiB)" in shown.stdout
    assert "l4 int8 tensorrt-rtx" in shown.stdout and "built for sm_80; this is sm_89 (l4)" in shown.stdout
    explained = run(published, "pull", "digits", "--target", "l4", "--explain", "--dest", str(tmp_path / "out"))
    assert "the GPU's memory is unknown" in explained.stdout and not (tmp_path / "out").exists()
    none = run(published, "resolve", "digits", "--target", "h100", "--json")
    assert none.exit_code == 1 and '"candidates": []' in none.stdout
    for wrong in (["--once"], ["--hook", "x"], ["--interval", "3"]):
        assert run(published, "pull", "digits", *wrong).exit_code == 2
    both = ["--watch", "--hook", "x", "--hook-url", "http://x"]
    assert run(published, "pull", "digits:candidate", *both).exit_code == 2


def test_watching_once(published: Store, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = run(
        published, "pull", "digits:candidate", "--target", "cpu", "--watch", "--once", "--dest", str(out), "--json"
    )
    assert done.exit_code == 0, done.output
    assert (out / "current" / "digits-1-cpu-fp32.onnx").is_file() and '"swapped": true' in done.stdout
