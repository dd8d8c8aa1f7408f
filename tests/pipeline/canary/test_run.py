"""`traffic record` and `canary run` on a real engine; interrupted, it leaves observations to be judged."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import enginesmith
from enginesmith.core.hardware.machine import target_named
from enginesmith.core.names import parse_reference
from enginesmith.registry.store.base import open_store
from enginesmith.registry.versions.channels import promote
from enginesmith.registry.versions.lookup import load
from pipeline.canary.automatic import CanaryRequest, canary
from pipeline.canary.engines import choose
from pipeline.canary.run import CanaryExecution, CanaryRun, run_canary
from pipeline.canary.verdicts import WrittenReport, thresholds_of
from tests.ensembles import DECODER, ENCODER, PAIR, write_ensemble
from tests.pipeline.projects import arrays
from tests.reading import READER, write_reader
from tests.validation.canary.simulated import Engine, Ticking, traffic
from validation.canary.judging.thresholds import Thresholds
from validation.canary.observations import read_observations
from validation.canary.replay import ReplayPace


@pytest.mark.parametrize(("fault", "looks"), [("swapped", 1), ("", 4)])
def test_a_run_stops_at_the_deciding_look(built, tmp_path, fault, looks):
    """Engines of a simulated clock, through the whole of the run: a swapped output is found at the first look."""
    store = built.store
    reference, target = parse_reference("tiny@1"), target_named("cpu")
    expected = CanaryRun(reference, reference, target, tmp_path, tmp_path / "out", pace=ReplayPace(), looks=4)
    ticking_clock, output = Ticking(), []
    engines = [Engine(ticking_clock, np.random.default_rng(seed), kind) for seed, kind in enumerate((fault, ""))]
    sides = [choose(store, reference, target, None)] * 2
    limits = Thresholds({"p50": 0.005}, error_rate=None) if not fault else Thresholds()
    written_result = CanaryExecution(expected, sides, limits, "a test", traffic(1200), output.append).run(
        *engines, ticking_clock.clock()
    )
    assert len(output) == len(written_result.report.looks.requests) == looks
    assert written_result.report.verdict == ("FAIL" if fault else "INSUFFICIENT")
    assert len(read_observations(tmp_path / "out/candidate.jsonl")) == 300 * looks


def replay_recorded(registry: Path, model: str, out: Path, recorded: Path) -> WrittenReport:
    sides = parse_reference(f"{model}@2"), parse_reference(f"{model}@1")
    expected = CanaryRun(*sides, target_named("cpu"), recorded, out, "fp32", ReplayPace(in_flight=1))
    return run_canary(open_store(str(registry)), expected, lambda _: None)


def record(path: Path, golden: Path, repeated: int) -> Path:
    """The golden samples of the whole as recorded requests of one row each."""
    result = {name: array for name, array in arrays(golden).items() if name != "label"}
    count = len(next(iter(result.values())))
    with enginesmith.Recorder(path) as recorder:
        for index in range(count * repeated):
            recorder.append({name: array[index % count][None] for name, array in result.items()})
    return path


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A registry with the pair, and as version 2 one whose decoder has other weights; recorded traffic beside it."""
    folder = tmp_path_factory.mktemp("pairs")
    specs = ({**spec, "precisions": ["fp32"]} for spec in (ENCODER, DECODER))
    spec: dict[str, Any] = {**PAIR, "canary": {"quality": {"disagreement": 0.02}, "latency": {"p50": None}}}
    path = write_ensemble(folder / "project", spec, *specs)
    assert enginesmith.build(path, registry=folder / "registry").version == "1"
    record(folder / "pair.jsonl", path.parent / "golden.npz", 40)
    decoder = path.parent / "decoder.onnx"
    model = onnx.load(decoder)
    weights = next(item for item in model.graph.initializer if item.name == "w2")
    changed_weights = numpy_helper.to_array(weights)[:, ::-1]
    weights.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(changed_weights), "w2"))
    onnx.save(model, decoder)
    assert enginesmith.build(path, registry=folder / "registry").version == "2"
    return folder


@pytest.mark.slow
def test_an_ensemble_with_other_answers_fails(pairs: Path, tmp_path: Path) -> None:
    written_report = replay_recorded(pairs / "registry", "pair", tmp_path / "canary", pairs / "pair.jsonl")
    assert written_report.report.verdict == "FAIL", written_report.report.reason
    assert "answer" in written_report.report.reason and written_report.report.candidate.backend == "ensemble"


def test_thresholds_come_from_its_spec(pairs: Path) -> None:
    result, source = thresholds_of(load(open_store(str(pairs / "registry")), "pair", "2"))
    assert result.quality is not None and result.quality.disagreement == 0.02
    assert source == "the spec of pair@2"


@pytest.mark.slow
def test_a_flow_judges_a_published_ensemble_against_the_served_one(pairs: Path) -> None:
    store = open_store(str(pairs / "registry"))
    promote(store, load(store, "pair", "1"), "stable", by="test")
    outcome = canary(store, CanaryRequest("pair", "2", traffic=str(pairs)), lambda _: None)
    assert outcome.report is not None and outcome.report.verdict == "FAIL", outcome.reason


@pytest.mark.slow
def test_functions_between_graphs_are_run(tmp_path: Path) -> None:
    registry = tmp_path / "registry"
    # What is asked is whether both answer alike: how fast they are on a busy machine decides nothing.
    path = write_reader(tmp_path / "reader", {**READER, "canary": {"latency": {"p50": None, "p99": None}}})
    assert enginesmith.build(path, registry=registry, precisions=["fp32"]).version == "1"
    (path.parent / "reading.py").write_text(f"{(path.parent / 'reading.py').read_text()}\n# changed\n")
    assert enginesmith.build(path, registry=registry, precisions=["fp32"]).version == "2"
    golden = arrays(path.parent / "golden.npz")
    traffic = tmp_path / "reader.jsonl"
    with enginesmith.Recorder(traffic) as recorder:
        for index in range(4000):
            recorder.append({name: array[index % len(array)] for name, array in golden.items()})
    written_report = replay_recorded(registry, "reader", tmp_path / "canary", traffic)
    assert written_report.report.verdict == "PASS", written_report.report.reason
    (judged_counts,) = {item.requests for item in written_report.report.criteria if item.kind == "share"}
    assert 1497 <= judged_counts <= 4000, "so many without an error prove the error budget"
