import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from enginery.core.errors import InputError, UnavailableError, UnknownNameError
from enginery.registry.store.base import Store, open_store
from enginery.registry.versions.publish import attach_page
from pipeline.cli import enginery
from tests.enginery.registries import engine, flip, publish_engines, refusal


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setenv("ENGINERY_REGISTRY", str(tmp_path / "registry"))
    monkeypatch.setenv("USER", "ada")
    store = open_store(tmp_path / "registry", create=True)
    attach_page(store, publish_engines(store, [engine(store)], "a").manifest, b"<html>", b"{}")
    publish_engines(store, [engine(store), engine(store, "sm_89", status="unproven")], "b", others=[refusal()])
    return store


def run(*arguments: str) -> Result:
    return CliRunner().invoke(enginery, list(arguments))


def told(*arguments: str) -> object:
    result = run(*arguments, "--json")
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return json.loads(result.stdout)


def test_list(store: Store) -> None:
    assert told("list") == [{"model": "digits", "versions": ["1", "2"], "channels": {"candidate": "2"}}]
    rows = told("list", "digits")
    assert [row["engines"] for row in rows] == [{"proven": 1}, {"proven": 1, "refused": 1, "unproven": 1}]
    assert rows[1]["channels"] == {"candidate": "2"}
    assert "digits" in run("list").stdout and "proven 1, refused 1, unproven 1" in run("list", "digits").stdout
    assert isinstance(run("list", "digit").exception, UnknownNameError)
    newest = run("list", "digits", "--limit", "1", "--json")
    assert [row["version"] for row in json.loads(newest.stdout)] == ["2"] and "--before 2" in newest.stderr
    assert [row["version"] for row in told("list", "digits", "--before", "2")] == ["1"]


def test_show(store: Store) -> None:
    shown = told("show", "digits@1")
    assert (shown["version"], shown["channels"]) == ("1", [])
    assert shown["page"].startswith("file:///") and shown["page"].endswith("/report.html")
    text = run("show", "digits").stdout
    assert "accuracy 0.9700" in text
    assert "digits@2" in text and "candidate" in text and "no FP32 GEMM; use fp16" in text and "unproven" in text


def test_pull(store: Store, tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    pulled = told("pull", "digits", "--target", "sm_89", "--dest", out)
    assert (pulled["status"], pulled["version"]) == ("unproven", "2") and Path(pulled["path"]).is_file()
    assert {row["unit"] for row in pulled["rejected"]} == {"cpu fp32 onnxruntime", "sm_75 fp32 tensorrt-rtx"}
    result = run("pull", "digits", "--target", "cpu", "--dest", out)
    assert "digits-2-cpu-fp32.onnx" in result.stdout and "why:    built for cpu" in result.stdout
    assert "not:    sm_89 fp32 tensorrt-rtx: built for sm_89; this is cpu" in result.stdout and result.stderr == ""
    assert "UNPROVEN" in run("pull", "digits", "--target", "sm_89", "--dest", out).stderr
    refused = run("pull", "digits", "--target", "sm_89", "--proven-only", "--dest", out)
    assert isinstance(refused.exception, UnknownNameError)
    assert isinstance(run("pull", "digits", "--target", "cpu", "--precision", "fp8").exception, UnknownNameError)


def test_verify(store: Store) -> None:
    assert run("verify").exit_code == 0 and told("verify")["sound"]
    digest = engine(store).digest
    flip(store, str(digest))
    result = run("verify", "digits@1")
    assert result.exit_code == 1 and f"corrupt: {digest}" in result.stdout and "DAMAGED" in result.stdout
    assert told("verify", "--repair")["moved_away"] == [digest]
    assert [problem["kind"] for problem in told("verify")["problems"]] == ["missing"]


def test_promote_and_rollback(store: Store) -> None:
    assert "digits:stable -> 1" in run("promote", "digits@1", "--why", "tested").stdout
    assert isinstance(run("promote", "digits@2").exception, InputError)
    moved = told("promote", "digits@2", "digits:stable", "--proven-only")
    assert moved["version"] == "2" and [move["by"] for move in moved["history"]] == ["ada", "ada"]
    assert told("rollback", "digits:stable", "--why", "slow")["history"][-1]["why"] == "slow"
    assert isinstance(run("rollback", "digits").exception, UnknownNameError)
    assert isinstance(run("rollback", "digits@1").exception, UnknownNameError)
    assert "give digits:stable" in str(run("promote", "digits@2", "stable").exception)
    assert "give digits:stable" in str(run("promote", "digits@2", "fraud:stable").exception)


def test_no_registry(tmp_path: Path) -> None:
    result = run("list", "--registry", str(tmp_path / "absent"))
    assert isinstance(result.exception, UnavailableError) and result.exception.exit_code == 3


def test_a_serving_node_imports_nothing_heavy() -> None:
    code = "import sys, enginery.client.pull, enginery.registry.versions.publish, enginery.registry.verification.verify; print(*sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=dict(os.environ))
    loaded = {name.partition(".")[0] for name in out.stdout.split()}
    assert not loaded & {"numpy", "torch", "onnx", "onnxruntime", "ray", "prefect", "pydantic", "boto3", "rich", "yaml"}
