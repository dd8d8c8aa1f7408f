from pathlib import Path
from typing import Any

import numpy as np
import pytest

import enginesmith
from enginesmith.core.errors import DataError, SpecError
from pipeline.compile.ensembles.assembly import EnsembleForecast
from pipeline.orchestration.catalog import foresee_spec, gather_specs
from pipeline.orchestration.run import RunOptions
from pipeline.progress import Progress
from tests.ensembles import DECODER, ENCODER, PAIR, change, rewrite, write_ensemble
from tests.pipeline.projects import arrays, assert_refused


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("connections/decoder.memory", "encodr.hidden", "takes 'encodr.hidden', which is of no graph; did you mean"),
        ("connections/decoder.memory", "encoder.hiden", "'encoder' has no output 'hiden'; did you mean 'hidden'"),
        ("connections/decoder.memry", "encoder.hidden", "'decoder' has no input 'memry'; did you mean 'memory'"),
        ("connections/encoder.x", "decoder.logits", "'decoder' does not come before 'encoder'"),
        ("connections/encoder.x", "encoder.hidden", "'encoder' does not come before 'encoder'"),
        ("connections/encoder.x", "mask", "mask is float32 [batch, 6, 8], and the input is float32 [batch, 6]"),
        ("connections/decoder.y", "encoder.hidden", "encoder.hidden is float32 [batch, 6, 16], and the input is"),
        ("connections/nonsense", "mask", "'nonsense' is not GRAPH.INPUT"),
        ("connections/decoder.mask", "encoder", "takes 'encoder', which is a graph; name an output of it"),
        ("connections", {"encoder.x": "image"}, "graph 'decoder' is connected to no other"),
        ("connections/decoder.mask", "", "connections.decoder.mask: takes ''; the name of an input of the ensemble is"),
        ("connections/decoder.mask", "a/b\nc", "the name of an input of the ensemble is 1 to 64 of"),
        ("outputs", ["decoder.gone"], "'decoder' has no output 'gone'"),
        ("outputs", ["decoder.logits", "decoder.logits"], "'decoder.logits' is named twice"),
        ("outputs", ["encoder.hidden"], "no output of the ensemble is computed from graph 'decoder'"),
        ("connections", {}, "graph 'encoder' is connected to no other; add its connections, name an output of it in"),
        ("limits", {"fp8": {"engine": {"sqnr_db": 20}}}, "limits.fp8: no graph has fp8"),
        ("graphs/decoder", "gone.yaml", "is not a file in"),
        ("golden", None, "golden: is missing"),
        ("golden/data", "gone.npz", "is not a file in"),
        ("model", "pair-encoder", "its model is called 'pair-encoder' too"),
    ],
)
def test_mismatches_are_reported_with_their_line(path: str, value: Any, message: str, tmp_path: Path) -> None:
    spec = write_ensemble(tmp_path / "project", change(PAIR, path, value))
    assert f"{spec}:" in assert_refused(spec, message)


def test_unfilled_connections_are_reported(tmp_path: Path) -> None:
    message = "is empty; write a line for each input of a graph that takes another's output, or write {} if no graph"
    assert_refused(write_ensemble(tmp_path / "project", {**PAIR, "connections": None}), message)


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"golden": {"data": "golden.npz", "labels": "label"}}, "golden.labels of pair-decoder do not come with"),
        ({"dims": {"batch": {"min": 9, "opt": 9, "max": 16}}}, "no size of batch suits all graphs that have it"),
        ({"state": {"memory": {"output": "logits", "initial": 0}}}, "is a state of pair-decoder"),
    ],
)
def test_an_unsuitable_graph_is_refused(part: dict[str, Any], message: str, tmp_path: Path) -> None:
    assert_refused(write_ensemble(tmp_path / "project", decoder={**DECODER, **part}), message)


def test_commands_for_one_graph_name_the_remedy(tmp_path: Path) -> None:
    path = write_ensemble(tmp_path / "project")
    with pytest.raises(SpecError, match="is the spec of an ensemble; give the spec of one of its graphs"):
        enginesmith.load_spec(path)


def test_a_catalog_builds_graphs_only_with_their_ensemble(tmp_path: Path) -> None:
    path = write_ensemble(tmp_path / "project")
    with gather_specs(str(path.parent), None) as specs:
        assert [str(spec) for spec in specs] == [str(path)]


def test_ensemble_data_without_an_input_is_refused(tmp_path: Path) -> None:
    path = write_ensemble(tmp_path / "project")
    golden = arrays(path.parent / "golden.npz")
    del golden["mask"]
    np.savez(path.parent / "golden.npz", **golden)
    assert_refused(path, "no array 'mask'", DataError)


def test_every_graph_is_checked_before_the_first_is_built(tmp_path: Path) -> None:
    path = write_ensemble(tmp_path / "project")
    (path.parent / "decoder.onnx").write_bytes(b"no model")
    assert_refused(path, "decoder.onnx is empty, truncated or not an ONNX file")


def foresee(path: Path, registry: Path, no_export: bool) -> EnsembleForecast:
    return foresee_spec(str(path), RunOptions(str(registry)), Progress(), no_export)


def test_a_plan_lists_the_graphs_and_the_ensemble(tmp_path: Path) -> None:
    path, registry = write_ensemble(tmp_path / "project", decoder={**DECODER, "precisions": ["fp32"]}), tmp_path / "reg"
    blind_forecast = foresee(path, registry, no_export=True)
    assert [unit.action for unit in blind_forecast.units] == ["unknown", "unknown"]
    assert blind_forecast.graphs["decoder"].missing == ("golden data of encoder",)
    forecast = foresee(path, registry, no_export=False)
    assert {name: result.counts["build"] for name, result in forecast.graphs.items()} == {"encoder": 2, "decoder": 1}
    assert [(unit.precision, unit.action) for unit in forecast.units] == [("fp32", "build"), ("int8", "build")]
    assert enginesmith.build(path, registry=registry).version == "1"
    for no_export in (True, False):
        after = foresee(path, registry, no_export)
        assert [unit.action for unit in after.units] == ["cached", "cached"]
    # Another limit of the whole: the engines stay, and the whole is proven again.
    looser_fields = {**PAIR, "limits": {"int8": {"quantization": {"sqnr_db": 14}}}}
    changed = foresee(rewrite(path.parent, looser_fields), registry, no_export=True)
    assert [unit.action for unit in changed.units] == ["cached", "build"]
    assert changed.units[1].reason == "its engines exist; the ensemble is proven, because its proof is not recorded"
    assert [result.counts["cached"] for result in changed.graphs.values()] == [2, 1]


def test_a_plan_lists_what_the_ensemble_lacks(tmp_path: Path) -> None:
    path = write_ensemble(tmp_path / "project", encoder={**ENCODER, "targets": ["cpu", "avx2"]})
    result = foresee(path, tmp_path / "reg", no_export=True)
    assert {unit.reason for unit in result.units if unit.target == "x86-64-v3" and unit.action == "refused"} == {
        f"graph 'decoder' has no engine: its spec has no x86-64-v3 {precision}" for precision in ("fp32", "int8")
    }


def test_samples_may_fill_their_own_axis_if_inputs_keep_their_graphs_names(tmp_path: Path) -> None:
    path = write_ensemble(tmp_path / "project")
    for name in ("golden", "calibration"):
        data = path.parent / f"{name}.npz"
        np.savez(data, **{item: array[:, None] for item, array in arrays(data).items()})
    result = foresee(path, tmp_path / "reg", no_export=False)
    assert [result.graphs[name].counts["build"] for name in ("encoder", "decoder")] == [2, 2]
