import json

import pytest

from enginesmith.core.codec import decode, encode
from enginesmith.core.errors import SpecError
from enginesmith.registry.versions.lookup import load
from pipeline.compile.steps.proofs import contract_of
from pipeline.spec.model import ModelSpec, load_spec
from tests.pipeline.projects import Project
from validation.contracts.terms import BRIER, ECE, FLIPS, TOP_K, Bitwise, Boxes, Contract, End, Rows, Seeds


def test_a_contract_is_checked_on_an_engine_and_a_broken_one_fails_it(project: Project) -> None:
    structured_fields = {"logits": {"finite": True, "shape": ["batch", 10], "range": [0, None]}}
    validation = {"contract": {"bitwise": {"runs": 2}, "structured": structured_fields}}
    project.change_spec(targets=["cpu"], precisions=["fp32"], validation=validation)
    result = project.build()
    assert result.code == 1
    row = result.json["engines"][0]
    assert row["status"] == "failed" and row["reason"].startswith("engine contract range of logits")
    structured_fields["logits"]["range"] = [-1000, None]
    rows = {"rows": {"logits": {"brier": None}}}
    contract = {"bitwise": {"runs": 2}, "structured": structured_fields, "distributional": rows}
    project.change_spec(validation={"contract": contract})
    assert project.build().code == 0
    store = project.store
    (entry,) = load(store, "tiny", "1").engines
    report = json.loads(store.read_blob(str(entry.report)))
    names = {check["name"] for check in report["checks"] if check["name"].startswith("contract ")}
    words = ("finite", "shape", "range", "bitwise", "batch size", "batch position", "kl", "js", "flips", "top_k", "ece")
    assert names == {f"contract {word}" for word in words}


def test_a_contract_survives_the_manifest_and_none_requires_nothing(project: Project) -> None:
    assert contract_of(load_spec(project.spec)) is None
    structured_fields = {"range": [None, 5], "eos": {"token": 2, "apart": None}, "boxes": {"iou": 0.5}}
    distributional_fields = {"rows": {"logits": {"js": None, "kl": 0.5}}, "seeds": {"outputs": ["logits"]}}
    contract = {"bitwise": {}, "structured": {"logits": structured_fields}, "distributional": distributional_fields}
    project.change_spec(validation={"contract": contract})
    spec = load_spec(project.spec)
    second_model = ModelSpec.model_validate(json.loads(json.dumps(spec.model_dump(mode="json", exclude_unset=True))))
    message = contract_of(second_model)
    assert message == contract_of(spec) and message is not None
    terms = message.terms
    assert decode(encode(terms), Contract) == terms and terms.bitwise == Bitwise(3, False, False)
    assert terms.structured["logits"].range == (None, 5.0)
    assert terms.structured["logits"].eos == End(2, None) and terms.structured["logits"].boxes == Boxes(iou=0.5)
    assert terms.distributional.rows["logits"] == Rows("logits", 0.5, None, FLIPS, TOP_K, ECE, BRIER)
    assert terms.distributional.seeds == Seeds(("logits",))


@pytest.mark.parametrize(
    ("contract", "message"),
    [
        ({"bitwise": {"runs": 1}}, "validation.contract.bitwise.runs"),
        ({"structured": {"logits": {"finit": True}}}, "did you mean 'finite'"),
        ({"structured": {"logits": {}}}, "asks for nothing"),
        ({"structured": {"logits": {"boxes": {"matchd": 1}}}}, "boxes.matchd: unknown key; did you mean 'matched'"),
        ({"distributional": {"rows": {}}}, "asks for nothing; name outputs under rows, or seeds"),
        ({"structured": {"logits": {"range": [1, 0]}}}, "the least value comes first"),
        ({"structured": {"logit": {"finite": True}}}, "logit names 'logit', which is not one of the outputs"),
        ({"structured": {"logits": {"boxes": {"classes": "c"}}}}, "logits.boxes.classes names 'c', which is not one"),
        ({"structured": {"logits": {"boxes": {"iou": 1.5}}}}, "validation.contract.structured.logits.boxes.iou"),
        ({"structured": {"logits": {"boxes": {"form": "xxyy"}}}}, "did you mean 'xyxy'"),
        ({"structured": {"logits": {"boxes": {"score": 0.1}}}}, "name their output in scores"),
        ({"structured": {"logits": {"boxes": {}, "shape": ["batch", 10]}}}, "last axis of 4"),
        ({"structured": {"logits": {"sequence": {"until": 2}}}}, "give first: COUNT or edits: SHARE"),
        ({"structured": {"logits": {"eos": {}}}}, "validation.contract.structured.logits.eos.token"),
        ({"structured": {"logits": {"dtype": "float33"}}}, "validation.contract.structured.logits.dtype"),
        ({"structured": {"logits": {"shape": [-1, 10]}}}, "name a dim where any size is right"),
        ({"distributional": {}}, "name outputs under rows, or seeds"),
        ({"distributional": {"rows": {"logit": {}}}}, "distributional.rows.logit names 'logit', which is not one"),
        ({"distributional": {"rows": {"logits": {"kl": -1}}}}, "validation.contract.distributional.rows.logits.kl"),
        ({"distributional": {"rows": {"logits": {"kll": 1}}}}, "did you mean 'kl'"),
        ({"distributional": {"seeds": {"outputs": []}}}, "validation.contract.distributional.seeds.outputs"),
        ({"distributional": {"seeds": {"outputs": ["logits"], "vary": "seed"}}}, "'seed' is not one of"),
    ],
)
def test_a_meaningless_contract_is_refused_in_one_line(project: Project, contract: object, message: str) -> None:
    project.change_spec(validation={"contract": contract})
    with pytest.raises(SpecError, match=message):
        load_spec(project.spec)
