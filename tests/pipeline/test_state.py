import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import enginesmith
from enginesmith.core.errors import DataError, EnginesmithError
from enginesmith.core.hardware.machine import target_named
from enginesmith.core.names import parse_reference
from enginesmith.registry.store.base import open_store
from pipeline.canary.run import CanaryRun, run_canary
from pipeline.operations.golden import describe_golden, golden_of
from pipeline.spec.model import load_spec
from tests.ensembles import change
from tests.pipeline.projects import arrays, assert_refused
from tests.pipeline.test_ensemble import opens
from tests.scheduling import slow_after_first
from tests.stateful import CACHED, RECURRENT, write_stateful
from validation.canary.replay import ReplayPace

SPECS = {spec["model"]: spec for spec in (RECURRENT, CACHED)}


@pytest.fixture(scope="module", params=slow_after_first(SPECS))
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp(request.param) / "project"
    path = write_stateful(folder, SPECS[request.param])
    return folder, enginesmith.build(path, registry=folder.parent / "registry")


def test_a_stateful_engine_is_proven_step_by_step_and_free_running(built: tuple[Path, Any]) -> None:
    folder, outcome = built
    assert {item.entry.precision: item.entry.status for item in outcome.engines} == {"fp32": "proven", "int8": "proven"}
    place = folder.parent / "registry" / "models" / outcome.model / "versions" / outcome.version
    reports = json.loads((place / "report.json").read_text())["reports"]
    assert len(reports) == 2
    for report in reports:
        checks = report["checks"]
        stages = {check["stage"] for check in checks if check["case"] == "golden" and check["name"] == "sqnr_db"}
        assert stages >= {"export", "engine"}
        free = {check["stage"] for check in checks if check["case"] == "free running" and check["name"] == "sqnr_db"}
        assert free == stages
        assert all(check["value"] == 0 for check in checks if check["name"] == "calibration overlap")
        courses = {result["stage"]: result for result in report["free_running"] if result["output"] == "y"}
        assert courses.keys() == stages
        assert [item["case"] for item in courses["engine"]["sequences"]][-1] == "sequences side by side"
        assert all(isinstance(level, float) or level == "inf" for level in courses["export"]["single_db"])
    page = (place / "report.html").read_text()
    assert page.count('<table class="parts">') >= 3 and "worst sequence" in page
    rows = [engine.to_json() for engine in outcome.engines]
    assert all({result["stage"] for result in row["free_running"]} >= {"export", "engine"} for row in rows)


def test_a_pulled_engine_answers_sequences_like_the_model(built: tuple[Path, Any], tmp_path: Path) -> None:
    folder, outcome = built
    pulled_engine = enginesmith.pull(
        f"{outcome.model}@1", registry=folder.parent / "registry", dest=tmp_path, precision="fp32"
    )
    source = opens(folder / "model.onnx")
    streams = enginesmith.Streams.described(enginesmith.open_onnx(pulled_engine), pulled_engine.description)
    (state,) = load_spec(folder / "model.yaml").states()
    x = arrays(folder / "golden.npz")["x"]
    states = np.zeros({"h": (1, 3, 16), "past": (3, 0, 8)}[state.input], np.float32)
    for step in range(8):
        rows = np.stack([x[step], x[12 + step], x[24 + step]])
        expected = source({"x": rows, state.input: states})
        states = expected[state.output]
        np.testing.assert_allclose(streams.run({"x": rows})["y"], expected["y"], atol=1e-5)


def record_steps(folder: Path, streams: Any, steps: list[dict[str, np.ndarray]]) -> None:
    """Traffic: bare.jsonl has what a caller gives, whole.jsonl the states, too."""
    names = ("bare", "whole")
    bare_recorder, whole_recorder = (enginesmith.Recorder(folder / f"{name}.jsonl") for name in names)
    with bare_recorder, whole_recorder:
        for index, step in enumerate(steps):
            bare_recorder.append(step, at=1.0 + index / 100)
            whole_recorder.append(streams.complete(step), at=1.0 + index / 100)
            streams.run(step)


def replayed_verdict(registry: Path, model: str, traffic: Path) -> str:
    """That of version 1 in fp32 against itself; its observations lie in `out` beside the traffic."""
    reference, pace = parse_reference(f"{model}@1"), ReplayPace(in_flight=1, warmup=2)
    expected = CanaryRun(reference, reference, target_named("cpu"), traffic, traffic.parent / "out", "fp32", pace)
    return run_canary(open_store(registry), expected, lambda _: None).report.verdict


@pytest.mark.slow
def test_a_canary_compares_recorded_steps_with_their_states(built: tuple[Path, Any], tmp_path: Path) -> None:
    folder, outcome = built
    registry = folder.parent / "registry"
    pulled_engine = enginesmith.pull(f"{outcome.model}@1", registry=registry, dest=tmp_path, precision="fp32")
    streams = enginesmith.Streams.described(enginesmith.open_onnx(pulled_engine), pulled_engine.description)
    record_steps(tmp_path, streams, [{"x": row[None]} for row in arrays(folder / "golden.npz")["x"][:12]])
    (state,) = load_spec(folder / "model.yaml").states()
    message = rf"no array for input '{state.input}'.*is a state: record each step with the states"
    with pytest.raises(DataError, match=message):
        replayed_verdict(registry, outcome.model, tmp_path / "bare.jsonl")
    assert replayed_verdict(registry, outcome.model, tmp_path / "whole.jsonl") == "INSUFFICIENT", "12 steps are few"
    observed_documents = [json.loads(line) for line in (tmp_path / "out/candidate.jsonl").read_text().splitlines()]
    steps = [line for line in observed_documents if "request" in line]
    assert len(steps) == 12 and all(line["ok"] and not line["flipped"] for line in steps)


def test_show_lists_the_golden_sets_sequences(built: tuple[Path, Any]) -> None:
    folder, outcome = built
    store = open_store(str(folder.parent / "registry"))
    shown_fields = describe_golden(store, golden_of(store, f"{outcome.model}@1"))
    assert shown_fields.sequences == (12,) * 4, "three, and these side by side"


@pytest.mark.parametrize(
    ("spec", "path", "value", "message"),
    [
        (RECURRENT, "state/h/initial", None, "state.h.initial"),
        (RECURRENT, "state/g", {"output": "hn", "initial": 0}, "state 'g' is not one of the inputs ['x', 'h']"),
        (RECURRENT, "state/h/output", "gone", "takes 'gone', which is not one of the outputs ['y', 'hn']"),
        (RECURRENT, "state/x", {"output": "hn", "initial": 0}, "state 'x' takes 'hn', as state 'h' does"),
        (RECURRENT, "state/x", {"output": "y", "initial": 0}, "every input is a state"),
        (RECURRENT, "state", {}, "golden.sequence is for models with state"),
        (CACHED, "golden/steps", {"length": "call"}, "joins samples along 'length', but no input from a caller has it"),
        (CACHED, "golden/steps", {"batch": "call"}, "joins samples along 'batch', which states have too"),
        (CACHED, "golden/steps", {}, "joins samples along one dim; give {DIM: ARRAY}, found 0"),
        (CACHED, "calibration/steps", {"a": "b", "c": "d"}, "joins samples along one dim"),
        (RECURRENT, "calibration", {"data": "a.py:b", "steps": {"batch": "call"}}, "gives whole steps, of any size"),
        (RECURRENT, "calibration/parts", 2, "samples of a model with state are in order and not divided"),
        (RECURRENT, "calibration/labels", "clip", "remove labels"),
        (RECURRENT, "dims/batch/min", 0, "dims.batch.min is 0, which only sizes of states can be"),
        (RECURRENT, "golden/sequence", "gone", "no array 'gone'"),
        (RECURRENT, "state/h/initial", 1e39, "state 'h' is float32, which does not hold 1e+39"),
    ],
)
def test_mismatches_are_reported_with_their_key(spec, path, value, message, tmp_path):
    assert_refused(write_stateful(tmp_path / "project", change(spec, path, value)), message)


@pytest.mark.parametrize(
    ("node", "width", "message"),
    [
        ("wide = Cast <to = 11> (hn)", 16, "state.h is float32, and 'wide' is float64"),
        ("twice = Concat <axis = 2> (hn, hn)", 32, "'twice' is [1, batch, 32]"),
        ("same = Identity(h)", 16, "output 'same' is the input itself, so the state would never change"),
    ],
)
def test_an_output_that_does_not_fit_its_input_is_refused(node: str, width: int, message: str, tmp_path: Path) -> None:
    output = node.partition(" ")[0]
    spec = change(change(RECURRENT, "state/h/output", output), "outputs", ["y", output])
    path = write_stateful(tmp_path / "project", spec)
    model = onnx.load(path.parent / "model.onnx")
    kind = onnx.TensorProto.DOUBLE if output == "wide" else onnx.TensorProto.FLOAT
    model.graph.node.append(onnx.parser.parse_node(node))
    model.graph.output[1].CopyFrom(onnx.helper.make_tensor_value_info(output, kind, [1, "batch", width]))
    onnx.save(model, path.parent / "model.onnx")
    assert_refused(path, message, EnginesmithError)


def test_sequences_beyond_a_caches_limit_are_refused(tmp_path: Path) -> None:
    path = write_stateful(tmp_path / "project", change(CACHED, "dims/length", {"min": 0, "max": 8}))
    assert_refused(path, "'past' has reached length=9, but the model accepts at most 8", EnginesmithError)


def test_data_with_the_state_is_refused(tmp_path: Path) -> None:
    path = write_stateful(tmp_path / "project", RECURRENT)
    golden = arrays(path.parent / "golden.npz")
    np.savez(path.parent / "golden.npz", **golden, h=np.zeros((36, 1, 16), np.float32))
    assert_refused(path, "array 'h' that nothing asks for")


def test_without_data_inputs_are_random_and_states_come_from_the_model(tmp_path: Path) -> None:
    spec = {key: value for key, value in CACHED.items() if key not in ("golden", "calibration")}
    path = write_stateful(tmp_path / "project", {**spec, "precisions": ["fp32"]})
    outcome = enginesmith.build(path, registry=tmp_path / "registry")
    assert [item.entry.status for item in outcome.engines] == ["proven on random inputs"]


def test_labels_stay_with_their_steps(tmp_path: Path) -> None:
    metric = {"name": "accuracy", "output": "y", "floor": 1.0}
    labelled_change = change(change(RECURRENT, "golden/labels", "wanted"), "golden/metric", metric)
    path = write_stateful(tmp_path / "project", {**labelled_change, "precisions": ["fp32"]})
    spec, data = load_spec(path), arrays(path.parent / "golden.npz")
    streams = enginesmith.Streams(opens(path.parent / "model.onnx"), spec.tensors(), spec.states())
    expected = []
    for step in range(36):
        if step % 12 == 0:
            streams.reset()
        expected.append(streams.run({"x": data["x"][step : step + 1]})["y"].argmax())
    np.savez(path.parent / "golden.npz", **data, wanted=np.array(expected))
    assert len(set(expected)) > 1
    outcome = enginesmith.build(path, registry=tmp_path / "registry")
    assert [item.entry.status for item in outcome.engines] == ["proven"]


def test_a_spec_without_state_keeps_its_json(tmp_path: Path) -> None:
    spec = {key: value for key, value in RECURRENT.items() if key not in ("golden", "calibration", "state")}
    path = write_stateful(tmp_path / "project", {**spec, "precisions": ["fp32"]})
    assert "state" not in load_spec(path).model_dump()


@pytest.mark.parametrize(
    ("clip", "message"),
    [
        (np.arange(36) % 3, "'clip' has 0 from step 0 and again from step 3"),
        (np.arange(36), "every sequence has one step"),
        (np.zeros((36, 2), int), "array 'clip' has the shape (36, 2)"),
    ],
)
def test_sequences_that_carry_no_state_are_refused(clip: Any, message: str, tmp_path: Path) -> None:
    path = write_stateful(tmp_path / "project", RECURRENT)
    np.savez(path.parent / "golden.npz", x=arrays(path.parent / "golden.npz")["x"], clip=clip)
    assert_refused(path, message, EnginesmithError)


def test_a_float16_graph_carries_a_float16_state(tmp_path: Path) -> None:
    spec = change(RECURRENT, "inputs/h/dtype", "float16")
    path = write_stateful(tmp_path / "project", {**spec, "precisions": ["fp16"]})
    model = onnx.load(path.parent / "model.onnx")
    for value in (model.graph.input[1], model.graph.output[1]):
        value.type.tensor_type.elem_type = onnx.TensorProto.FLOAT16
    nodes = {node.output[0]: node for node in model.graph.node}
    nodes["from_h"].input[0], nodes["hn"].output[0], nodes["last"].input[0] = "wide", "tanh", "tanh"
    model.graph.node.insert(0, onnx.helper.make_node("Cast", ["h"], ["wide"], to=onnx.TensorProto.FLOAT))
    model.graph.node.append(onnx.helper.make_node("Cast", ["tanh"], ["hn"], to=onnx.TensorProto.FLOAT16))
    onnx.save(model, path.parent / "model.onnx")
    outcome = enginesmith.build(path, registry=tmp_path / "registry")
    assert [item.entry.status for item in outcome.engines] == ["proven"]
