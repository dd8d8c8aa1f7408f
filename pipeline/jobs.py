"""The steps on the worker's side: each function runs in a process of its own, on this host or on a Ray worker.

They take and return JSON. Bytes come from the artifact store by digest, are verified on the way, and go back to it.
"""

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from builders import backends
from builders.errors import DataError, IntegrityError
from builders.types import (
    CALIBRATED,
    BuildRequest,
    Dim,
    Engine,
    Precision,
    QuantizationScheme,
    Session,
    TensorSpec,
    tensor_from_json,
)
from pipeline.registry.store import Store, open_store
from pipeline.values import Activation

if TYPE_CHECKING:
    from onnx import ModelProto

    from pipeline.quantization.calibration.ranges import Ranges
    from validation.golden import GoldenSet
    from validation.samples import Samples

Json = dict[str, Any]


def _tensors(items: list[Json]) -> tuple[TensorSpec, ...]:
    return tuple(tensor_from_json(item) for item in items)


def _dims(items: list[Json]) -> tuple[Dim, ...]:
    return tuple(Dim(**{**item, "edges": tuple(item["edges"])}) for item in items)


def _fetch(store: Store, digest: str, dest: Path) -> Path:
    """A verified copy of a blob. A damaged blob is set aside, so that the next run makes it anew."""
    try:
        store.fetch(digest, dest)
    except IntegrityError as error:
        if store.has(digest):
            store.discard(digest)
            raise IntegrityError(
                f"{str(error).partition(';')[0]}; it was set aside: run `enginery build` and it is made anew"
            ) from error
        raise
    return dest


def _golden(store: Store, digest: str, workdir: Path) -> "GoldenSet":
    from validation.golden import GoldenSet

    return GoldenSet.load(_fetch(store, digest, workdir / "golden.safetensors"))


def _samples(data: str, inputs: Sequence[TensorSpec], dims: Sequence[Dim], labels: str | None = None) -> "Samples":
    from validation.samples import Samples

    return Samples.open(Path(data), inputs, dims, (labels,) if labels else ())


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

    onnx: digest of the exported model when only the golden set is new. Gives 'model' and 'golden', each a step's value.
    """
    from builders.onnxruntime import OrtSession
    from pipeline.export import ExportRequest, export
    from pipeline.sources.onnx_model import load_onnx
    from validation.budget import default_budget
    from validation.golden import GoldenSet

    place = open_store(store)
    wanted = ExportRequest.from_json(request)
    samples = _samples(data, wanted.inputs, wanted.dims, labels) if data else None
    column = samples.column(labels) if samples and labels else None
    known = _fetch(place, onnx, workdir / "known.onnx") if onnx else None
    exported = export(wanted, samples, column, workdir, default_budget("export", "fp32").override(limits), known)
    frozen = GoldenSet.load(exported.golden)
    with OrtSession(exported.onnx, optimized=False) as session:
        proof = _proof(exported.checks, session, frozen, metric, "exported model")
    return {
        "model": None if onnx else _model_value(place, exported.onnx, load_onnx(exported.onnx, workdir)),
        "golden": {"golden": place.put_file(exported.golden), "notes": list(exported.notes), **proof},
    }


def _model_value(place: Store, path: Path, model: "ModelProto") -> Json:
    from pipeline.quantization.schemes.qdq import carries_qdq
    from pipeline.sources.onnx_model import specs_of

    inputs, outputs = specs_of(model)
    return {
        "onnx": place.put_file(path),
        "inputs": [vars(tensor) for tensor in inputs],
        "outputs": [vars(tensor) for tensor in outputs],
        "opset": max(item.version for item in model.opset_import if item.domain in ("", "ai.onnx")),
        "carries_qdq": carries_qdq(model),
    }


def _proof(checks: Any, session: Session, golden: "GoldenSet", metric: Json | None, what: str) -> Json:
    """Checks and task metric as JSON; the metric is a check of its own. what: the thing that was run."""
    from validation.compare import task_check

    task = [replace(task_check(session, golden, metric), case=f"golden, {what}")] if metric else []
    metrics = {check.name: check.value for check in task if check.value is not None}
    return {"checks": [check.to_json() for check in (*checks, *task)], "metrics": metrics}


def calibrate(
    store: str, onnx: str, root: str, data: str, digest: str, inputs: list[Json], dims: list[Json], workdir: Path
) -> Json:
    """One streaming pass over the calibration samples: the observations (blob), and the digest of what was seen.

    root, data: the spec's folder, and what the spec names there.  digest: of it when the step was keyed. Raises
    DataError when it has changed since.
    """
    import onnx as onnx_package

    from pipeline.quantization.calibration.observe import observe
    from pipeline.quantization.calibration.sources import open_source
    from pipeline.quantization.graphs.placement import tensors_to_measure
    from pipeline.quantization.graphs.sites import activations, prepared

    place = open_store(store)
    model = _fetch(place, onnx, workdir / "model.onnx")
    graph = prepared(onnx_package.load(model))
    everything, needed = activations(graph), tensors_to_measure(graph)
    del graph
    with open_source(Path(root), data, digest, _tensors(inputs), _dims(dims)) as samples:
        seen = observe(model, samples, everything, histograms=needed)
    if seen.dataset != digest:
        raise DataError(f"{data} changed while it was read; nothing was kept: run again")
    return {"observations": place.put_bytes(seen.to_bytes()), "seen": seen.digest, "samples": seen.samples}


def choose(
    store: str,
    onnx: str,
    activation: Activation,
    observations: str,
    calibration: Json,
    search: Json,
    root: str,
    data: str,
    digest: str,
    inputs: list[Json],
    dims: list[Json],
    workdir: Path,
) -> Json:
    """Search what to quantize and how: digests of model, ranges and choice, and the nodes left in float with reasons.

    search: the spec's smoothing, floor and overrides.  root, data, digest: as in `calibrate`.
    """
    import onnx as onnx_package

    from pipeline.quantization.calibration.sources import open_source
    from pipeline.quantization.choice.runs import grouped
    from pipeline.quantization.choice.search import Floor
    from pipeline.quantization.choice.search import choose as search_for
    from pipeline.quantization.graphs.sites import prepared
    from pipeline.quantization.schemes.overrides import Override, resolve
    from pipeline.sources.onnx_model import save_onnx

    place = open_store(store)
    model = onnx_package.load(_fetch(place, onnx, workdir / "model.onnx"))
    scheme = QuantizationScheme(activation, quantize_bias=activation == "uint8", float_precision="fp32")
    measured = _ranges(place, {"precision": "int8", "scheme": {"activation": activation}}, observations, calibration)
    if measured is None:
        raise IntegrityError("int8 was to be searched without observations; calibrate first")
    rules = [Override.from_json(item) for item in search["overrides"]]
    overrides = resolve(prepared(model), rules) if rules else {}
    floor = Floor(**search["floor"]) if search["floor"] else None
    shapes = _tensors(inputs), _dims(dims)
    with open_source(Path(root), data, digest, *shapes) as samples:
        runs = grouped(samples.runs(), *shapes)
        found = search_for(model, measured, scheme, runs, floor, search["smoothing"], overrides)
    save_onnx(found.model, workdir / "chosen.onnx")
    return {
        "model": place.put_file(workdir / "chosen.onnx"),
        "ranges": place.put_bytes(_text(found.ranges.to_json())),
        "choice": place.put_bytes(_text(found.to_json())),
        "left": dict(found.left),
        "summary": found.summary,
    }


def _text(value: Json) -> bytes:
    return json.dumps(value, indent=1, sort_keys=True, allow_nan=False).encode()


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
    """Write the model in one flavour: digests of graph and scales file, and notes on what was left alone.

    choice: what `choose` gave; then its model, in float, and its ranges are written instead.
    """
    import onnx as onnx_package

    from pipeline.quantization.calibration.ranges import Ranges
    from pipeline.quantization.schemes.overrides import Override
    from pipeline.quantization.schemes.write import write
    from pipeline.sources.onnx_model import save_onnx, specs_of

    place = open_store(store)
    model = onnx_package.load(_fetch(place, choice["model"] if choice else onnx, workdir / "model.onnx"))
    measured = _ranges(place, flavour, observations, calibration)
    if choice:
        measured = Ranges.from_json(json.loads(place.read_blob(choice["ranges"])))
    scheme = QuantizationScheme(**flavour["scheme"]) if flavour["scheme"] else None
    rules = [Override.from_json(item) for item in overrides]
    left = choice["left"] if choice else {}
    keep_io = not flavour["native_io"]
    written, notes = write(model, flavour["precision"], scheme, measured, rules, keep_io=keep_io, left=left)
    inputs, outputs = specs_of(written)
    save_onnx(written, workdir / "graph.onnx")
    text = json.dumps(measured.to_json(), indent=1, sort_keys=True) if measured else None
    return {
        "model": place.put_file(workdir / "graph.onnx"),
        "inputs": [vars(tensor) for tensor in inputs],
        "outputs": [vars(tensor) for tensor in outputs],
        "notes": [*([choice["summary"]] if choice else []), *notes.lines()],
        "scales": measured.digest if measured and flavour["precision"] in CALIBRATED else None,
        "ranges": place.put_bytes(text.encode()) if text else None,
    }


def _ranges(place: Store, flavour: Json, observations: str | None, calibration: Json | None) -> "Ranges | None":
    """Chosen for the flavour's scheme; fp8 and casts need to know the extremes only."""
    from pipeline.quantization.calibration.methods import MinMax, method, ranges
    from pipeline.quantization.calibration.observations import Observations

    if observations is None or calibration is None:
        return None
    seen = Observations.from_bytes(place.read_blob(observations))
    if flavour["precision"] != "int8":
        return ranges(seen, MinMax(), "int8")
    chosen = method(calibration["method"], calibration["percentile"])
    return ranges(seen, chosen, flavour["scheme"]["activation"])


def check_graph(
    store: str,
    reference: str,
    graph: str,
    golden: str,
    precision: Precision,
    limits: Mapping[str, float],
    metric: Json | None,
    workdir: Path,
) -> Json:
    """Compare a quantized or cast graph with the fp32 graph, both without optimization (the quantization joint)."""
    from builders.onnxruntime import OrtSession
    from validation.budget import default_budget
    from validation.compare import drift_checks

    place = open_store(store)
    frozen = _golden(place, golden, workdir)
    candidate = _runnable(_fetch(place, graph, workdir / "graph.onnx"), precision)
    budget = default_budget("quantization", precision).override(limits)
    with (
        OrtSession(_fetch(place, reference, workdir / "reference.onnx"), optimized=False) as expected,
        OrtSession(candidate, optimized=False) as actual,
    ):
        return _proof(drift_checks("quantization", expected, actual, frozen, budget), actual, frozen, metric, "graph")


def _runnable(graph: Path, precision: Precision) -> Path:
    """A graph that shows on this CPU what a GPU would compute, in fp32 arithmetic that rounds where the graph rounds.

    onnxruntime's CPU has no bf16 kernels, and between fp16 nodes it keeps fp32, which hides rounding and overflow.
    """
    if precision == "fp32":
        return graph
    import onnx as onnx_package

    from pipeline.quantization.schemes.emulate import emulate

    emulated = graph.with_name("emulated.onnx")
    onnx_package.save(emulate(onnx_package.load(graph)), emulated)
    return emulated


def build_engine(store: str, request: Json, workdir: Path) -> Json:
    """Compile one engine and upload it: digest, size, suffix, notes, seconds. Puts itself on record by build key."""
    from builders.digest import digest_of
    from pipeline.registry.records import remember

    place = open_store(store)
    wanted = BuildRequest.from_json(request)
    backend = backends.configure(wanted.backend, dict(wanted.options))
    backends.check_toolchain(backend, wanted.toolchain)
    model = _fetch(place, wanted.model, workdir / "model.onnx")
    begun = time.monotonic()
    engine = backend.build(wanted, model, workdir)
    value: Json = {
        "digest": place.put_file(engine.path),
        "size_bytes": engine.size_bytes,
        "suffix": engine.suffix,
        "notes": list(engine.notes),
        "seconds": round(time.monotonic() - begun, 3),
        "request": request,
    }
    remember(place, "build", digest_of({"build": wanted.key}), value, [value["digest"]])
    return value


def check_engine(
    store: str,
    request: Json,
    suffix: str,
    engine: str,
    golden: str,
    limits: Mapping[str, float],
    metric: Json | None,
    workdir: Path,
) -> Json:
    """Run an engine against the graph it was built from (the engine joint) and measure the task metric on it."""
    from builders.onnxruntime import OrtSession
    from validation.budget import default_budget
    from validation.compare import drift_checks

    place = open_store(store)
    wanted = BuildRequest.from_json(request)
    frozen = _golden(place, golden, workdir)
    graph = _runnable(_fetch(place, wanted.model, workdir / "graph.onnx"), wanted.precision)
    budget = default_budget("engine", wanted.precision).override(limits)
    with OrtSession(graph, optimized=False) as expected, _opened(place, wanted, engine, suffix, workdir) as actual:
        return _proof(drift_checks("engine", expected, actual, frozen, budget), actual, frozen, metric, "engine")


def _opened(
    place: Store, request: BuildRequest, digest: str, suffix: str, workdir: Path
) -> AbstractContextManager[Session]:
    path = _fetch(place, digest, workdir / f"engine{suffix}")
    engine = Engine(request, path, digest, path.stat().st_size, suffix)
    return backends.configure(request.backend, dict(request.options)).open(engine)
