import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from builders.backends.onnxruntime import OrtSession
from enginesmith.core.codec import decode, encode
from enginesmith.core.errors import InputError, IntegrityError, UnknownNameError
from enginesmith.core.reports.proof import PackedArray
from enginesmith.core.requirements import Weights
from enginesmith.core.text import now
from enginesmith.registry.evidence.attestations import judge_entries
from enginesmith.registry.manifest import Manifest, request_of
from enginesmith.registry.store.base import Store, open_store
from enginesmith.registry.versions.lookup import load
from pipeline.compile.steps.blobs import runnable
from pipeline.operations.offline import bundle
from pipeline.operations.offline.bundle import import_results, write_offline_bundle
from pipeline.operations.validate import Validated
from tests.pipeline.operations.test_offline_state import run_here
from tests.pipeline.projects import Project
from validation.comparison.sessions import run
from validation.gpu.cases import load_cases
from validation.gpu.devices import KitDevice, RecordingSession, pack, unpack
from validation.gpu.kit import KitOptions, run_kit
from validation.gpu.results import OfflineTrial, Results

Change = Callable[[dict[str, Any]], None]


@pytest.fixture(scope="module")
def returned_once(built_once: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A folder that was carried, and the results of the kit on this machine's CPU."""
    place = tmp_path_factory.mktemp("carried")
    store = open_store(built_once / "registry")
    write_offline_bundle(store, load(store, "tiny", "1"), place / "out")
    result = run_kit(KitOptions("cpu", (), carry=(place / "out",), seconds=0.01, peaks=False), lambda _: None)
    (place / "results.json").write_bytes(result.to_bytes())
    return place / "out", place / "results.json"


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    run_here(monkeypatch)


@pytest.fixture
def place(built: Project) -> tuple[Store, Manifest]:
    store = built.store
    return store, load(store, "tiny", "1")


def changed(path: Path, unit: str, change: Change) -> Results:
    """The results with one carried engine alone, and something about it changed."""
    document = json.loads(path.read_bytes())
    (item,) = [item for item in document["carried"] if item["unit"] == unit]
    document["carried"] = [item]
    change(document)
    return Results.from_json(document)


def test_answers_from_another_machine_prove_engines(built: Project, returned_once: tuple[Path, Path]) -> None:
    result = built.run("validate", "--import", returned_once[1], "--json")
    assert result.code == 0, result.err
    verdicts = {item["unit"]: (item["verdict"], item["report"]) for item in result.json}
    assert verdicts["cpu fp32 onnxruntime"][0] == verdicts["cpu int8 onnxruntime"][0] == "proven"
    assert verdicts["sm_89 int8 tensorrt-rtx"] == ("unproven", None)
    store = built.store
    now_is = {entry.unit: entry.reason for entry in judge_entries(store, load(store, "tiny", "1"))}
    assert "proven by attestation" in now_is["cpu int8 onnxruntime"]
    (report,) = (built.registry / "models").rglob(f"{verdicts['cpu int8 onnxruntime'][1]}.json")
    text = json.loads(report.read_bytes())
    assert {check["stage"] for check in text["checks"]} == {"export", "quantization", "engine", "task"}
    assert "answers recorded on" in text["reason"] and text["host"]["device_name"] and text["spreads"]


def test_engines_that_cannot_be_bundled_are_reported(place: tuple[Store, Manifest], tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match="has no engine to carry for that target"):
        write_offline_bundle(*place, tmp_path / "a", {"sm_90"})
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "file").touch()
    with pytest.raises(InputError, match="is not empty"):
        write_offline_bundle(*place, tmp_path / "b")


def test_a_weightless_engine_is_not_bundled(place, tmp_path, monkeypatch):
    store, manifest = place
    entries = judge_entries(store, manifest)
    stripped_items = [replace(item, requires=(*item.requires, Weights("0" * 64))) for item in entries]
    monkeypatch.setattr(bundle, "judge_entries", lambda *_: stripped_items)
    with pytest.raises(InputError, match=r"without weights.*carry other targets"):
        write_offline_bundle(store, manifest, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("carry.json", "cannot be read as a folder of"),
        ("cases.npz", "the digest that cases.json"),
        ("engines", "the digest"),
    ],
)
def test_a_folder_changed_in_transit_is_not_run(returned_once, tmp_path, name, message):
    shutil.copytree(returned_once[0], tmp_path / "out")
    path = tmp_path / "out" / name
    path = next(path.iterdir()) if path.is_dir() else path
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(IntegrityError, match=message):
        run_kit(KitOptions("cpu", (), carry=(tmp_path / "out",), peaks=False), lambda _: None)


def carried(document: dict[str, Any]) -> dict[str, Any]:
    return document["carried"][0]


def with_field(name: str, value: Any) -> Change:
    return lambda document: carried(document).__setitem__(name, value)


def with_device(**values: Any) -> Change:
    return lambda document: document["device"].update(values)


def without_an_answer(document: dict[str, Any]) -> None:
    carried(document)["answers"].popitem()


def with_a_damaged_answer(document: dict[str, Any]) -> None:
    next(iter(carried(document)["answers"].values()))["logits"]["data"] = "AAAA"


DOCTORED: dict[str, tuple[Change, str]] = {
    "another engine": (with_field("engine", "0" * 64), "has no engine 000"),
    "another manifest": (with_field("manifest", "0" * 64), "its manifest is 000"),
    "other cases": (with_field("golden", "0" * 64), "its golden set is 000"),
    "another request": (with_field("build_key", "0" * 64), "its build key is 000"),
    "another device": (with_device(compute_capability=[9, 0]), "it ran on sm_90, but the engine is for cpu"),
    "before it was made": (with_field("created_at", "2020-01-01T00:00:00+00:00"), "before this version was"),
    "yet to come": (with_field("created_at", "2999-01-01T00:00:00+00:00"), "in the future"),
    "no time": (with_field("created_at", "2026-01-01"), "not a time with a zone"),
    "an outcome of its own": (with_field("outcome", "splendid"), "'splendid', which this version does not know"),
    "a case left out": (without_an_answer, "has no answer to these inputs"),
    "a damaged answer": (with_a_damaged_answer, "a recorded answer is damaged"),
}


@pytest.mark.parametrize("name", DOCTORED)
def test_results_for_another_bundle_are_refused_without_traces(place, returned_once, in_process, name):
    change, output = DOCTORED[name]
    (result,) = import_results(place[0], changed(returned_once[1], "cpu int8 onnxruntime", change))
    assert result.verdict == "refused" and output in result.reason
    assert [entry.status for entry in judge_entries(*place)] == [entry.status for entry in place[1].engines]


def far_off(document: dict[str, Any]) -> None:
    """Answers that are wrong, beside an outcome that says nothing of it."""
    item = carried(document)
    for answer in item["answers"].values():
        answer["logits"] = encode(pack(-unpack(decode(answer["logits"], PackedArray))))
    assert item["outcome"] == "recorded"


def test_drift_is_always_measured_here(place, returned_once, in_process):
    (result,) = import_results(place[0], changed(returned_once[1], "cpu int8 onnxruntime", far_off))
    assert (result.verdict == "failed" and "sqnr" in result.reason) or "max_rel" in result.reason
    assert {entry.unit: entry.status for entry in judge_entries(*place)}["cpu int8 onnxruntime"] == "failed"


@pytest.mark.parametrize(
    ("outcome", "why", "verdict"),
    [
        ("load failed", "cudaErrorNoKernelImageForDevice", "failed"),
        ("not finished", "still running after its limit of 1200 s", "unproven"),
    ],
)
def test_an_engine_that_broke_there_failed_and_an_unfinished_one_did_not(place, returned_once, outcome, why, verdict):
    def ended(document: dict[str, Any]) -> None:
        carried(document).update(outcome=outcome, reason=why)

    (result,) = import_results(place[0], changed(returned_once[1], "cpu int8 onnxruntime", ended))
    assert result.verdict == verdict and why in result.reason
    statuses = {entry.unit: entry.status for entry in place[1].engines}
    statuses |= {"cpu int8 onnxruntime": "failed"} if verdict == "failed" else {}
    assert {entry.unit: entry.status for entry in judge_entries(*place)} == statuses


@pytest.mark.parametrize("asked", ["contract_of", "padding_rules"])
def test_a_version_with_a_contract_or_padding_needs_its_own_runs(place, returned_once, monkeypatch, asked):
    monkeypatch.setattr(bundle, asked, lambda _: {"bitwise": {}})
    (result,) = import_results(place[0], changed(returned_once[1], "cpu int8 onnxruntime", lambda _: None))
    assert result.verdict == "refused" and "`enginesmith validate tiny@1` on a node" in result.reason


def of_a_gpu(
    place: tuple[Store, Manifest], out: Path, unit: str, folder: Path, noise: float, **device: Any
) -> Validated:
    """Results as a GPU would give them, made up from the CPU's reference: the last bits differ by `noise`."""
    store, manifest = place
    entry = next(entry for entry in manifest.engines if entry.unit == unit)
    request, (golden, digest) = request_of(entry), load_cases(out)
    folder.mkdir()
    store.fetch(request.model, folder / "graph.onnx")
    rng = np.random.default_rng(0)
    with OrtSession(runnable(folder / "graph.onnx", request.precision), optimized=False) as session:
        recorder = RecordingSession(session)
        for case in golden.cases:
            run(recorder, case.inputs)
    for answer in recorder.answers.values():
        exact = unpack(answer["logits"])
        answer["logits"] = pack((exact * (1 + noise * rng.standard_normal(exact.shape))).astype(exact.dtype))
    item = OfflineTrial(
        model="tiny", version="1", manifest=manifest.digest, golden=digest, engine=str(entry.digest),
        build_key=request.key, unit=unit, created_at=now(), outcome="recorded", answers=recorder.answers,
    )  # fmt: skip
    gpu = KitDevice("cuda", "NVIDIA L4", "NVIDIA-L4", driver="580.1", compute_capability=(8, 9))
    gpu = replace(gpu, **device)
    results = Results(now(), gpu, {"name": "box"}, {}, None, (), (), (), (item,), 1.0, "real")
    (results,) = import_results(store, Results.from_json(json.loads(results.to_bytes())))
    return results


def test_a_gpu_engine_is_proven_only_by_such_a_gpus_answers(place, returned_once, in_process, tmp_path):
    """And made-up answers that fit prove it, too: that much trust in who hands them in remains."""
    returned_value, unit = returned_once[0], "sm_89 fp32 tensorrt-rtx"
    copied_engine = of_a_gpu(place, returned_value, unit, tmp_path / "a", 0.0)
    assert copied_engine.verdict == "refused" and "bit for bit in every case" in copied_engine.reason
    remote_engine = of_a_gpu(place, returned_value, unit, tmp_path / "b", 1e-6, compute_capability=(9, 0))
    assert remote_engine.verdict == "refused" and "it ran on sm_90, but the engine is for sm_89" in remote_engine.reason
    assert of_a_gpu(place, returned_value, unit, tmp_path / "c", 1e-6).verdict == "proven"
    assert of_a_gpu(place, returned_value, unit, tmp_path / "d", 1e-2).verdict == "failed"


def test_invalid_results_give_one_message(built: Project, tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    results = Results(now(), KitDevice("cpu", "x"), {}, {}, None, (), (), (), (), 1.0, "real")
    texts = {
        results.to_bytes(): "holds no carried engines",
        b"[": "is not JSON",
        results.to_bytes().replace(b'"seconds":1.0', b'"seconds":NaN'): "is not JSON",
        results.to_bytes().replace(b'"size":"real"', b'"size":"real","size":"small"'): "is not JSON",
        b"{}": "no results of the GPU kit",
        results.to_bytes().replace(b'"format":1', b'"format":9'): "format is 9; this enginesmith reads 1: upgrade",
        results.to_bytes().replace(b'"carried":[]', b'"carried":[{}]'): "Results.carried[0]",
        results.to_bytes().replace(b'"carried":[]', b'"carried":[3]'): "Results.carried[0] is 3",
        results.to_bytes().replace(b'"skipped":[],', b""): "incomplete or invalid",
    }
    for data, output in texts.items():
        path.write_bytes(data)
        result = built.run("validate", "--import", path)
        assert result.code == (2 if "upgrade" in output else 1) and output in result.err, (data[:80], result.err)
        assert str(path) in result.err
