from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import enginesmith
from enginesmith.core.errors import DataError, SpecError
from enginesmith.registry.store.base import open_store
from enginesmith.registry.versions.lookup import load
from pipeline.cli.run_options import local_context
from pipeline.operations.validate import validate
from tests.ensembles import DECODER, ENCODER, PAIR, write_ensemble
from tests.pipeline.projects import arrays, assert_refused
from tests.pipeline.test_ensemble import change, opens

GOLDEN = {
    "data": "golden.npz",
    "labels": "label",
    "metric": {"name": "accuracy", "output": "decoder.logits", "floor": 0.9},
}


def write_labelled(folder: Path, source: str = "encoder.hidden") -> Path:
    """The fp32 pair with an output `encoder.other`, and labels from `encoder.hidden`. source: the decoder's input."""
    pair = {**change(PAIR, "connections/decoder.memory", source), "golden": GOLDEN, "outputs": ["decoder.logits"]}
    encoder = {**ENCODER, "outputs": ["hidden", "other"], "precisions": ["fp32"]}
    path = write_ensemble(folder, pair, encoder, {**DECODER, "precisions": ["fp32"]})
    model = onnx.load(folder / "encoder.onnx")
    model.graph.node.append(onnx.helper.make_node("Neg", ["hidden"], ["other"]))
    shape = [item.dim_param or item.dim_value for item in model.graph.output[0].type.tensor_type.shape.dim]
    model.graph.output.append(onnx.helper.make_tensor_value_info("other", onnx.TensorProto.FLOAT, shape))
    onnx.save(model, folder / "encoder.onnx")
    golden = arrays(folder / "golden.npz")
    encode, decode = (opens(folder / f"{name}.onnx") for name in ("encoder", "decoder"))
    hidden_values = encode({"x": golden["encoder.x"], "attention": golden["mask"]})["hidden"]
    logits = decode({"y": golden["decoder.y"], "memory": hidden_values, "mask": golden["mask"]})["logits"]
    np.savez(folder / "golden.npz", **golden, label=logits.argmax(-1))
    return path


@pytest.mark.slow
def test_an_ensembles_metric_is_measured_stored_and_measured_again_elsewhere(tmp_path: Path) -> None:
    registry = tmp_path / "registry"
    path = write_labelled(tmp_path / "pair")
    (engine,) = enginesmith.build(path, registry=registry).engines
    assert (engine.entry.status, engine.metrics) == ("proven", {"accuracy": 1.0}), engine.entry.reason
    store = open_store(str(registry))
    manifest = load(store, "pair", "1")
    assert manifest.metrics == {"cpu fp32 ensemble": {"accuracy": 1.0}}
    with local_context(store, store.uri) as context:
        (judgement,) = validate(manifest, context)
    assert (judgement.verdict, engine.entry.checks["passed"]) == ("proven", int(judgement.reason.split()[0]))
    assert enginesmith.build(path, registry=registry).cached


def test_a_connection_to_a_wrong_output_of_the_same_shape_fails(tmp_path: Path) -> None:
    outcome = enginesmith.build(write_labelled(tmp_path / "pair", "encoder.other"), registry=tmp_path / "registry")
    (engine,) = outcome.engines
    assert (outcome.version, engine.entry.status) == (None, "failed")
    assert "accuracy of decoder.logits" in engine.entry.reason and "limit 0.9" in engine.entry.reason


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("golden/labels", None, "golden: metric accuracy needs labels; name the array that holds them"),
        ("golden/metric/output", "logits", "golden.metric.output: 'logits' is not GRAPH.OUTPUT"),
        ("golden/metric/output", "decoder.logit", "'decoder.logit' is not an output of the ensemble; did you mean"),
        ("outputs", None, None),
        ("golden/metric/output", "encoder.hidden", "'encoder.hidden' is not an output of the ensemble"),
        ("golden/metric/name", "acuracy", "metric 'acuracy' is not known; did you mean 'accuracy'"),
        ("golden/labels", "lable", "no array 'lable'"),
    ],
)
def test_unmeasurable_outputs_are_reported(path: str, value: Any, message: str | None, tmp_path: Path) -> None:
    """Where `message` is None, the whole's outputs are those that no connection takes, and one of these is."""
    spec = {**PAIR, "golden": GOLDEN, "outputs": ["decoder.logits"]}
    if message is None:
        spec = change(spec, "golden/metric/output", "encoder.hidden")
        message = "'encoder.hidden' goes to a connection, and is not an output of the ensemble; name it in outputs too"
    place = write_ensemble(tmp_path / "pair", change(spec, path, value))
    golden = arrays(place.parent / "golden.npz")
    np.savez(place.parent / "golden.npz", **golden, label=np.zeros(12, np.int64))
    assert_refused(place, message, DataError if value == "lable" else SpecError)
