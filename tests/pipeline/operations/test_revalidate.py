"""Proving published engines again: under the same limits, and with every trouble as data or as one message."""

import json

from pipeline.compile.publication.draft import resolved_spec
from pipeline.spec.model import ModelSpec, load_spec, overrides
from tests.pipeline.projects import Project


def test_a_limit_that_the_spec_left_alone_still_holds_when_the_manifest_is_read_back(project: Project) -> None:
    project.change_spec(validation={"limits": {"int8": {"engine": {"sqnr_db": 12.0, "cosine": None}}}})
    spec = load_spec(project.spec)
    again = ModelSpec.model_validate(json.loads(json.dumps(resolved_spec(spec))))
    assert overrides(again, "int8", "engine") == {"sqnr_db": 12.0, "cosine": None}
    assert overrides(again, "int8", "quantization") == {}
