"""`validation.contract` of a spec: checked on every engine, on record in its report; a broken one stops the engine."""

import json

import pytest

from builders.errors import SpecError
from pipeline.registry.store import open_store
from pipeline.registry.versions import load
from pipeline.spec.file import load_spec
from pipeline.spec.model import ModelSpec
from pipeline.steps.keys import contract_of
from tests.pipeline.projects import Project


def test_a_contract_is_checked_on_an_engine_and_a_broken_one_fails_it(project: Project) -> None:
    structured = {"logits": {"finite": True, "shape": ["batch", 10], "range": [0, None]}}
    project.change_spec(
        targets=["cpu"],
        precisions=["fp32"],
        validation={"contract": {"bitwise": {"runs": 2}, "structured": structured}},
    )
    done = project.build()
    assert done.code == 1
    row = done.json["engines"][0]
    assert row["status"] == "failed"
    assert row["reason"].startswith("engine contract range of logits")
    structured["logits"]["range"] = [-1000, None]
    project.change_spec(validation={"contract": {"bitwise": {"runs": 2}, "structured": structured}})
    assert project.build().code == 0
    store = open_store(project.registry)
    (entry,) = load(store, "tiny", "1").engines
    report = json.loads(store.read_blob(str(entry.report)))
    names = {check["name"] for check in report["checks"] if check["name"].startswith("contract ")}
    words = ("finite", "shape", "range", "bitwise", "batch size", "batch position")
    assert names == {f"contract {word}" for word in words}


def test_a_contract_survives_the_manifest_and_asks_for_nothing_where_none_is_given(project: Project) -> None:
    assert contract_of(load_spec(project.spec)) is None
    project.change_spec(validation={"contract": {"bitwise": {}, "structured": {"logits": {"range": [None, 5]}}}})
    spec = load_spec(project.spec)
    again = ModelSpec.model_validate(json.loads(json.dumps(spec.model_dump(mode="json", exclude_unset=True))))
    told = contract_of(again)
    assert told == contract_of(spec)
    assert told is not None
    assert told["bitwise"] == {"runs": 3, "position": False, "size": False}
    assert told["structured"] == {"logits": {"range": [None, 5.0]}}


@pytest.mark.parametrize(
    ("contract", "told"),
    [
        ({"bitwise": {"runs": 1}}, "validation.contract.bitwise.runs"),
        ({"structured": {"logits": {"finit": True}}}, "did you mean 'finite'"),
        ({"structured": {"logits": {}}}, "asks for nothing"),
        ({"structured": {"logits": {"range": [1, 0]}}}, "the least value comes first"),
        ({"structured": {"logit": {"finite": True}}}, "is not one of the outputs"),
    ],
)
def test_a_contract_that_means_nothing_is_refused_in_one_line(project: Project, contract: object, told: str) -> None:
    project.change_spec(validation={"contract": contract})
    with pytest.raises(SpecError, match=told):
        load_spec(project.spec)
