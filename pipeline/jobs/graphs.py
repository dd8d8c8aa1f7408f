"""Writing a model in one flavour, and comparing it with the original."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from builders.types import CALIBRATED, QUANTIZED, Precision, QuantizationScheme
from pipeline.jobs.blobs import fetch, golden_set, proof_of, runnable, text_of
from pipeline.jobs.limits import graph_limits
from pipeline.jobs.ranges import chosen_ranges
from pipeline.registry.store import Store, open_store
from pipeline.values import Json

RECIPE_FORMAT = 1

if TYPE_CHECKING:
    from onnx import ModelProto

    from pipeline.quantization.calibration.ranges import Ranges
    from pipeline.quantization.notes import CastNotes, QuantizationNotes
    from pipeline.quantization.record.record import Evidence


def quantize(
    store: str,
    onnx: str,
    flavour: Json,
    observations: str | None,
    calibration: Json | None,
    overrides: list[Json],
    choice: Json | None,
    workdir: Path,
) -> Json:
    """Write the model in one flavour: digests of graph, scales file and quantization record, and notes for people.

    Its recipe is kept too, with all that writing the graph again with other overrides takes (`jobs.attribution`).

    choice: what `choose` gave; then its model, in float, and its ranges are written instead.
    """
    import onnx as onnx_package

    from pipeline.quantization.calibration.ranges import Ranges
    from pipeline.quantization.schemes.overrides import Override
    from pipeline.quantization.schemes.write import write
    from pipeline.sources.onnx_model import save_onnx, specs_of

    place = open_store(store)
    model = onnx_package.load(fetch(place, choice["model"] if choice else onnx, workdir / "model.onnx"))
    measured = chosen_ranges(place, flavour, observations, calibration)
    if choice:
        measured = Ranges.from_json(json.loads(place.read_blob(choice["ranges"])))
    scheme = QuantizationScheme(**flavour["scheme"]) if flavour["scheme"] else None
    rules = [Override.from_json(item) for item in overrides]
    left = choice["left"] if choice else {}
    keep_io = not flavour["native_io"]
    written, notes = write(model, flavour["precision"], scheme, measured, rules, keep_io=keep_io, left=left)
    inputs, outputs = specs_of(written)
    save_onnx(written, workdir / "graph.onnx")
    recipe = {
        "format": RECIPE_FORMAT,
        "onnx": choice["model"] if choice else onnx,
        "flavour": flavour,
        "ranges": measured.to_json() if measured else None,
        "overrides": overrides,
        "left": left,
        "searched": choice is not None,
    }
    told = None
    if measured and observations and flavour["precision"] in CALIBRATED:
        told = _record(written, notes, _evidence(place, model, measured, observations, choice, scheme))
    return {
        "model": place.put_file(workdir / "graph.onnx"),
        "inputs": [vars(tensor) for tensor in inputs],
        "outputs": [vars(tensor) for tensor in outputs],
        "notes": [*([choice["summary"]] if choice else []), *notes.lines()],
        "scales": measured.digest if measured and flavour["precision"] in CALIBRATED else None,
        "ranges": place.put_bytes(text_of(measured.to_json())) if measured else None,
        "record": place.put_bytes(text_of(told)) if told else None,
        "recipe": place.put_bytes(text_of(recipe)),
        "written_from": recipe["onnx"],
    }


def _record(written: "ModelProto", notes: "QuantizationNotes | CastNotes", evidence: "Evidence") -> Json | None:
    from pipeline.quantization.notes import QuantizationNotes
    from pipeline.quantization.record.record import record

    return record(written, notes, evidence) if isinstance(notes, QuantizationNotes) else None


def _evidence(
    place: Store,
    model: "ModelProto",
    ranges: "Ranges",
    observations: str,
    choice: Json | None,
    scheme: QuantizationScheme | None,
) -> "Evidence":
    from pipeline.quantization.calibration.observations import Observations
    from pipeline.quantization.record.record import Evidence

    seen = Observations.from_bytes(place.read_blob(observations))
    levels = scheme.weight_levels if scheme else 127
    if choice is None:
        return Evidence(model, ranges, seen, weight_levels=levels)
    found = json.loads(place.read_blob(choice["choice"]))
    smoothed = Observations.from_bytes(place.read_blob(choice["smoothed"])).tensors
    return Evidence(model, ranges, seen, smoothed, found, levels)


def check_graph(
    store: str,
    reference: str,
    graph: str,
    golden: str,
    samples: Json | None,
    precision: Precision,
    limits: Mapping[str, float],
    metric: Json | None,
    workdir: Path,
) -> Json:
    """Compare a quantized or cast graph with the fp32 graph, both without optimization (the quantization joint).

    samples: of a calibrated graph, the digests of golden and calibration samples, as blobs, which are compared too.
    """
    from builders.onnxruntime import OrtSession
    from validation.compare import drift_checks
    from validation.decisions import decision_checks
    from validation.overlap import overlap_check
    from validation.tally import Spreads

    place, spreads = open_store(store), Spreads()
    read = {name: place.read_blob(digest) for name, digest in samples.items()} if samples else {}
    overlap = [overlap_check(**read)] if read else []
    frozen = golden_set(place, golden, workdir)
    candidate = runnable(fetch(place, graph, workdir / "graph.onnx"), precision)
    original = fetch(place, reference, workdir / "reference.onnx")
    with (
        OrtSession(original, optimized=False) as expected,
        OrtSession(candidate, optimized=False) as actual,
    ):
        held = graph_limits(original, expected, precision, frozen, limits, metric, workdir)
        checks = drift_checks("quantization", expected, actual, frozen, held, spreads)
        decided = decision_checks(checks, frozen, metric, limits) if precision in QUANTIZED else []
        return proof_of([*overlap, *checks, *decided], actual, frozen, metric, "graph", spreads.at("quantization"))
