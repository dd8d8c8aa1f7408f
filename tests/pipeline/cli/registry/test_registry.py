import json
from pathlib import Path

from enginesmith.core.errors import InputError, UnknownNameError
from enginesmith.registry.store.base import Store
from enginesmith.registry.store.layout import channel_key
from tests.enginesmith.cli.commands import run, told
from tests.enginesmith.registries import engine, flip
from tests.pipeline.projects import Project


def test_show(mixed: Store) -> None:
    shown_fields = told("show", "digits@1")
    assert (shown_fields["version"], shown_fields["channels"]) == ("1", [])
    assert shown_fields["page"].startswith("file:///") and shown_fields["page"].endswith("/report.html")
    text = run("show", "digits").stdout
    assert "accuracy 0.9700" in text and "target  precision  backend       status    size  checks  why\n" in text
    assert "cpu     fp32       onnxruntime   proven    15 B" in text
    assert "digits@2" in text and "candidate" in text and "no FP32 GEMM; use fp16" in text and "unproven" in text


def test_two_views_of_a_version_at_once_are_refused(mixed: Store) -> None:
    result = run("show", "digits", "--diff", "digits@1", "--sbom")
    assert result.exit_code == 2 and "--diff and --sbom show different things" in result.output


def test_verify(mixed: Store) -> None:
    assert run("registry", "fsck").exit_code == 0 and told("registry", "fsck")["sound"]
    digest = engine(mixed).digest
    flip(mixed, str(digest))
    result = run("registry", "fsck", "digits@1")
    assert result.exit_code == 1 and f"corrupt: {digest}" in result.stdout and "DAMAGED" in result.stdout
    assert told("registry", "fsck", "--repair")["moved_away"] == [digest]
    assert [problem["kind"] for problem in told("registry", "fsck")["problems"]] == ["missing"]


def test_verify_reports_how_to_repair_a_late_snapshot(mixed: Store) -> None:
    run("promote", "digits@1")
    data = mixed.read(key := channel_key("digits", "stable")) or b""
    mixed.replace(key, json.dumps({**json.loads(data), "snapshots": {}}).encode(), data)
    result = run("registry", "fsck")
    assert result.exit_code == 1
    assert "to rewrite stale snapshots, run `enginesmith registry fsck --repair`" in result.stderr
    assert "delete the folder" not in result.stderr and "DAMAGED" in result.stdout
    mended = run("registry", "fsck", "--repair")
    assert mended.exit_code == 1 and "\nrepaired: " in mended.stdout and "to mend it" not in mended.stderr
    assert run("registry", "fsck").exit_code == 0


def test_promote_and_rollback(mixed: Store) -> None:
    assert "digits:stable -> 1" in run("promote", "digits@1", "--why", "tested").stdout
    assert isinstance(run("promote", "digits@2").exception, InputError)
    moved_fields = told("promote", "digits@2", "digits:stable", "--proven-only")
    assert moved_fields["version"] == "2" and [move["by"] for move in moved_fields["history"]] == ["ada", "ada"]
    assert told("rollback", "digits:stable", "--why", "slow")["history"][-1]["why"] == "slow"
    assert isinstance(run("rollback", "digits").exception, UnknownNameError)
    assert isinstance(run("rollback", "digits@1").exception, UnknownNameError)
    assert "digits:canary -> 1" in run("promote", "digits@1", "canary").stdout
    assert "give digits:stable" in str(run("promote", "digits@2", "fraud:stable").exception)


def test_metrics_are_written_for_node_exporter(built: Project, tmp_path: Path) -> None:
    assert built.run("registry", "metrics", "--textfile", tmp_path / "enginesmith.prom").code == 0
    assert "enginesmith_registry_up 1.0" in (tmp_path / "enginesmith.prom").read_text()
