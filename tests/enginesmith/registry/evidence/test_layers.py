import json
from dataclasses import replace
from typing import Any

import pytest

from enginesmith.cli import main
from enginesmith.core.errors import IntegrityError, UnknownNameError
from enginesmith.core.types import NO_LAYERS
from enginesmith.registry.evidence.canaries import LAYER_COLUMNS, layer_row, layers_of
from enginesmith.registry.manifest import Manifest
from enginesmith.registry.store.base import Store
from enginesmith.registry.versions.publish import publish
from pipeline.compile.publication.publish import layers, list_refitted
from pipeline.outcome import judge_built
from tests.enginesmith.registries import approval, draft, engine
from tests.pipeline.compile.test_steps import an_engine

TOLD = {
    "Layers": [
        {
            "Name": "conv1 + relu1",
            "LayerType": "CaskConvolution",
            "TacticName": "sm80_xmma_fprop",
            "Inputs": [{"Name": "image", "Dimensions": [1, 3, 16, 16], "Format/Datatype": "Half NHWC8"}],
            "Outputs": [{"Name": "a", "Dimensions": [1, 32, 16, 16], "Format/Datatype": "Half NHWC8"}],
        },
        "conv2",
    ],
    "Bindings": ["image", "map"],
}


def published(store: Store, document: Any = TOLD) -> Manifest:
    trt = replace(engine(store, "l4", "fp16", "unproven", b"plan"), backend="tensorrt")
    trt = replace(trt, report=store.put_bytes(json.dumps({**json.loads(store.read_blob(str(trt.report))),
                  "backend": "tensorrt", "unit": trt.unit}).encode()))  # fmt: skip
    rtx, cpu = engine(store, "sm_89", "fp16", "unproven"), engine(store)
    rtx = replace(rtx, notes=("a warning", f"{NO_LAYERS}: TensorRT-RTX's inspector needs a GPU"))
    layers = store.put_bytes(json.dumps(document).encode())
    base = draft(store)
    base = replace(base, sources={**base.sources, f"layers {trt.unit}": layers})
    return publish(store, base, [(backend, approval(backend)) for backend in (trt, rtx, cpu)]).manifest


def test_the_layers_of_a_unit_are_named_by_it_in_the_manifest() -> None:
    engine = an_engine()
    assert engine.record is not None
    unit = judge_built(replace(engine, record=replace(engine.record, extras={"layers": "a" * 64, "other": "b" * 64})))
    assert judge_built(engine, cannot_run="two\nlines").entry.reason.startswith(r"two\nlines"), "a reason is one line"
    assert layers([unit, judge_built(engine)]) == {f"layers {engine.unit.name}": "a" * 64}
    assert list_refitted([judge_built(replace(engine, record=replace(engine.record, refitted_from="c" * 64)))]) == {
        f"refitted from {engine.unit.name}": "c" * 64
    }


def test_layers_are_rows_with_their_tactics(store: Store) -> None:
    result, message = layers_of(store, published(store), "l4 fp16")
    assert result.unit == "l4 fp16 tensorrt" and len(LAYER_COLUMNS) == 5
    assert [layer_row(layer) for layer in message["Layers"]] == [
        ("conv1 + relu1", "CaskConvolution", "sm80_xmma_fprop", "Half NHWC8 [1,3,16,16]", "Half NHWC8 [1,32,16,16]"),
        ("conv2", "", "", "", ""),
    ]


def test_odd_layers_are_shown_as_far_as_possible() -> None:
    assert layer_row({"Name": 5, "Inputs": "x", "Outputs": [7, {}], "TacticValue": "0x1"}) == ("5", "", "0x1", "", "7,")
    assert len(layer_row("a" * 500)[0]) == 60


@pytest.mark.parametrize(
    ("unit", "words"),
    [
        ("sm_89", "no layers are recorded for sm_89 fp16 tensorrt-rtx: TensorRT-RTX's inspector needs a GPU"),
        ("cpu", "no layers are recorded for cpu fp32 onnxruntime: onnxruntime tells none"),
        ("sm_90", "'sm_90' is not one of the units of digits@1"),
        ("", "'' is not one of the units"),
    ],
)
def test_without_a_record_the_reason_is_reported(store: Store, unit: str, words: str) -> None:
    with pytest.raises(UnknownNameError, match=words):
        layers_of(store, published(store), unit)


def test_a_record_without_layers_is_damage(store: Store) -> None:
    with pytest.raises(IntegrityError, match="has no list of layers"):
        layers_of(store, published(store, {"Layers": {}}), "l4")


def test_the_command_shows_layers(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    published(store)
    for words in ([], ["--json"]):
        with pytest.raises(SystemExit) as error:
            main(["show", "digits", "--layers", "l4", "--registry", store.uri, *words])
        shown_output = capsys.readouterr().out
        assert error.value.code == 0 and "sm80_xmma_fprop" in shown_output
    assert json.loads(shown_output) == TOLD
