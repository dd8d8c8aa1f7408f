import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import enginesmith
from builders.execution.jobs import WorkerContext
from enginesmith.core.errors import DataError, EnginesmithError
from enginesmith.registry.store.base import open_store
from pipeline.orchestration.catalog import foresee_spec
from pipeline.orchestration.run import RunOptions
from pipeline.outcome import Outcome
from pipeline.progress import Progress
from tests.pipeline.projects import arrays, assert_refused
from tests.pipeline.test_ensemble import change, opens
from tests.pipeline.test_ensemble_stages import ask_proof, with_fault
from tests.pipeline.test_state import record_steps, replayed_verdict
from tests.stateful_ensembles import DECODER, STEPS, TOLD, write_stateful_ensemble


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome]:
    folder = tmp_path_factory.mktemp("told")
    return folder, enginesmith.build(write_stateful_ensemble(folder / "project"), registry=folder / "registry")


def test_the_ensemble_is_proven_step_by_step_and_free_running(built: tuple[Path, Outcome]) -> None:
    folder, outcome = built
    expected = {"fp32": "proven", "int8": "proven"}
    assert {engine.entry.precision: engine.entry.status for engine in outcome.engines} == expected
    place = folder / "registry" / "models" / "told" / "versions" / "1"
    reports = {report["precision"]: report for report in json.loads((place / "report.json").read_text())["reports"]}
    stages = {"fp32": {"engine"}, "int8": {"quantization", "engine"}}
    for precision, report in reports.items():
        checks = [check for check in report["checks"] if check["name"] == "sqnr_db" and check["limit"] is not None]
        for case in ("golden", "free running"):
            result = {check["stage"] for check in checks if (check["case"], check["output"]) == (case, "decoder.y")}
            assert result == stages[precision]
        courses = {result["stage"]: result for result in report["free_running"] if result["output"] == "decoder.y"}
        assert courses.keys() == stages[precision]
        cases = [item["case"] for item in courses["engine"]["sequences"]]
        assert cases == [*(f"sequence {index}" for index in range(4)), "sequences side by side"]
        single_db = courses["engine"]["single_db"]  # by token; the first step has three of them
        assert all(isinstance(level, float) or level == "inf" for level in (single_db[0], *single_db[3:]))
    assert {result.stage for engine in outcome.engines for result in engine.free_running} == stages["int8"]
    assert "free running" in (place / "report.html").read_text()


def test_each_graph_is_proven_on_its_inputs_in_use(built: tuple[Path, Outcome]) -> None:
    """The encoder has a sample for each text, the decoder its tokens in the steps of the whole."""
    place = built[0] / "registry" / "models"
    golden = {
        name: json.loads((place / f"told-{name}" / "versions" / "1" / "manifest.json").read_text())["spec"]["golden"]
        for name in ("encoder", "decoder")
    }
    assert "sequence" not in golden["encoder"]
    assert (golden["decoder"]["sequence"], golden["decoder"]["steps"]) == ("sequence number", {"tokens": "step number"})


def test_streams_of_a_pulled_ensemble_answer_like_the_models(built: tuple[Path, Outcome], tmp_path: Path) -> None:
    folder, _ = built
    pulled_engine = enginesmith.pull("told:candidate", registry=folder / "registry", dest=tmp_path, precision="fp32")
    runs = list[str]()

    def counted(path: Path) -> Any:
        run = opens(path)
        return lambda inputs: runs.append(path.parent.name) or run(inputs)

    streams = enginesmith.Ensemble.described(counted, pulled_engine.description).streams()
    encoder, decoder = (opens(folder / "project" / f"{name}.onnx") for name in ("encoder", "decoder"))
    golden = arrays(folder / "project" / "golden.npz")
    source = golden["encoder.source"][:: len(STEPS)][:3]
    tokens = golden["decoder.x"].reshape(4, len(STEPS), 8)[:3]
    memory, past_array = encoder({"source": source})["hidden"], np.zeros((3, 0, 8), np.float32)
    streams.hold({"encoder.source": source})
    for begin, end in ((0, 3), (3, 4), (4, 5), (5, 6)):
        x = tokens[:, begin:end]
        expected = decoder({"x": x, "memory": memory, "past": past_array})
        past_array = expected["present"]
        np.testing.assert_allclose(streams.run({"decoder.x": x})["decoder.y"], expected["y"], atol=1e-5)
    assert runs == ["encoder", *["decoder"] * 4]
    streams.keep([2, 0])
    expected = decoder({"x": x[[2, 0]], "memory": memory[[2, 0]], "past": past_array[[2, 0]]})
    np.testing.assert_allclose(streams.run({"decoder.x": x[[2, 0]]})["decoder.y"], expected["y"], atol=1e-5)
    streams.run({"decoder.x": x[[2, 0]]})
    with pytest.raises(DataError, match=r"state 'decoder\.past' has reached decoder\.length=9, but the model accepts"):
        for _ in range(3):
            streams.run({"decoder.x": x[[2, 0]]})


def test_a_second_run_and_a_plan_find_all_records(built: tuple[Path, Outcome]) -> None:
    folder, _ = built
    path, registry = folder / "project" / "told.yaml", folder / "registry"
    assert enginesmith.build(path, registry=registry).cached
    result = foresee_spec(str(path), RunOptions(str(registry)), Progress(), no_export=True)
    assert [unit.action for unit in result.units] == ["cached", "cached"]


def test_a_carried_error_fails_although_single_steps_pass(built: tuple[Path, Outcome], tmp_path: Path) -> None:
    """The decoder's engine gives a cache that is two percent off: its other output shows that in later steps."""
    store = open_store(str(built[0] / "registry"))
    request = with_fault(ask_proof(store, tmp_path, "told", "fp32"), store, tmp_path, "decoder", "present", 1.02)
    proof = request.run(WorkerContext(tmp_path / "work", store.uri))
    result = {check.case: check for check in proof.checks if (check.output, check.name) == ("decoder.y", "sqnr_db")}
    assert result["golden"].passed and not result["free running"].passed and (result["free running"].value or 99) < 60


@pytest.mark.slow
def test_a_canary_compares_recorded_steps_with_the_states_of_all_graphs(built, tmp_path):
    registry, golden = built[0] / "registry", arrays(built[0] / "project" / "golden.npz")
    pulled_engine = enginesmith.pull("told@1", registry=registry, dest=tmp_path, precision="fp32")
    streams = enginesmith.Ensemble.described(opens, pulled_engine.description).streams()
    names = ("encoder.source", "decoder.x")
    record_steps(tmp_path, streams, [{name: golden[name][index][None] for name in names} for index in range(6)])
    with pytest.raises(DataError, match=r"'decoder\.past' is a state: record each step with the states"):
        replayed_verdict(registry, "told", tmp_path / "bare.jsonl")
    assert replayed_verdict(registry, "told", tmp_path / "whole.jsonl") == "INSUFFICIENT", "6 steps are few"


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("golden/sequence", "gone", "no array 'gone'"),
        ("golden/sequence", "decoder.x", "array 'decoder.x' is an input of the ensemble"),
        ("golden/steps", {"tokens": "step"}, "and 'tokens' is none; known: decoder.tokens"),
        ("golden/steps", {"decoder.length": "step"}, "and 'decoder.length' is none"),
        ("connections/decoder.past", "begun", "'past' is a state of told-decoder, which takes its own 'present'"),
        (
            "functions",
            {"f": {"function": "reader.py:crop", "inputs": {"a": {"shape": [1]}}, "outputs": {"b": {"shape": ["n"]}}}},
            "'decoder' has state, and functions are not run along sequences",
        ),
    ],
)
def test_keys_that_contradict_state_are_reported(path: str, value: Any, message: str, tmp_path: Path) -> None:
    spec = change(TOLD, path, value)
    if path == "functions":
        spec = change(spec, "connections/f.a", "begun")
    place = write_stateful_ensemble(tmp_path / "project", spec)
    (place.parent / "reader.py").write_text("def crop(a):\n    return {'b': a}\n")
    assert_refused(place, message, EnginesmithError)


def test_sequences_without_a_state_are_refused(tmp_path: Path) -> None:
    stateless_values = {key: value for key, value in DECODER.items() if key != "state"}
    stateless_values["dims"] = {**DECODER["dims"], "length": {"min": 1, "opt": 4, "max": 8}}
    path = write_stateful_ensemble(tmp_path / "none", decoder=stateless_values)
    assert_refused(path, "golden.sequence is for ensembles with state, and no graph has one")
