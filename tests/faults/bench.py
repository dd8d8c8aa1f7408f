"""One model on its way through the jobs of the pipeline, in this process, with a fault planted on the way."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto

from builders.backends import discovery
from builders.execution.jobs import Request, Result, WorkerContext
from enginesmith.core.codec import decode
from enginesmith.core.hardware.cpu_kinds import CPU
from enginesmith.core.reports.proof import Check
from enginesmith.core.types import BuildRequest, Dim, Precision, ShapeProfile, TensorSpec
from enginesmith.registry.store.base import open_store
from pipeline.compile.steps.attributions import AttributeEngine, AttributeGraph, AttributionFound
from pipeline.compile.steps.engines import BuildEngine
from pipeline.compile.steps.exports import ExportModel
from pipeline.compile.steps.graphs import CheckGraph
from pipeline.compile.steps.proofs import CheckEngine, ContractTerms, ExtraCalls
from pipeline.operations.golden import FuzzEngine
from pipeline.sources.request import ExportRequest
from pipeline.values import EngineBlob, ModelShapes
from tests.faults.nets import BATCH, ROWS
from validation.attribution.result import Attribution, read_attribution
from validation.contracts.terms import Contract
from validation.fuzz.run import FuzzReport
from validation.metrics.tasks.terms import AccuracyMetric

METRIC = AccuracyMetric("logits", floor=0.95, against="labels")
Limits = Mapping[str, float | None]


class Bench:
    """A model that was exported, with its golden set. samples: by input, along axis 0.  checks: of the export stage."""

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
        self.metrics = () if labels is None else (METRIC,)
        np.savez(folder / "golden.npz", **samples, **({} if labels is None else {"label": labels}))
        source = ExportRequest("onnx", folder, "model.onnx", self.inputs, self.dims)
        label = None if labels is None else "label"
        result = self.run(ExportModel(source, None, folder / "golden.npz", label, self.metrics, {}))
        assert result.model is not None
        self.onnx, self.golden = result.model.digest, result.golden.golden
        self.outputs = result.model.outputs
        self.checks = [*result.golden.proof.checks]

    def room(self) -> Path:
        """A folder of its own, as each job has one."""
        self.rooms += 1
        room = self.folder / f"job {self.rooms}"
        room.mkdir()
        return room

    def run(self, request: Request[Result]) -> Result:
        """Run a request in this process, in a folder of its own."""
        return request.run(WorkerContext(self.room(), self.store.uri))

    def canonical(self) -> ModelProto:
        """The exported model."""
        return onnx.load_from_string(self.store.read_blob(self.onnx))

    def put(self, model: ModelProto) -> str:
        """A model as a blob."""
        return self.store.put_bytes(model.SerializeToString())

    def graph_checks(
        self, graph: ModelProto, precision: Precision, limits: Mapping[str, float] | None = None
    ) -> list[Check]:
        """The quantization stage: a graph against the exported model."""
        return [*self.run(CheckGraph(self.onnx, self.put(graph), self.golden, precision, limits or {})).checks]

    def graph_attribution(self, graph: ModelProto, precision: Precision) -> Attribution:
        """Which node of the graph drifted."""
        return self._attribution(AttributeGraph(self.onnx, self.put(graph), None, self.golden, precision, {}))

    def _attribution(self, request: Request[AttributionFound]) -> Attribution:
        return read_attribution(self.store, self.run(request).attribution)

    def engine(
        self, built_from: ModelProto | None = None, graph: ModelProto | None = None, precision: Precision = "fp32"
    ) -> "BuiltEngine":
        """An engine for `graph` (default: the exported model) that was compiled from another model than it says."""
        claimed_onnx = self.onnx if graph is None else self.put(graph)
        actual = claimed_onnx if built_from is None else self.put(built_from)
        return BuiltEngine(self, self._request(claimed_onnx, precision), self._request(actual, precision))

    def _request(self, model: str, precision: Precision) -> BuildRequest:
        backend = discovery.configure("onnxruntime", {"intra_op_threads": 1})
        end_values = [{dim.name: getattr(dim, end) for dim in self.dims} for end in ("min", "opt", "max")]
        profile = ShapeProfile(tuple((item.name, *(item.at(sizes) for sizes in end_values)) for item in self.inputs))
        names = discovery.options_of(backend), discovery.toolchain_of(backend)
        return BuildRequest(model, precision, CPU, "onnxruntime", self.inputs, self.outputs, (profile,), *names)


class BuiltEngine:
    """An engine in the store, and the jobs that judge it."""

    def __init__(self, bench: Bench, claimed: BuildRequest, actual: BuildRequest) -> None:
        self.bench = bench
        result = bench.run(BuildEngine(actual))
        self.blob = EngineBlob(claimed, result.digest, result.suffix)
        self.shapes = ModelShapes(bench.inputs, bench.dims)

    def checks(
        self, contract: Mapping[str, Any] | None = None, limits: Limits | None = None, seconds: float | None = None
    ) -> list[Check]:
        """The engine stage, with a contract and the task metric. seconds: for calls beside the golden set."""
        promised_terms = None if contract is None else ContractTerms(decode(dict(contract), Contract), self.shapes)
        calls = ExtraCalls(seconds, bool(contract and "bitwise" in contract), self.shapes)
        check = CheckEngine(self.blob, self.bench.golden, limits or {}, self.bench.metrics, promised_terms, calls)
        return [*self.bench.run(check).checks]

    def attribution(self, cases: Sequence[str] = ()) -> Attribution:
        """Which node drifted. cases: of failed checks of sizes and magnitudes."""
        return self.bench._attribution(AttributeEngine(self.blob, self.bench.golden, {}, (), tuple(cases)))

    def fuzzed(self, cases: int = 6, seed: int = 0, only: str | None = None) -> FuzzReport:
        """The report of `enginesmith debug fuzz`."""
        return self.bench.run(FuzzEngine(self.blob, self.bench.golden, self.shapes, {}, seed, cases, (), only))
