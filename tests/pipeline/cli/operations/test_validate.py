import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from builders.execution.local import LocalExecutor
from enginesmith.core.errors import IntegrityError
from enginesmith.registry.evidence.attestations import judge_entries
from enginesmith.registry.versions.lookup import load
from pipeline.compile.run_context import RunContext
from pipeline.operations.validate import validate
from tests.pipeline.projects import Project
from validation.gpu.devices import OfflineBundle


def engine_limits(report: Any) -> dict[str, float | None]:
    return {check["name"]: check["limit"] for check in report["checks"] if check["stage"] == "engine"}


def test_validate_uses_the_limits_of_the_publication(project: Project) -> None:
    limits = {"limits": {"int8": {"engine": {"sqnr_db": 12.0}}}}
    project.change_spec(targets=["cpu"], precisions=["int8"], validation=limits)
    assert project.build().code == 0
    done_document = project.run("validate", "tiny", "--json").json
    (attested_path,) = (project.registry / "models").rglob(f"{done_document['engines'][0]['report']}.json")
    actual = engine_limits(json.loads(attested_path.read_bytes()))
    assert (actual["sqnr_db"], actual["max_rel"]) == (12.0, 0.6)


def test_a_version_with_an_unsupported_spec_gives_one_message(built: Project) -> None:
    store, manifest = built.published()
    foreign_manifest = replace(manifest, spec={**manifest.spec, "backends": {"from-elsewhere": {}}})
    executor = LocalExecutor()
    with pytest.raises(IntegrityError, match=r"tiny@1: its spec does not fit.*from-elsewhere"):
        list(validate(foreign_manifest, RunContext(store, executor, executor)))


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("", "built by onnxruntime, which is not installed here"),
        ("0.1", "saved by onnxruntime .*; 0.1 is here; install that version"),
    ],
)
def test_a_machine_that_cannot_open_an_engine_gives_no_verdict(built, monkeypatch, version, expected):
    fields = {"onnxruntime": version} if version else {}
    monkeypatch.setattr("builders.backends.onnxruntime.cpu.OnnxRuntime.versions", lambda _: fields)
    store, executor = built.store, LocalExecutor()
    manifest = load(store, "tiny", "1")
    result = list(validate(manifest, RunContext(store, executor, executor), ["cpu"]))
    assert [(item.verdict, item.report) for item in result] == [("proven", None)] * 2
    assert all(re.search(f"passed.*, on .*; not run here: {expected}", item.reason) for item in result)
    assert {entry.status for entry in judge_entries(store, manifest) if entry.target == "cpu"} == {"proven"}


def test_offline_proofs_work_from_the_command_line(built: Project, tmp_path: Path) -> None:
    result = built.run("validate", "tiny", "--carry", tmp_path / "out", "--target", "sm_89", "--json")
    assert result.code == 0, result.err
    document = OfflineBundle.load(tmp_path / "out")
    assert [item.digest for item in document.engines] == result.json["engines"]
    assert {item.request.target.name for item in document.engines} == {"sm_89"}
    second_result = built.run("validate", "tiny", "--carry", tmp_path / "out")
    assert second_result.code == 2 and "is not empty" in second_result.err
    for words in ((), ("tiny", "--import", tmp_path / "out" / "carry.json")):
        assert built.run("validate", *words).code == 2
