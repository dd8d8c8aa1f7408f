"""The commands history, policy, pin, unpin, gc, mirror, export-oci, and pages of list."""

import json
from pathlib import Path

import pytest
from click import UsageError
from click.testing import CliRunner, Result

from enginery.core.errors import InputError, UnknownNameError
from enginery.registry.store.base import Store, open_store
from enginery.registry.versions import lookup
from pipeline.cli import enginery
from tests.enginery.registries import engine, publish_engines
from tests.pipeline.canary.files import write_observations


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setenv("ENGINERY_REGISTRY", str(tmp_path / "registry"))
    monkeypatch.setenv("USER", "ada")
    store = open_store(tmp_path / "registry", create=True)
    for content in "abc":
        publish_engines(store, [engine(store, data=content.encode())], content, channel=None)
    return store


def run(*arguments: object) -> Result:
    return CliRunner().invoke(enginery, [str(argument) for argument in arguments])


def said(*arguments: object) -> str:
    result = run(*arguments)
    assert result.exit_code == 0, (result.output, result.exception)
    return result.stdout


def told(*arguments: object) -> object:
    return json.loads(said(*arguments, "--json"))


def test_history_and_the_canary_that_spoke(store: Store, tmp_path: Path) -> None:
    said("promote", "digits@1", "--why", "first")
    assert "needs proven engines for cpu and a canary's PASS" in said(
        "policy", "set", "digits:stable", "--proven", "cpu", "--canary", "--why", "rule 7"
    )
    refused = run("promote", "digits@2")
    assert isinstance(refused.exception, InputError) and "needs a canary's PASS" in str(refused.exception)
    two, one = (lookup.load(store, "digits", name) for name in "21")
    paths = write_observations(tmp_path / "canary", two, one)
    said("canary", "judge", "--candidate", paths[0], "--baseline", paths[1])
    report = tmp_path / "canary" / "report.json"
    said("promote", "digits@2", "--why", "faster", "--canary", report)
    rows = told("history", "digits:stable")
    assert [(row["version"], row["by"], len(row["canary"])) for row in rows] == [("1", "ada", 0), ("2", "ada", 1)]
    assert store.read_blob(rows[1]["canary"][0]) == report.read_bytes()
    text = said("history", "digits")
    assert "faster canary PASS" in text and rows[1]["canary"][0][:12] in text and rows[0]["report"][:12] in text
    assert isinstance(run("history", "digits@1").exception, UnknownNameError)


def test_policy_show(store: Store) -> None:
    assert said("policy", "show", "digits:stable") == "digits:stable: no policy\n"
    said("policy", "set", "*:stable", "--proven", "l4,cpu")
    assert "needs proven engines for cpu, l4 (set for *:stable by ada" in said("policy", "show", "digits:stable")
    found = told("policy", "show", "*:stable")
    assert found["policy"]["proven"] == ["cpu", "l4"] and found["of"] == "*:stable"
    assert told("policy", "set", "digits:stable")["proven"] == []
    assert "requires nothing more (set for digits:stable" in said("policy", "show", "digits:stable")
    assert isinstance(run("policy", "show", "digits").exception, UnknownNameError)


def test_rules_may_come_before_the_first_version(tmp_path: Path) -> None:
    fresh = tmp_path / "fresh"
    refused = run("policy", "set", "*:stable", "--proven", "amper", "--registry", fresh)
    assert isinstance(refused.exception, UnknownNameError) and not fresh.exists()
    result = run("policy", "set", "*:stable", "--proven", "cpu", "--registry", fresh)
    assert result.exit_code == 0 and f"there was no registry at file://{fresh}; made one" in result.stderr
    assert "made one" not in run("policy", "set", "*:stable", "--registry", fresh).stderr
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes").touch()
    assert "is no registry" in str(run("policy", "set", "*:stable", "--registry", tmp_path / "other").exception)


def test_gc_shows_first_and_deletes_when_told(store: Store) -> None:
    assert "digits@1 is pinned" in said("pin", "digits@1") and "already" in said("pin", "digits@1")
    result = run("gc", "--keep-versions", 1)
    assert (
        "digits@2" in result.stdout and "add --delete" in result.stderr and "2 versions kept; 0 bytes" in result.stdout
    )
    found = told("gc", "--keep-versions", 1, "--grace", "0s", "--delete")
    assert {item["state"] for item in found["items"]} == {"deleted"} and found["acted"] and found["deleted_bytes"] > 0
    assert found["kept"] == {"digits@1": ["pinned"], "digits@3": ["among the newest"]} and found["leases"] == []
    assert told("pin", "digits@1") == {"model": "digits", "version": "1", "pinned": True, "changed": False}
    assert "not pinned any more" in said("unpin", "digits@1") and "digits@1 is pinned" in said("pin", "digits@1")
    assert told("unpin", "digits@1") == {"model": "digits", "version": "1", "pinned": False}
    assert isinstance(run("unpin", "digits").exception, UnknownNameError)
    assert "2 versions kept; 0 bytes deleted, 0 bytes" in said("gc")
    assert run("gc", "--grace", "soon").exit_code == 2
    assert told("verify")["problems"] == []


def test_mirror_and_export(store: Store, tmp_path: Path) -> None:
    said("promote", "digits@2")
    found = told("mirror", "digits:stable", "digits@3", tmp_path / "other", "--channels")
    assert (found["versions"], found["moved"]) == (["digits@2", "digits@3"], ["digits:stable"])
    text = said("mirror", "digits@2", tmp_path / "other")
    assert "digits@2\n0 blobs copied (0 bytes)" in text
    assert told("list", "--registry", tmp_path / "other")[0]["channels"] == {"stable": "2"}
    result = run("export-oci", "digits:stable", tmp_path / "oci")
    assert f"oci:{tmp_path / 'oci'}:digits-2-cpu-fp32-onnxruntime" in result.stdout and "skopeo copy" in result.stderr
    assert told("export-oci", "digits:stable", tmp_path / "oci")["tags"][0] == "digits-2"


def test_pages_of_list(store: Store) -> None:
    publish_engines(store, [engine(store)], "z", model="other")
    result = run("list", "--limit", "1", "--json")
    assert [row["model"] for row in json.loads(result.stdout)] == ["digits"] and "--after digits" in result.stderr
    assert [row["model"] for row in told("list", "--after", "digits")] == ["other"]
    assert [row["version"] for row in told("list", "digits", "--after", "1")] == ["2", "3"]
    assert "--after 2" in run("list", "digits", "--after", "1", "--limit", "1").stderr
    assert "--before 2" in run("list", "digits", "--limit", "2").stderr
    # All that there is, is no page.
    for arguments in ((), ("digits", "--before", "3"), ("digits", "--after", "1")):
        result = run("list", *arguments, "--limit", "2", "--json")
        assert result.stderr == "" and len(json.loads(result.stdout)) == 2
    assert run("list", "digits", "--limit", "3").stderr == ""
    assert isinstance(run("list", "--before", "1").exception, UsageError | SystemExit)
