import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from enginesmith.core.errors import canonical_json
from enginesmith.core.reports.proof import ON_RANDOM, Check
from enginesmith.registry.store.base import Store
from pipeline.compile.publication.publish import resolved_spec
from pipeline.operations import validate as validating
from pipeline.operations.validate import Validated, published_proof
from pipeline.spec.model import ModelSpec, load_spec
from tests.enginesmith.registries import engine, report
from tests.pipeline.projects import Project


def test_a_default_limit_still_holds_after_reading_the_manifest(project: Project) -> None:
    project.change_spec(validation={"limits": {"int8": {"engine": {"sqnr_db": 12.0, "cosine": None}}}})
    second_model = ModelSpec.model_validate(json.loads(json.dumps(resolved_spec(load_spec(project.spec)))))
    assert second_model.validation.limits_for("int8", "engine") == {"sqnr_db": 12.0, "cosine": None}
    assert second_model.validation.limits_for("int8", "quantization") == {}


def test_a_repeated_proof_has_the_builds_number_of_checks(store: Store) -> None:
    """All that is not the engine's own is taken from the published report: also what tasks say of model and graph."""
    places = [("export", "golden"), ("quantization", "edge"), ("engine", "golden"), ("task", "golden, exported model"),
              ("task", "edges, graph"), ("task", "golden, engine"), ("task", "edges, engine")]  # fmt: skip
    checks = tuple(Check(stage, "accuracy", "logits", case, 1.0, None, True) for stage, case in places)
    entry = engine(store)
    stored_digest = store.put_bytes(canonical_json(replace(report(entry), checks=checks).to_json()))
    build_checks = published_proof(replace(entry, report=stored_digest), store).checks
    assert [(check.stage, check.case) for check in build_checks] == [places[0], places[1], places[3], places[4]]


@pytest.mark.parametrize(("verdict", "runs"), [("proven", True), (ON_RANDOM, True), ("failed", False)])
def test_an_ensemble_runs_if_its_graphs_engines_passed(monkeypatch, verdict, runs):
    part: Any = SimpleNamespace(unit="cpu fp32 onnxruntime", target="cpu", digest="a" * 64)
    proofs: list[str] = []
    monkeypatch.setattr(validating, "ensemble_not_here", lambda *_: None)
    monkeypatch.setattr(validating, "pinned_engines", lambda *_: [(SimpleNamespace(name="encoder"), None, part)])
    monkeypatch.setattr(validating, "validate", lambda *_, **__: [Validated("e@1", part.unit, verdict, "")])
    monkeypatch.setattr(validating.PublishedEnsemble, "check", lambda *_: None)
    monkeypatch.setattr(validating.PublishedEnsemble, "judge", lambda *_: None)
    monkeypatch.setattr(validating, "prove", lambda _, unit, *__, **___: proofs.append(unit))
    monkeypatch.setattr(validating, "attach", lambda *_: Validated("pair@1", "", "proven", ""))
    stub: Any = SimpleNamespace(reference="pair@1")
    entry: Any = SimpleNamespace(unit="cpu fp32 ensemble", status="unproven", reason="", checks={}, sqnr_db=None)
    result = validating.PublishedEnsemble(stub, stub).validate(entry, SimpleNamespace(store=None), again=True)
    assert (result.verdict, proofs) == (("proven", [entry.unit]) if runs else ("failed", []))
