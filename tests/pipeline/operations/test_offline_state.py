import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import enginesmith
from builders.execution.jobs import WorkerContext
from enginesmith.core.errors import InputError
from enginesmith.registry.evidence.attestations import judge_entries
from enginesmith.registry.manifest import Manifest
from enginesmith.registry.store.base import Store, open_store
from enginesmith.registry.versions.lookup import load
from pipeline.operations.offline import bundle
from pipeline.operations.offline.bundle import import_results, write_offline_bundle
from pipeline.operations.validate import Validated
from tests.decoding import DECODER, write_decoder
from tests.scheduling import slow_after_first
from tests.stateful import RECURRENT, write_stateful
from validation.gpu.kit import KitOptions, run_kit
from validation.gpu.results import Results

SPECS: dict[str, tuple[dict[str, Any], Callable[[Path, dict[str, Any]], Path]]] = {
    "recurrent": ({**RECURRENT, "precisions": ["fp16", "int8"]}, write_stateful),
    "decoder": (DECODER, write_decoder),
}


def run_here(patch: pytest.MonkeyPatch) -> None:
    """Jobs run in this process: each of its own costs a second."""
    patch.setattr(bundle, "run_job", lambda job, workdir: job.request.run(WorkerContext(workdir, job.store)))


@pytest.fixture(autouse=True)
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    run_here(monkeypatch)


def carry(store: Store, manifest: Manifest, folder: Path) -> dict[str, Any]:
    """The results of the kit, as a document, for a version that was carried to this machine's CPU."""
    write_offline_bundle(store, manifest, folder)
    result = run_kit(KitOptions("cpu", (), carry=(folder,), seconds=0.01, peaks=False), lambda _: None)
    return json.loads(result.to_bytes())


def judge(store: Store, document: dict[str, Any]) -> list[Validated]:
    return list(import_results(store, Results.from_json(document)))


@pytest.fixture(scope="module", params=slow_after_first(SPECS))
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Store, Manifest]:
    spec, write = SPECS[request.param]
    folder = tmp_path_factory.mktemp(request.param) / "project"
    outcome = enginesmith.build(write(folder, spec), registry=folder.parent / "registry")
    store = open_store(folder.parent / "registry")
    return store, load(store, str(outcome.model), str(outcome.version))


@pytest.fixture(scope="module")
def returned(built: tuple[Store, Manifest], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        run_here(patch)
        return carry(*built, tmp_path_factory.mktemp("carried") / "out")


def test_sequences_run_there_and_are_judged_here(built: tuple[Store, Manifest], returned: dict[str, Any]) -> None:
    store, manifest = built
    assert [item["outcome"] for item in returned["carried"]] == ["recorded"] * len(manifest.engines)
    verdicts = judge(store, returned)
    assert {item.verdict for item in verdicts} == {"proven"}, verdicts
    for item in verdicts:
        report = json.loads(next(Path(store.uri.removeprefix("file://")).rglob(f"{item.report}.json")).read_bytes())
        checks = [check for check in report["checks"] if check["case"] == "free running" and check["stage"] == "engine"]
        assert checks and report["free_running"]
    assert all("proven by attestation" in entry.reason for entry in judge_entries(store, manifest))


def test_any_missing_answer_is_refused(built, returned):
    """Each fifth answer in turn: of golden cases and steps of sequences."""
    document = copy.deepcopy(returned)
    del document["carried"][1:]
    answers = document["carried"][0]["answers"]
    for request in list(answers)[::5]:
        gone_item = answers.pop(request)
        (result,) = judge(built[0], document)
        assert result.verdict == "refused" and "has no answer to these inputs" in result.reason
        answers[request] = gone_item


def test_a_contract_is_rejected_before_files_are_written(built, tmp_path, monkeypatch):
    monkeypatch.setattr(bundle, "contract_of", lambda _: {"bitwise": {}})
    with pytest.raises(InputError, match=r"promises a contract.*reaches the registry"):
        write_offline_bundle(*built, tmp_path / "out")
    assert not (tmp_path / "out").exists()
