import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from google.protobuf import json_format
from in_toto_attestation.predicates.provenance.v1 import provenance_pb2
from in_toto_attestation.v1.statement import Statement

from enginesmith.cli import enginesmith
from enginesmith.core.errors import canonical_json
from enginesmith.registry.store.base import Store
from enginesmith.registry.verification import verify
from enginesmith.registry.versions.publish import publish
from pipeline.compile.publication import pages
from pipeline.compile.publication.pages import environment_sbom  # itself, not as conftest keeps it
from tests.enginesmith.registries import approval, draft, engine

STARTED = "2026-01-01T00:00:00+00:00"


def test_the_sbom_is_valid_cyclonedx_and_the_same_each_time() -> None:
    sbom = environment_sbom()
    errors = JsonStrictValidator(SchemaVersion.V1_6).validate_str(json.dumps(sbom))
    assert errors is None, errors
    assert canonical_json(sbom) == canonical_json(environment_sbom())
    result = {item["name"]: item for item in sbom["components"]}
    assert result["numpy"]["purl"].startswith("pkg:pypi/numpy@") and result["numpy"]["licenses"]


def test_the_statement_is_in_toto_and_slsa(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(pages.IMAGE, "registry.example/builder@sha256:" + "a" * 64)
    entries = [engine(store), engine(store, "sm_89", status="unproven")]
    result = pages.provenance_statement(draft(store), entries, STARTED, "b" * 64)
    statement = Statement(subjects=[], predicate_type="", predicate={})
    json_format.ParseDict(result, statement.pb)
    statement.validate()
    predicate = json_format.ParseDict(result["predicate"], provenance_pb2.Provenance())
    assert predicate.build_definition.resolved_dependencies[0].digest["sha256"] == draft(store).sources["onnx"]
    assert {item["digest"]["sha256"] for item in result["subject"]} == {entry.digest for entry in entries}
    assert predicate.run_details.builder.builder_dependencies[0].uri.startswith("registry.example/builder")
    assert predicate.run_details.metadata.started_on.seconds > 0


def test_provenance_is_signed_with_the_manifest_and_not_part_of_the_content(store: Store, tmp_path: Path) -> None:
    entry = engine(store)

    def published(started: str) -> tuple[str, bool]:
        message = pages.with_provenance(store, draft(store), [entry], started)
        result = publish(store, message, [(entry, approval(entry))])
        assert {pages.STATEMENT, pages.SBOM} <= result.manifest.sources.keys()
        return result.version, result.existed

    assert published(STARTED) == ("1", False) and published("2026-02-02T00:00:00+00:00") == ("1", True)
    assert verify(store, None).sound
    for flag, key in (("--provenance", "predicateType"), ("--sbom", "bomFormat")):
        shown = CliRunner().invoke(enginesmith, ["show", "digits", flag, "--registry", str(tmp_path / "registry")])
        assert shown.exit_code == 0 and key in json.loads(shown.stdout)
