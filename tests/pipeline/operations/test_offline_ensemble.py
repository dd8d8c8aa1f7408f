import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import enginesmith
from enginesmith.core.errors import InputError
from enginesmith.registry.evidence.attestations import judge_entries
from enginesmith.registry.manifest import Manifest
from enginesmith.registry.store.base import Store, open_store
from enginesmith.registry.versions.lookup import load
from pipeline.operations.offline import bundle
from pipeline.operations.offline.bundle import write_offline_bundle
from tests.ensembles import DECODER, ENCODER, PAIR, write_ensemble
from tests.pipeline.operations.test_offline_state import carry, judge, run_here
from validation.gpu.devices import OfflineBundle

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    run_here(monkeypatch)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> tuple[Store, Manifest]:
    folder = tmp_path_factory.mktemp("pair")
    encoder, decoder = {**ENCODER, "precisions": ["int8"]}, {**DECODER, "precisions": ["int8"]}
    enginesmith.build(write_ensemble(folder / "project", PAIR, encoder, decoder), registry=folder / "registry")
    store = open_store(folder / "registry")
    return store, load(store, "pair", "1")


@pytest.fixture(scope="module")
def returned(place: tuple[Store, Manifest], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out_path = tmp_path_factory.mktemp("carried") / "out"
    with pytest.MonkeyPatch.context() as patch:
        run_here(patch)
        document = carry(*place, out_path)
    offline_bundle = OfflineBundle.load(out_path)
    assert offline_bundle.graphs.keys() == {"encoder", "decoder"} and len(offline_bundle.ensembles) == 1
    return document


def test_graphs_and_the_ensemble_are_proven_by_returned_answers(place, returned):
    store, manifest = place
    assert [item["outcome"] for item in returned["carried"]] == ["recorded"] * 3
    verdicts = judge(store, returned)
    assert [item.reference for item in verdicts] == ["pair-decoder@1", "pair-encoder@1", "pair@1"]
    assert {item.verdict for item in verdicts} == {"proven"}, verdicts
    report = json.loads(next(Path(store.uri.removeprefix("file://")).rglob(f"{verdicts[2].report}.json")).read_bytes())
    expected = {("quantization", "golden"), ("engine", "golden"), ("engine", "end to end")}
    assert {(check["stage"], check["case"]) for check in report["checks"]} >= expected
    (entry,) = judge_entries(store, manifest)
    assert "proven by attestation" in entry.reason


def test_missing_or_foreign_answers_of_a_graph_are_refused(place, returned):
    document = copy.deepcopy(returned)
    del document["carried"][:2]
    answers = document["carried"][0]["answers"]
    for request in list(answers)[:4]:
        gone_item = answers.pop(request)
        (result,) = judge(place[0], document)
        assert result.verdict == "refused" and "has no answer to these inputs" in result.reason
        answers[request] = gone_item
    document["carried"][0]["golden"] = "0" * 64
    (result,) = judge(place[0], document)
    assert result.verdict == "refused" and "its golden set is 000" in result.reason


def test_the_ensemble_waits_for_its_graphs(place, returned, monkeypatch):
    judge_before = bundle.judge_entries

    def waiting(store: Store, manifest: Manifest) -> list[Any]:
        return [replace(entry, status="unproven", reason="not run yet") for entry in judge_before(store, manifest)]

    monkeypatch.setattr(bundle, "judge_entries", waiting)
    document = copy.deepcopy(returned)
    del document["carried"][:2]
    (result,) = judge(place[0], document)
    assert (result.verdict, result.reason, result.report) == ("unproven", "graph 'encoder': not run yet", None)


def test_functions_between_graphs_are_not_bundled(place: tuple[Store, Manifest], tmp_path: Path) -> None:
    store, manifest = place
    cutting_manifest = replace(manifest, spec={**manifest.spec, "functions": {"cut": {}}})
    with pytest.raises(InputError, match=r"functions 'cut'.*carry one of its graphs"):
        write_offline_bundle(store, cutting_manifest, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_sequences_of_several_graphs_are_not_bundled(place, tmp_path, monkeypatch):
    spec_before = bundle.spec_of

    def with_state(manifest: Manifest) -> Any:
        spec = spec_before(manifest)
        vars(spec)["states"] = lambda: manifest.model == "pair-decoder"
        return spec

    monkeypatch.setattr(bundle, "spec_of", with_state)
    with pytest.raises(InputError, match=r"graph 'decoder' has state.*carry one of its graphs"):
        write_offline_bundle(*place, tmp_path / "out")
    assert not (tmp_path / "out").exists()
