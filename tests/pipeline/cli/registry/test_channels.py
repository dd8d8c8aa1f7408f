from pathlib import Path

from enginesmith.core.errors import InputError, UnknownNameError
from enginesmith.registry.store.base import Store
from enginesmith.registry.versions import lookup
from tests.enginesmith.cli.commands import run, said, told
from tests.pipeline.canary.files import write_observations


def test_history_shows_the_canary_of_each_move(three: Store, tmp_path: Path) -> None:
    said("promote", "digits@1", "--why", "first")
    assert "requires proven engines for cpu and a canary's PASS" in said(
        "registry", "policy", "set", "digits:stable", "--proven", "cpu", "--canary", "--why", "rule 7"
    )
    result = run("promote", "digits@2")
    assert isinstance(result.exception, InputError) and "needs a canary's PASS" in str(result.exception)
    second_manifest, first_manifest = (lookup.load(three, "digits", name) for name in "21")
    paths = write_observations(tmp_path / "canary", second_manifest, first_manifest)
    said("canary", "judge", "--candidate", paths[0], "--baseline", paths[1])
    report = tmp_path / "canary" / "report.json"
    said("promote", "digits@2", "--why", "faster", "--canary", report)
    rows = told("registry", "history", "digits:stable")
    assert [(row["version"], row["by"], len(row["canary"])) for row in rows] == [("1", "ada", 0), ("2", "ada", 1)]
    assert three.read_blob(rows[1]["canary"][0]) == report.read_bytes()
    text = said("registry", "history", "digits")
    assert "faster canary PASS" in text and rows[1]["canary"][0][:12] in text and rows[0]["report"][:12] in text
    assert isinstance(run("registry", "history", "digits@1").exception, UnknownNameError)


def test_policy_show(three: Store) -> None:
    lines = said("registry", "policy", "show", "digits:stable")
    assert lines.startswith("digits:stable: no policy is set\n") and "must be proven on real inputs" in lines
    assert told("registry", "policy", "show", "digits:stable")["built_in"] in lines
    assert "any version with a usable engine" in said("registry", "policy", "show", "digits:candidate")
    said("registry", "policy", "set", "*:stable", "--proven", "l4,cpu")
    assert "requires proven engines for cpu, l4 (set for *:stable by ada" in said(
        "registry", "policy", "show", "digits:stable"
    )
    result = told("registry", "policy", "show", "*:stable")
    assert result["policy"]["proven"] == ["cpu", "l4"] and result["of"] == "*:stable"
    assert told("registry", "policy", "set", "digits:stable")["proven"] == []
    lines = said("registry", "policy", "show", "digits:stable")
    assert "requires nothing more than the built-in rules (set for digits:stable" in lines
    assert isinstance(run("registry", "policy", "show", "digits").exception, UnknownNameError)


def test_policies_may_precede_the_first_version(tmp_path: Path) -> None:
    fresh_path = tmp_path / "fresh"
    refused_result = run("registry", "policy", "set", "*:stable", "--proven", "amper", "--registry", fresh_path)
    assert isinstance(refused_result.exception, UnknownNameError) and not fresh_path.exists()
    result = run("registry", "policy", "set", "*:stable", "--proven", "cpu", "--registry", fresh_path)
    assert result.exit_code == 0 and f"created the registry file://{fresh_path}" in result.stderr
    assert "created" not in run("registry", "policy", "set", "*:stable", "--registry", fresh_path).stderr
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes").touch()
    assert "is not a registry" in str(
        run("registry", "policy", "set", "*:stable", "--registry", tmp_path / "other").exception
    )
