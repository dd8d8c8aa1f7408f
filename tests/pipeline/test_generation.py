"""A decoder with a sampler, from its spec to the answers of a pulled engine; and what is no such spec."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

import enginesmith
from enginesmith.core.errors import SpecError
from enginesmith.core.names import parse_reference
from enginesmith.core.sampling import SamplingSettings
from enginesmith.core.types import TensorSpec
from enginesmith.registry.manifest import request_of
from enginesmith.registry.store.base import open_store
from enginesmith.registry.versions.lookup import locate
from pipeline.spec.generation import SamplingSection
from pipeline.spec.model import load_spec
from tests.decoding import DECODER, SAMPLING, write_decoder

PROMPTS = [enginesmith.Prompt([3, 1, 4], SamplingSettings(1.2, 6, 0.9), 6, seed=2), enginesmith.Prompt([5], most=6)]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    registry = tmp_path_factory.mktemp("decoder") / "registry"
    sampling = {**DECODER["sampling"], "prompts": {"given": [[3, 1, 4], [5]], "most": 6}}
    spec = {**DECODER, "sampling": sampling, "precisions": ["fp32", "int8-dynamic"]}
    return registry, enginesmith.build(write_decoder(registry.parent / "project", spec), registry=registry)


def test_the_engine_is_proven_with_its_sampler(built: tuple[Path, Any]) -> None:
    registry, outcome = built
    assert [item.status for item in outcome.engines] == ["proven", "proven"]
    report = json.loads((registry / "models/decoder/versions" / outcome.version / "report.json").read_text())
    checks = report["reports"][0]["checks"]
    assert [(check["value"], check["limit"]) for check in checks if check["name"] == "same_tokens"] == [(6.0, None)]
    (sampler,) = [check for check in checks if check["name"] == "sampler"]
    assert (sampler["value"], sampler["limit"], sampler["passed"]) == (1.0, 1.0, True)
    assert {check["case"] for check in checks if check["joint"] == "engine"} >= {"golden", "free running"}


def test_the_manifest_has_the_model_and_the_sampler_apart(built: tuple[Path, Any]) -> None:
    located = locate(open_store(built[0]), parse_reference("decoder@1"))
    entry = located.manifest.engines[0]
    assert entry.sampling == SAMPLING
    assert [spec.name for spec in entry.inputs] == ["ids", "past"]
    assert request_of(entry).sampling == SAMPLING


def test_a_pulled_engine_answers_prompts(built: tuple[Path, Any], tmp_path: Path) -> None:
    pulled = enginesmith.pull("decoder@1", registry=built[0], dest=tmp_path)
    described = json.loads(pulled.description.read_text())
    assert [state["input"] for state in described["state"]] == ["past", "seen"]
    assert [item["name"] for item in described["outputs"]][2:] == ["next_token", "seen_next"]
    answers = enginesmith.Generator.opened(pulled).generate(PROMPTS)
    assert [len(answer) for answer in answers] == [6, 6]
    plain = enginesmith.pull("decoder@1", registry=built[0], dest=tmp_path / "onnx", target="sm_89", fallback="onnx")
    assert enginesmith.Generator.opened(plain).generate(PROMPTS) == answers


def test_golden_prompts_are_answered_beside_the_exported_model_and_stand_in_every_report(
    built: tuple[Path, Any],
) -> None:
    registry, outcome = built
    folder = registry / "models/decoder/versions" / outcome.version
    reports = json.loads((folder / "report.json").read_text())["reports"]
    by_precision = {report["precision"]: report for report in reports}
    (fp32,), (narrow,) = (by_precision[name]["prompts"] for name in ("fp32", "int8-dynamic"))
    assert fp32["firsts"] == [None, None]
    assert len(narrow["kl_nats"]) == 6
    # Of the exported model, not of the graph that the engine was built from, which has no such error.
    assert max(fp32["kl_nats"]) < 1e-9 < max(narrow["kl_nats"])
    (limit,) = {check["limit"] for check in by_precision["int8-dynamic"]["checks"] if check["name"] == "kl_nats"}
    assert limit == 0.02
    rows = outcome.to_json()["engines"]
    assert [row["prompts"] for row in rows] == [[fp32], [narrow]]
    page = (folder / "report.html").read_text()
    assert "<h2>Golden prompts</h2>" in page
    assert "all 2 answers are the same, 6 tokens each" in page


def prompts(**changes: Any) -> dict[str, Any]:
    return {"sampling": {**DECODER["sampling"], "prompts": {"given": [[1]], "most": 4, **changes}}}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (prompts(given=[]), "given"),
        (prompts(given=[[]]), "a prompt has no token"),
        (prompts(given=[[-1]]), "-1: must be 0 or more"),
        (prompts(given=[[1], [2] * 13]), "13 tokens and an answer of 4 pass the cache, which takes 16 in all"),
        (prompts(limits={"int9": {}}), "int9"),
        (prompts(constraint={}), "give one of json_schema, regex and lark"),
        (prompts(constraint={"regex": "a", "lark": "b"}), "give one of json_schema, regex and lark"),
        (prompts(constraint={"json_schema": {"type": "strin"}}), "Invalid type: strin"),
        (prompts(constraint={"regex": "[^\\x00-\\U0010FFFF]"}), "no token of the vocabulary can begin"),
        (prompts(limits={"int8": {"kl": 1}}), "kl"),
        (prompts(limits={"fp32": {"kl_nats": -1}}), "kl_nats: -1"),
        (
            prompts(limits={"fp32": {"top_1_agreement": 1.5}}),
            "fp32.top_1_agreement is 1.5, and there can be no",
        ),
        (prompts(limits={"fp32": {"same_tokens": 5}}), "fp32.same_tokens is 5, and there can be no more than 4"),
        (prompts(limits={"fp8": {"kl_nats": 1}}), "limits has fp8, which is not one of precisions"),
    ],
)
def test_golden_prompts_that_cannot_be_answered_are_mistakes(
    tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    with pytest.raises(SpecError, match=words):
        load_spec(write_decoder(tmp_path / "project", {**DECODER, **change}))


def test_an_engine_is_held_to_the_grammar_of_the_spec(tmp_path: Path) -> None:
    found = {}
    for name, pattern in (("kept", "[a-c]{3}"), ("cut", "[a-c]{9}")):
        spec = {**DECODER, **prompts(given=["A", "class"], constraint={"regex": pattern})}
        path, registry = write_decoder(tmp_path / name, spec, 256), tmp_path / f"registry-{name}"
        (found[name],) = enginesmith.build(path, registry=registry).engines
    assert (found["kept"].status, found["cut"].status) == ("proven", "failed")
    assert "keeps_grammar" in found["cut"].reason


def test_an_engine_whose_answers_pass_a_limit_has_failed(tmp_path: Path) -> None:
    spec = {**DECODER, **prompts(limits={"int8-dynamic": {"kl_nats": 1e-9}}), "precisions": ["fp32", "int8-dynamic"]}
    outcome = enginesmith.build(write_decoder(tmp_path / "project", spec), registry=tmp_path / "registry")
    assert [item.status for item in outcome.engines] == ["proven", "failed"]
    assert "kl_nats" in outcome.engines[1].reason


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"given": ["A class"]}, "'A class' is a text, and the vocabulary has 12 tokens"),
        ({"given": [[12]]}, "token 12 is none of a"),
        ({"constraint": {"regex": "a"}}, "a constraint is over 256 bytes, and the vocabulary has 12 tokens"),
    ],
)
def test_golden_prompts_of_another_vocabulary_are_told(changes: dict[str, Any], words: str) -> None:
    section = SamplingSection.model_validate(prompts(**changes)["sampling"])
    outputs = [TensorSpec("logits", "float32", ("batch", 12))]
    with pytest.raises(SpecError, match=words):
        section.to_sampling([TensorSpec("ids", "int64", ("batch", 1))], outputs)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"sampling": {"ids": "past", "logits": "logits"}}, "sampling.ids 'past' is no input of integers"),
        ({"sampling": {"ids": "tokens", "logits": "logits"}}, "sampling.ids 'tokens' is no input of integers"),
        ({"sampling": {"ids": "ids", "logits": "scores"}}, "'scores' is not one of the outputs"),
        ({"sampling": {"ids": "ids", "logits": "logits", "token": "present"}}, "give another sampling.token"),
        ({"sampling": {"ids": "ids", "logits": "logits", "candidates": 0}}, "candidates"),
        ({"sampling": {"ids": "ids", "logits": "logits", "token": ""}}, "token"),
    ],
)
def test_a_sampler_that_does_not_fit_is_a_mistake_of_the_spec(
    tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    with pytest.raises(SpecError, match=words):
        load_spec(write_decoder(tmp_path / "project", {**DECODER, **change}))


@pytest.mark.parametrize(("token", "taken"), [("present", "present"), ("ids", "ids"), ("chosen", "seen_next")])
def test_a_name_that_the_models_outputs_take_is_told_where_the_spec_does_not_list_them(token: str, taken: str) -> None:
    section = SamplingSection(ids="ids", logits="logits", token=token)
    own = [TensorSpec("logits", "float32", ("batch", 4)), TensorSpec("present", "float32", ("batch", 4))]
    more = [TensorSpec(taken, "float32", ("batch", 4))] if taken == "seen_next" else []
    with pytest.raises(SpecError, match=f"'{taken}' is a name of the model's own and of the sampler's"):
        section.to_sampling([TensorSpec("ids", "int64", ("batch", "places"))], [*own, *more])


def test_an_input_with_a_name_of_the_samplers_is_a_mistake(tmp_path: Path) -> None:
    spec = copy.deepcopy(DECODER)
    spec["inputs"]["top_k"] = {"dtype": "int64", "shape": ["batch"]}
    with pytest.raises(SpecError, match="input 'top_k' has the name of one that the sampler adds"):
        load_spec(write_decoder(tmp_path / "project", spec))


@pytest.mark.parametrize(
    ("logits", "words"),
    [
        (TensorSpec("scores", "float32", ("batch", 4)), "'logits' is not one of the outputs: scores"),
        (TensorSpec("logits", "int64", ("batch", 4)), "is int64"),
        (TensorSpec("logits", "float32", ("batch", "words")), "with a vocabulary of one size"),
        (TensorSpec("logits", "float32", (4,)), "it must be floats"),
        (TensorSpec("logits", "float32", ("places", 4)), "'ids' has 'batch' rows and 'logits' 'places'"),
    ],
)
def test_logits_that_nothing_can_be_drawn_from_are_told(logits: TensorSpec, words: str) -> None:
    section = SamplingSection(ids="ids", logits="logits")
    with pytest.raises(SpecError, match=words):
        section.to_sampling([TensorSpec("ids", "int64", ("batch", "places"))], [logits])
