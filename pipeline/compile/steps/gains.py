"""The step that decides whether a quantized unit is faster than the unit in floats that it replaces. If the target is
here, engines of both graphs are timed in turns; elsewhere the speed is modelled (`Graph.modelled`).
"""

from dataclasses import dataclass

from builders.backends import discovery
from builders.execution.jobs import Job, Needs, WorkerContext
from enginesmith.core.codec import encode
from enginesmith.core.errors import EnginesmithError
from enginesmith.core.hardware.cpu_kinds import why_no_proof
from enginesmith.core.text import format_bytes, format_plain
from enginesmith.core.types import QUANTIZED, BuildRequest
from enginesmith.registry.store.base import open_store
from pipeline.compile.closure.code import backend_root
from pipeline.compile.run_context import NotOnRecord, Work, stops_run
from pipeline.compile.steps.blobs import fetch_graph
from pipeline.compile.steps.keys import bucket_inputs, code_key, engine_limits, model_shapes
from pipeline.quantization.search.rates import ERROR, name_rates
from pipeline.values import Exported, Graph, ModelShapes
from validation.latency.machine import machine

# Ratios of speed and of weight bytes to the unit in floats.
LEAST_SPEEDUP, MOST_BYTES = 1.02, 0.9


@dataclass(frozen=True)
class RaceGraphs:
    """Time engines of two graphs in turns, at the sizes that the model is tuned for. request: of the quantized one.

    float_model, golden: digests of the float graph, and of the golden set that provides the inputs.
    """

    request: BuildRequest
    float_model: str
    golden: str
    shapes: ModelShapes

    def run(self, context: WorkerContext) -> "RacedGraphs":
        """The measured speedup. Raises EnginesmithError if an engine cannot be built or run."""
        import onnx

        from pipeline.quantization.search.latency import EngineTiming, benchmark_until_decided
        from validation.latency.measurement.loop import tuned_for

        store, request, workdir = open_store(context.store), self.request, context.workdir
        digests = {"narrow": request.model, "float": self.float_model}
        models = [onnx.load(fetch_graph(store, digest, workdir / f"{name}.onnx")) for name, digest in digests.items()]
        (bucket,) = bucket_inputs(store, self.golden, self.shapes, (tuned_for(self.shapes.dims),), workdir)
        backend = discovery.configure(request.backend, dict(request.options))
        with EngineTiming(backend, request, bucket.inputs, workdir) as race:
            timing = benchmark_until_decided(race(*models), 1 - 1 / LEAST_SPEEDUP)
        times_text = f"{format_plain(timing.int8_ms)} against {format_plain(timing.float_ms)} ms"
        speedup = timing.float_ms / (timing.float_ms - timing.saving_ms)
        return RacedGraphs(speedup, timing.lost, f"measured here in {timing.rounds} rounds: {times_text}")


@dataclass(frozen=True)
class RacedGraphs:
    """Result of a race. speedup: from the median difference within rounds. lost: whether the speedup is surely below
    `LEAST_SPEEDUP`. source: the times as text."""

    speedup: float
    lost: bool
    source: str


@dataclass(frozen=True)
class Gain:
    """Gain of a quantized unit. text: the figure and its source. is_local: whether it was measured here, so that
    another build may differ."""

    is_enough: bool
    text: str
    is_local: bool = False


def weigh_gain(request: BuildRequest, graph: Graph, export: Exported, work: Work) -> Gain | None:
    """The gain of a quantized unit over the spec's unit in floats of the same target and backend; None without such a
    unit, and if the gain is unknown. Raises NotOnRecord as `RunContext.once`, except in a forecast."""
    scheme, rule = graph.variant.scheme, work.spec.quantization.gain
    floats = [precision for precision in work.spec.precision_list() if precision not in QUANTIZED]
    figures = graph.modelled.get("bytes" if rule == "bytes" else name_rates(request.target))
    if scheme is None or not floats or figures is None:
        return None
    precision = scheme.float_precision if scheme.float_precision in floats else floats[0]
    name, float_figure = (
        f"{request.target.name} {precision} {request.backend}",
        figures[1 if precision == "fp32" else 2],
    )
    if rule == "bytes":
        share, sizes = figures.quantized / max(float_figure, 1), map(format_bytes, (figures.quantized, float_figure))
        source = f"{' against '.join(sizes)} of weights; maximum {MOST_BYTES:g}"
        return Gain(share <= MOST_BYTES, f"{share:.2f} of the bytes of {name} ({source})")
    speedup, source = float_figure / figures.quantized, f"modelled, {ERROR}"
    is_enough, is_local = speedup >= LEAST_SPEEDUP, False
    backend = discovery.configure(request.backend, dict(request.options))
    is_here = not (backend.runs(request.target) or why_no_proof(request))
    is_plain = not (graph.shards or export.model.shards or graph.quantized_states)  # one file, of the golden inputs
    if rule == "latency" and is_here and precision == "fp32" and is_plain:
        try:
            race = RaceGraphs(request, export.model.digest, export.golden, model_shapes(work.spec))
            code = code_key(RaceGraphs, backend_root(request.backend))
            job = Job("race", race, work.context.store.uri, engine_limits(work.spec, "latency"), Needs(alone=True))
            key = {**encode(race), "machine": encode(machine()), **code}
            result = work.context.once("race", f"race {request.unit}", key, job)
            speedup, is_enough, source, is_local = result.speedup, not result.lost, result.source, True
        except NotOnRecord:
            if not work.context.foresees:
                raise
            is_enough, source = True, f"{source}; build measures it"
        except EnginesmithError as error:
            if stops_run(error):
                raise
            source, is_local = f"{source}; it could not be measured: {error}", True
    text = f"{speedup:.2f} times the speed of {name} ({source}; minimum {LEAST_SPEEDUP:g})"
    return Gain(is_enough, text if is_enough else f"no faster: {text}", is_local)
