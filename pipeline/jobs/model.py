"""Export to canonical ONNX, golden set and parity."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from builders.errors import DataError
from pipeline.jobs.blobs import fetch, proof_of
from pipeline.registry.store import Store, open_store
from pipeline.values import Json

if TYPE_CHECKING:
    from pipeline.export import ExportRequest
    from validation.samples import Samples


def export_model(
    store: str,
    request: Json,
    onnx: str | None,
    data: str | None,
    labels: str | None,
    metric: Json | None,
    limits: Mapping[str, float],
    workdir: Path,
) -> Json:
    """Export to canonical ONNX, freeze the golden set and compare the two (the export joint).

    onnx: digest of the exported model when only the golden set is new. Gives 'model' and 'golden', each a step's value;
    'inputs' of the latter are the digests of real samples (blob).
    """
    from builders.onnxruntime import OrtSession
    from pipeline.export import ExportRequest, export
    from validation.golden import GoldenSet
    from validation.overlap import golden_digests

    place = open_store(store)
    wanted = ExportRequest.from_json(request)
    samples = _golden(data, wanted, labels) if data else None
    column = samples.column(labels) if samples and labels else None
    known = fetch(place, onnx, workdir / "known.onnx") if onnx else None
    exported = export(wanted, samples, column, workdir, limits, known)
    frozen = GoldenSet.load(exported.golden)
    with OrtSession(exported.onnx, optimized=False, name="the exported model") as session:
        proof = proof_of(exported.checks, session, frozen, metric, "exported model", exported.spreads)
    groups = (case.inputs for case in frozen.of_kind("golden"))
    inputs = place.put_bytes(golden_digests(groups, samples.complete)) if samples else None
    return {
        "model": None if onnx else model_value(place, exported.onnx),
        "golden": {"golden": place.put_file(exported.golden), "inputs": inputs, "notes": list(exported.notes), **proof},
    }


def external_data(path: str, root: str) -> list[str]:
    """Names of an ONNX file's external data files, seen from its folder. root: the spec's folder."""
    from pipeline.sources.onnx_model import external_files

    return [str(item.relative_to(Path(path).parent)) for item in external_files(Path(path), Path(root))]


def _golden(data: str, wanted: "ExportRequest", labels: str | None) -> "Samples":
    """The golden inputs. Raises DataError; ModelError instead where it is the spec that names other inputs than an ONNX
    source has."""
    from pipeline.sources.canonical import check_names
    from pipeline.sources.onnx_model import load_onnx, specs_of
    from validation.samples import Samples

    try:
        return Samples.open(Path(data), wanted.inputs, wanted.dims, (labels,) if labels else ())
    except DataError:
        if wanted.kind == "onnx":
            own, _ = specs_of(load_onnx(wanted.root / wanted.file, wanted.root))
            check_names([spec.name for spec in own], [spec.name for spec in wanted.inputs])
        raise


def model_value(place: Store, path: Path) -> Json:
    """Put an exported model into the store: its digests, and what the steps after it ask of it."""
    from pipeline.quantization.schemes.qdq import carries_qdq
    from pipeline.sources.onnx_model import load_onnx, specs_of

    model = load_onnx(path, path.parent)
    inputs, outputs = specs_of(model)
    stored = place.seal_file(path)
    return {
        "onnx": stored.digest,
        "blake3": stored.blake3,
        "inputs": [vars(tensor) for tensor in inputs],
        "outputs": [vars(tensor) for tensor in outputs],
        "opset": max(item.version for item in model.opset_import if item.domain in ("", "ai.onnx")),
        "carries_qdq": carries_qdq(model),
    }
