"""Proving published engines again: under the same limits, and with every trouble as data or as one message."""

import json
import re
from dataclasses import replace
from typing import Any

import pytest

from builders.execution.local import LocalExecutor
from enginery.core.errors import IntegrityError
from enginery.registry.evidence.attestations import judged
from enginery.registry.store.base import open_store
from enginery.registry.versions.lookup import load
from pipeline.compile.publication.publish import resolved_spec
from pipeline.compile.run_context import RunContext
from pipeline.operations.revalidate import revalidate
from pipeline.spec.file import load_spec
from pipeline.spec.model import ModelSpec, overrides
from tests.pipeline.projects import Project


def engine_limits(report: Any) -> dict[str, float | None]:
    return {check["name"]: check["limit"] for check in report["checks"] if check["joint"] == "engine"}


def test_a_limit_that_the_spec_left_alone_still_holds_when_the_manifest_is_read_back(project: Project) -> None:
    project.change_spec(validation={"limits": {"int8": {"engine": {"sqnr_db": 12.0, "cosine": None}}}})
    spec = load_spec(project.spec)
    again = ModelSpec.model_validate(json.loads(json.dumps(resolved_spec(spec))))
    assert overrides(again, "int8", "engine") == {"sqnr_db": 12.0, "cosine": None}
    assert overrides(again, "int8", "quantization") == {}


def test_validating_holds_an_engine_to_the_limits_it_was_published_under(project: Project) -> None:
    limits = {"limits": {"int8": {"engine": {"sqnr_db": 12.0}}}}
    project.change_spec(targets=["cpu"], precisions=["int8"], validation=limits)
    assert project.build().code == 0
    done = project.run("validate", "tiny", "--json").json
    (attested,) = (project.registry / "models").rglob(f"{done['engines'][0]['report']}.json")
    found = engine_limits(json.loads(attested.read_bytes()))
    assert (found["sqnr_db"], found["max_rel"]) == (12.0, 0.6)


def test_a_version_whose_spec_does_not_fit_this_installation_is_named_in_one_message(built: Project) -> None:
    store = open_store(built.registry)
    manifest = load(store, "tiny", "1")
    foreign = replace(manifest, spec={**manifest.spec, "backends": {"from-elsewhere": {}}})
    executor = LocalExecutor()
    with pytest.raises(IntegrityError, match=r"tiny@1: its spec does not fit.*from-elsewhere"):
        list(revalidate(foreign, RunContext(store, executor, executor)))


@pytest.mark.parametrize(
    ("version", "said"),
    [
        ("", "built by onnxruntime, which is not installed here"),
        ("0.1", "saved by onnxruntime .*; 0.1 is here; install that version"),
    ],
)
def test_a_machine_whose_compiler_does_not_open_an_engine_says_nothing_about_it(
    built: Project, monkeypatch: pytest.MonkeyPatch, version: str, said: str
) -> None:
    here = {"onnxruntime": version} if version else {}
    monkeypatch.setattr("builders.backends.onnxruntime.cpu.OnnxRuntime.versions", lambda _: here)
    store, executor = open_store(built.registry), LocalExecutor()
    manifest = load(store, "tiny", "1")
    found = list(revalidate(manifest, RunContext(store, executor, executor), ["cpu"]))
    assert [(item.verdict, item.report) for item in found] == [("proven", None)] * 2
    assert all(re.search(f"passed, on .*; not run here: {said}", item.reason) for item in found)
    assert {entry.status for entry in judged(store, manifest) if entry.target == "cpu"} == {"proven"}
