"""The frozen specs and files of users, read by this commit: what each reader gives, as JSON."""

import json
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from enginesmith import open_onnx
from enginesmith.core.codec import encode
from enginesmith.core.types import TensorSpec
from enginesmith.recording.traffic import read_traffic
from enginesmith.registry.trust.policy import load_policy
from pipeline.capacity.measured import KIND as PRICES
from pipeline.fleet.catalog import KIND as CATALOG
from pipeline.fleet.inventory import KIND as INVENTORY
from pipeline.spec.document import Kind, load_document
from pipeline.spec.ensembles.model import KIND as ENSEMBLE
from pipeline.spec.model import KIND as MODEL
from tests.frozen.surface import FILES
from validation.canary.observations import read_observations
from validation.canary.report import read_report
from validation.gpu.devices import OfflineBundle
from validation.gpu.results import Results

SPECS = Path(__file__).with_name("specs")
VALUES = Path(__file__).with_name("values.json")
# The kind of each file of `specs/`; the others are specs of one model.
KINDS: dict[str, Kind[Any]] = {"catalog": CATALOG, "ensemble": ENSEMBLE, "inventory": INVENTORY, "prices": PRICES}


def values() -> dict[str, Any]:
    """What readers give, by file."""
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(FILES) as archive:
        archive.extractall(folder)
        loaded_fields = {**dict(_specs()), **dict(_files(Path(folder)))}
    plain_document: dict[str, Any] = json.loads(json.dumps(loaded_fields, default=str))
    return plain_document


def _specs() -> Iterator[tuple[str, object]]:
    for path in sorted(SPECS.glob("*.yaml")):
        if path.stem == "trust":
            rules = load_policy(path).rules
            yield (
                path.name,
                [(r.models, [s.name for s in r.signers], r.required, r.needed, r.min_version) for r in rules],
            )
        else:
            yield path.name, load_document(path, KINDS.get(path.stem, MODEL))[0].model_dump(mode="json")


def _files(folder: Path) -> Iterator[tuple[str, object]]:
    traffic = read_traffic(folder / "traffic.jsonl", [TensorSpec("x", "float32", ("batch", 8))])
    requests = [(request.at, request.latency, request.inputs["x"].tolist()) for request in traffic.requests]
    yield "traffic", {"model": traffic.model, "sampling": traffic.sampling, "requests": requests}
    for side in ("candidate", "baseline"):
        table = read_observations(folder / f"canary/{side}.jsonl")
        yield side, {"identity": encode(table.identity), "requests": len(table), "ended": table.ended}
    yield "canary report", encode(read_report((folder / "canary/report.json").read_bytes()))
    yield "results of a GPU", encode(Results.load(folder / "results.json"))
    bundle = OfflineBundle.load(folder / "carried")
    entries = [(entry.digest, entry.request.key) for entry in bundle.engines]
    yield "bundle", [bundle.model, bundle.version, bundle.manifest, entries]
    (engine,) = (folder / "pulled").glob("*.onnx")
    outputs = open_onnx(engine)({"x": np.zeros((2, 8), np.float32)})
    yield "pulled engine", {name: array.shape for name, array in outputs.items()}
