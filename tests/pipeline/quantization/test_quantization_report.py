import json
from dataclasses import replace

import pytest

from enginesmith.core.errors import IntegrityError
from enginesmith.registry.evidence.canaries import quantization_records
from tests.pipeline.projects import CPU_INT8, Project

GPU = "int8 (int8 activations, fp16 elsewhere)"


def test_each_int8_graph_has_a_record_that_is_published_with_it(built: Project) -> None:
    store, manifest = built.published()
    records = quantization_records(store, manifest)
    assert {CPU_INT8, GPU} <= records.keys()
    assert all(manifest.sources[f"quantization {name}"] in manifest.blobs() for name in records)
    for record in records.values():
        assert record.quantized == 2 and record.macs_share == 1.0 and record.samples == 64
        assert {"x", "w1", "w2"} < {tensor.name for tensor in record.tensors}
    assert built.run("registry", "fsck").code == 0


def test_the_page_shows_the_record(built: Project) -> None:
    text = built.page()
    assert "<h2>Quantization</h2>" in text and '<svg class="picture histogram"' in text
    assert CPU_INT8 in text and GPU in text


def test_the_command_shows_the_record(built: Project) -> None:
    result = built.run("show", "tiny", "--quantization")
    assert result.code == 0, result.err
    assert "100.0 % of the multiplications with weights in int8" in result.out
    assert "activation, uint8" in result.out and "weight, int8" in result.out
    message = built.run("show", "tiny", "--quantization", "--json").json
    assert message[CPU_INT8]["tensors"][0]["sqnr_db"] <= message[CPU_INT8]["tensors"][-1]["sqnr_db"]


def test_without_calibration_there_is_nothing_to_show(project: Project) -> None:
    project.change_spec(targets=["cpu"], precisions=["fp32"], calibration=None)
    assert project.build().code == 0
    assert "<h2>Quantization</h2>" not in project.page()
    result = project.run("show", "tiny", "--quantization")
    assert result.out.strip() == "tiny@1 has no graph that was quantized by calibration"
    assert project.run("show", "tiny", "--quantization", "--json").json == {}


def test_a_record_of_another_format_is_refused_with_a_message(built: Project) -> None:
    store, manifest = built.published()
    odd_digest = store.put_bytes(json.dumps({"format": 99}).encode())
    with pytest.raises(IntegrityError, match="format is 99; this enginesmith reads 1"):
        quantization_records(store, replace(manifest, sources={"quantization int8": odd_digest}))
