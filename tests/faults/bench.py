"""One model on its way through the jobs of the pipeline, in this process, with a fault planted on the way."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto

from builders import backends
from builders.targets import CPU
from builders.types import BuildRequest, Dim, Precision, ShapeProfile, TensorSpec
from pipeline.export import ExportRequest
from pipeline.jobs.attribution import attribute_engine, attribute_graph
from pipeline.jobs.engines import build_engine, check_engine
from pipeline.jobs.fuzz import fuzz_engine
from pipeline.jobs.graphs import check_graph
from pipeline.jobs.model import export_model
from pipeline.registry.store import open_store
from tests.faults.nets import BATCH, ROWS
from validation.attribution.result import Attribution
from validation.report import Check
from validation.task import TaskMetric

METRIC = TaskMetric("logits", 0.95)
Limits = Mapping[str, float | None]


class Bench:
    """A model that was exported, with its golden set. samples: by input, along axis 0.  checks: of the export joint."""

    def __init__(
        self,
        folder: Path,
        model: ModelProto,
        samples: Mapping[str, np.ndarray],
        inputs: Sequence[TensorSpec] = ROWS,
        dims: Sequence[Dim] = (BATCH,),
        labels: np.ndarray | None = None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.inputs, self.dims, self.rooms = folder, tuple(inputs), tuple(dims), 0
        self.store = open_store(folder / "registry", create=True)
        onnx.save(model, folder / "model.onnx")
        self.metric = None if labels is None else METRIC
        named = {} if labels is None else {"label": labels}
        np.savez(folder / "golden.npz", **samples, **named)
        request = ExportRequest("onnx", folder, "model.onnx", self.inputs, self.dims).to_json()
        label = None if labels is None else "label"
        data = str(folder / "golden.npz")
        told = export_model(self.store.uri, request, None, data, label, self.metric, {}, self.room())
        self.onnx, self.golden = str(told["model"]["onnx"]), str(told["golden"]["golden"])
        self.outputs = tuple(TensorSpec(**{**item, "shape": tuple(item["shape"])}) for item in told["model"]["outputs"])
        self.checks = _checks(told["golden"])

    def room(self) -> Path:
        """A folder of its own, as each job has one."""
        self.rooms += 1
        room = self.folder / f"job {self.rooms}"
        room.mkdir()
        return room

    def canonical(self) -> ModelProto:
        """The exported model."""
        return onnx.load_from_string(self.store.read_blob(self.onnx))

    def put(self, model: ModelProto) -> str:
        """A model as a blob."""
        return self.store.put_bytes(model.SerializeToString())

    def graph_checks(self, graph: ModelProto, precision: Precision) -> list[Check]:
        """The quantization joint: a graph against the exported model."""
        arguments = (self.store.uri, self.onnx, self.put(graph), self.golden, None, precision, {}, None, self.room())
        return _checks(check_graph(*arguments))

    def graph_attribution(self, graph: ModelProto, precision: Precision) -> Attribution:
        """Which node of the graph drifted."""
        digest = self.put(graph)
        arguments = (self.store.uri, self.onnx, digest, None, self.golden, precision, {}, None, self.room())
        return self._attribution(attribute_graph(*arguments))

    def _attribution(self, told: Mapping[str, Any]) -> Attribution:
        return Attribution.from_json(json.loads(self.store.read_blob(told["attribution"])))

    def engine(
        self, built_from: ModelProto | None = None, graph: ModelProto | None = None, precision: Precision = "fp32"
    ) -> "BuiltEngine":
        """An engine for `graph` (default: the exported model) that was compiled from another model than it says."""
        claimed = self.onnx if graph is None else self.put(graph)
        actual = claimed if built_from is None else self.put(built_from)
        return BuiltEngine(self, self._request(claimed, precision), self._request(actual, precision))

    def _request(self, model: str, precision: Precision) -> BuildRequest:
        backend = backends.configure("onnxruntime", {"intra_op_threads": 1})
        ends = [{dim.name: getattr(dim, end) for dim in self.dims} for end in ("min", "opt", "max")]
        profile = ShapeProfile(tuple((item.name, *(item.at(sizes) for sizes in ends)) for item in self.inputs))  # type: ignore[misc]
        names = backends.options_of(backend), backends.toolchain_of(backend)
        return BuildRequest(model, precision, CPU, "onnxruntime", self.inputs, self.outputs, (profile,), *names)


class BuiltEngine:
    """An engine in the store, and the jobs that judge it."""

    def __init__(self, bench: Bench, claimed: BuildRequest, actual: BuildRequest) -> None:
        self.bench = bench
        value = build_engine(bench.store.uri, actual.to_json(), bench.room())
        self.request, self.digest, self.suffix = claimed.to_json(), str(value["digest"]), str(value["suffix"])

    def checks(
        self, contract: Mapping[str, Any] | None = None, limits: Limits | None = None, seconds: float | None = None
    ) -> list[Check]:
        """The engine joint, with a contract and the task metric. seconds: for calls beside the golden set."""
        shapes = {"inputs": [asdict(i) for i in self.bench.inputs], "dims": [asdict(d) for d in self.bench.dims]}
        promised = None if contract is None else {**contract, "shapes": shapes}
        calls = {"seconds": seconds, "bitwise": bool(contract and "bitwise" in contract), "shapes": shapes}
        place = (self.bench.store.uri, self.request, self.suffix, self.digest, self.bench.golden)
        return _checks(check_engine(*place, limits or {}, self.bench.metric, promised, calls, self.bench.room()))  # type: ignore[arg-type]

    def attribution(self, sizes: Sequence[str] = ()) -> Attribution:
        """Which node drifted. sizes: cases of a failed check of sizes."""
        place = (self.bench.store.uri, self.request, self.suffix, self.digest, self.bench.golden)
        return self.bench._attribution(attribute_engine(*place, {}, None, sizes, self.bench.room()))

    def fuzzed(self, cases: int = 6, seed: int = 0, only: str | None = None) -> dict[str, Any]:
        """The report of `enginery fuzz`."""
        model = {"inputs": [asdict(i) for i in self.bench.inputs], "dims": [asdict(d) for d in self.bench.dims]}
        asked = {"seed": seed, "count": cases, "histogram": None, "only": only, "command": []}
        place = (self.bench.store.uri, self.request, self.suffix, self.digest, self.bench.golden)
        return fuzz_engine(*place, model, {}, asked, self.bench.room())


def _checks(told: Mapping[str, Any]) -> list[Check]:
    return [Check.from_json(item) for item in told["checks"]]
