"""The step that searches which nodes to quantize to int8, and how, on the calibration samples."""

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from builders.backends import discovery
from builders.backends.optional_methods import get_scheme
from builders.backends.request_checks import profiles
from builders.execution.jobs import Job, ProcessLimits, WorkerContext
from enginesmith.core.codec import encode, encode_fields
from enginesmith.core.errors import DataError
from enginesmith.core.hardware.cpu_kinds import this_kind, why_no_proof
from enginesmith.core.types import Backend, BuildRequest, QuantizationScheme, Tensors
from enginesmith.registry.store.base import Store, open_store
from pipeline.compile.closure.code import backend_root
from pipeline.compile.run_context import RunContext, Work
from pipeline.compile.steps.blobs import fetch_graph, text_of
from pipeline.compile.steps.calibration import (
    CalibrationMethod,
    CalibrationSamples,
    calibration_method,
    calibration_samples,
    chosen_ranges,
    complete_samples,
    open_samples,
    samples_key,
)
from pipeline.compile.steps.keys import code_key, metrics_of, step_limits
from pipeline.progress.events import Finished
from pipeline.quantization.schemes.overrides import Override, resolve
from pipeline.quantization.search.quality import GraphLimits, SearchClock, SearchFloor
from pipeline.quantization.search.rates import FloatPrecision, Peaks, peaks_of
from pipeline.values import Exported, GraphVariant, Json, Observed, Searched, SearchResult

if TYPE_CHECKING:
    from enginesmith.arrays import Array
    from pipeline.quantization.search.latency import EngineTiming
    from pipeline.quantization.search.trial import MixedPrecisionChoice
    from pipeline.spec.model import ModelSpec
    from validation.data.samples import Samples

# Of a step's time, what a search takes before it ends by itself: the rest is for what it writes.
OWN_SHARE = 0.9


@dataclass(frozen=True)
class SearchTerms:
    """A spec's settings for the search for int8. overrides: precisions of nodes that are not searched.  budget_ms: the
    maximum time of a run."""

    smoothing: Literal["none", "auto"]
    floor: SearchFloor | None
    overrides: tuple[Override, ...]
    budget_ms: float | None = None


@dataclass(frozen=True)
class LatencyProbe:
    """The engine that measures what int8 saves, and the machine that its times hold for; without a request, the reason
    why none of that kind runs here.

    cpu, cores: of the machine.  cannot: the reason, or ''.
    """

    request: BuildRequest | None = None
    cpu: str = ""
    cores: int = 0
    cannot: str = ""


@dataclass(frozen=True)
class SearchedKind:
    """A kind of int8 to search. probe: None where nothing is timed.  peaks: of the first target that takes it and
    has known rates, by which costs are modelled; None where none has."""

    kind: Searched
    probe: LatencyProbe | None = None
    peaks: Peaks | None = None


@dataclass(frozen=True)
class SearchResults:
    """Results of a search, for each kind in the order of the request."""

    found: tuple[SearchResult, ...]


@dataclass(frozen=True)
class SearchQuantization:
    """Search what to quantize and how, for some kinds of int8, which share what does not depend on the kind. The result
    for one kind does not depend on the others.

    model, observations: digests.  answer: the output that is judged by labels.  most_s: after this many seconds each
    kind gets its best result so far.
    """

    model: str
    kinds: tuple[SearchedKind, ...]
    observations: str
    calibration: CalibrationMethod
    search: SearchTerms
    answer: str | None
    samples: CalibrationSamples
    most_s: float

    def run(self, context: WorkerContext) -> SearchResults:
        """The results. Raises DataError for labels that are not classes, InputError for rules that match no node."""
        # For numpy, which is imported below: groups are fitted side by side, and threads of a product wait awake.
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
        import onnx

        from pipeline.quantization.insertion_points import prepare_model
        from pipeline.quantization.search.selection import choose_each
        from pipeline.quantization.search.trial import SearchTarget
        from pipeline.quantization.settings.runs import RunLabels, group_runs
        from validation.data.samples import Samples
        from validation.latency.measurement.loop import at_tuned_sizes

        clock, store, search = SearchClock.start(self.most_s), open_store(context.store), self.search
        file = fetch_graph(store, self.model, context.workdir / "model.onnx")
        overrides = resolve(prepare_model(onnx.load(file)), search.overrides) if search.overrides else {}
        shapes, labels = (self.samples.shapes.inputs, self.samples.shapes.dims), None
        with open_samples(self.samples) as stored_samples, ExitStack() as resources:
            source = complete_samples(stored_samples, self.samples, file)
            if self.answer and isinstance(source, Samples):
                labels = RunLabels(self.answer, _read_labels(source, self.samples))
            targets = []
            for kind in self.kinds:
                activation, timer = kind.kind.activation, None
                scheme = QuantizationScheme(activation, activation == "uint8", "fp32", kind.kind.weight_levels)
                variant = GraphVariant(kind.kind.precision, scheme)
                ranges = chosen_ranges(store, variant, self.observations, self.calibration)
                if kind.probe and kind.probe.request:
                    first_run = at_tuned_sizes(next(group_runs(source.runs(), *shapes))[1], *shapes)
                    timer = resources.enter_context(_make_timer(kind.probe.request, first_run, context.workdir))
                targets.append(SearchTarget(ranges, scheme, timer, kind.kind.precision, kind.peaks))
            runs = group_runs(source.runs(), *shapes)
            terms = search.floor, search.smoothing, overrides, labels, clock, search.budget_ms, shapes
            choices = choose_each(onnx.load(file), targets, runs, *terms)
        pairs = zip(self.kinds, choices, strict=True)
        return SearchResults(tuple(self._store(kind, choice, store, context.workdir) for kind, choice in pairs))

    def _store(self, kind: SearchedKind, choice: "MixedPrecisionChoice", store: Store, workdir: Path) -> SearchResult:
        from pipeline.quantization.statistics.observations import Observations
        from pipeline.sources.onnx_model import save_onnx

        save_onnx(choice.model, workdir / "chosen.onnx")
        obstacle = kind.probe.cannot if kind.probe else ""
        return SearchResult(
            store.put_file(workdir / "chosen.onnx"),
            store.put_bytes(text_of(choice.ranges.to_json())),
            store.put_bytes(text_of(encode(choice.document(self.search.floor)))),
            store.put_bytes(Observations(self.model, self.samples.digest, (), choice.smoothed).to_bytes()),
            dict(choice.left),
            choice.point.share,
            "; ".join(filter(None, [choice.summary, f"latency was not measured: {obstacle}" if obstacle else ""])),
            choice.ended,
            choice.formats,
        )


def _make_timer(request: BuildRequest, inputs: Tensors, workdir: Path) -> "EngineTiming":
    from pipeline.quantization.search.latency import EngineTiming

    return EngineTiming(discovery.configure(request.backend, dict(request.options)), request, inputs, workdir)


def _read_labels(source: "Samples", samples: CalibrationSamples) -> "Array":
    """Class indices [n]. Raises DataError for labels of another dtype."""
    label_array = source.column(samples.labels or "")
    if label_array.dtype.kind not in "iu":
        column_text = f"{samples.labels!r} of {samples.data}"
        raise DataError(f"calibration.labels: {column_text} is {label_array.dtype}; class indices are integers")
    return label_array


def _list_requests(
    kind: Searched, spec: "ModelSpec", export: Exported
) -> Iterator[tuple[Backend, BuildRequest, FloatPrecision]]:
    """For each backend and target of the spec that takes a kind of int8, a request, and its precision of floats."""
    model = export.model
    compilers = [discovery.configure(name, options) for name, options in spec.backends.items()]
    pairs = [(compiler, target) for compiler in compilers for target in spec.target_list() if compiler.serves(target)]
    for compiler, target in pairs:
        scheme = get_scheme(compiler, target)
        if kind != Searched(scheme.activation, scheme.weight_levels, kind.precision):
            continue
        shapes = tuple(profiles(model.inputs, spec.named_dims())) if not target.is_cpu else ()
        options, toolchain = discovery.options_of(compiler), discovery.toolchain_of(compiler, target)
        unit = model.digest, kind.precision, target, compiler.name
        request = BuildRequest(*unit, model.inputs, model.outputs, shapes, options, toolchain)
        yield compiler, request, scheme.float_precision


def _find_kind(kind: Searched, spec: "ModelSpec", export: Exported) -> SearchedKind:
    """The target and engine that a search for a kind of int8 measures or models: the first target of the spec that can
    be built for, and the engine that measures the saving, if the spec asks for measuring. Costs are modelled for the
    first target with known rates.

    On another kind of CPU, or with another number of cores, the times are measured anew.
    """
    requests = list(_list_requests(kind, spec, export))
    entries = (entry for entry in requests if not entry[0].refuses(entry[1]))
    peaks = next(filter(None, (peaks_of(request.target, floats) for _, request, floats in entries)), None)
    if spec.quantization.latency == "ignore" and spec.quantization.budget_ms is None:
        return SearchedKind(kind, None, peaks)
    reasons = []
    for compiler, request, _ in requests:
        reason = compiler.refuses(request) or compiler.runs(request.target) or why_no_proof(request)
        if reason is None:
            return SearchedKind(kind, LatencyProbe(request, this_kind().name, os.cpu_count() or 1), peaks)
        reasons.append(reason)
    obstacle = reasons[0] if reasons else f"no target of this spec takes {kind.name}"
    return SearchedKind(kind, LatencyProbe(cannot=obstacle), peaks)


def choose(
    kinds: Sequence[Searched], export: Exported, ranges: Observed | None, work: Work
) -> dict[Searched, SearchResult]:
    """Search what to quantize and how, for some kinds of int8, as the spec asks. ranges: what calibration observed.

    Raises DataError without calibration samples, and for a model that carries Q/DQ of its own.
    """
    spec = work.spec
    quantization = spec.quantization
    floor = SearchFloor(**quantization.floor.model_dump()) if quantization.floor else None
    terms = SearchTerms(quantization.smoothing, floor, node_overrides(spec), quantization.budget_ms)
    searched_kinds = [_find_kind(kind, spec, export) for kind in kinds]
    return _search(searched_kinds, terms, step_limits(spec, "quantization"), export, ranges, work)


def search_for_limits(
    kinds: Sequence[Searched], export: Exported, ranges: Observed | None, work: Work
) -> dict[Searched, SearchResult]:
    """Search the largest share of int8, for some kinds of it, that keeps the limits of their graphs, with smoothing.
    Raises as `choose`.

    It may use half of this machine's memory, because engines are built beside it.
    """
    spec = work.spec
    graph_limits = GraphLimits(spec.validation.limits_for("int8", "quantization"), metrics_of(spec, "int8"))
    terms = SearchTerms("auto", SearchFloor(graph=graph_limits), node_overrides(spec))
    limits = step_limits(spec, "quantization")
    remedy = f"{limits.raise_timeout}, or say quantization.search: never"
    limits = replace(limits, memory_mib=limits.memory_mib // 2, raise_timeout=remedy)
    searched_kinds = [replace(_find_kind(kind, spec, export), probe=None) for kind in kinds]
    return _search(searched_kinds, terms, limits, export, ranges, work)


def _search(
    items: Sequence[SearchedKind],
    terms: SearchTerms,
    limits: ProcessLimits,
    export: Exported,
    ranges: Observed | None,
    work: Work,
) -> dict[Searched, SearchResult]:
    """The recorded results by kind; one job searches the missing ones. A search that ran out of time is recorded under
    that time, and runs again when it may take longer."""
    spec, context = work.spec, work.context
    if export.model.carries_qdq:
        raise DataError("there is nothing to choose: the model has its own Q/DQ nodes, which are kept")
    method = calibration_method(spec)
    if ranges is None or method is None:
        raise DataError("the choice of what to quantize needs real samples; add calibration.data")
    request = SearchQuantization(
        export.model.digest,
        tuple(items),
        ranges.observations,
        method,
        terms,
        _find_judged_output(spec, export),
        calibration_samples(spec),
        OWN_SHARE * limits.timeout_s,
    )
    keys = {kind: _key(replace(request, kinds=(kind,)), ranges) for kind in items}
    search_results = {kind: stored_result for kind in items if (stored_result := _recall(keys[kind], context))}
    for kind in search_results:
        context.progress.emit(Finished(f"choose {kind.kind.name}", "cached"))
    missing_kinds = tuple(kind for kind in items if kind not in search_results)
    if missing_kinds:
        name = f"choose {' and '.join(kind.kind.name for kind in missing_kinds)}"
        job = Job("choose", replace(request, kinds=missing_kinds), context.store.uri, limits)
        results = context.run_job(context.local, name, job).found
        for kind, result in zip(missing_kinds, results, strict=True):
            # A complete search is recorded for every time limit, an incomplete one only for this limit.
            key = {name: value for name, value in keys[kind].items() if result.ended or name != "most_s"}
            blobs = [result.model, result.ranges, result.choice, result.smoothed]
            context.remember("choose", key, encode_fields(result), blobs)
            search_results[kind] = result
        context.progress.emit(Finished(name))
    return {kind.kind: search_results[kind] for kind in items}


def _key(request: SearchQuantization, ranges: Observed) -> Json:
    probe = request.kinds[0].probe
    backend_roots = [backend_root(probe.request.backend)] if probe and probe.request else []
    return {
        **encode(request),
        "observations": ranges.seen,
        "samples": samples_key(request.samples),
        **code_key(SearchQuantization, *backend_roots),
    }


def _recall(key: Json, context: RunContext) -> SearchResult | None:
    searched_key = {name: value for name, value in key.items() if name != "most_s"}
    return context.recall("choose", searched_key, SearchResult) or context.recall("choose", key, SearchResult)


def node_overrides(spec: "ModelSpec") -> tuple[Override, ...]:
    """The spec's `quantization.overrides`."""
    return tuple(Override(rule.match, rule.precision) for rule in spec.quantization.overrides)


def find_searched_kinds(variants: Iterable[GraphVariant], spec: "ModelSpec", export: Exported) -> tuple[Searched, ...]:
    """The kinds of int8 that the spec wants searched for these graph variants, each once; none of a model whose weights
    lie in shards, which a search would hold in memory (`not_searched`)."""
    if not spec.quantization.searches or export.model.carries_qdq or export.model.shards:
        return ()
    return tuple(dict.fromkeys(variant.searched for variant in variants if variant.searched))


def not_searched(variant: GraphVariant, spec: "ModelSpec", export: Exported) -> tuple[str, ...]:
    """A note on a variant of which nothing is searched because its weights lie in shards; () for others."""
    option_text = ", ".join(f"quantization.{key}" for key in spec.quantization.searches)
    if not (option_text and variant.searched and export.model.shards):
        return ()
    return (f"without {option_text}: trials hold all weights in memory, and those of this model lie in shards",)


def _find_judged_output(spec: "ModelSpec", export: Exported) -> str | None:
    """The output whose argmax is judged by labels; None where there are none."""
    if spec.calibration is None or spec.calibration.labels is None:
        return None
    metrics = spec.golden.metrics if spec.golden else ()
    return next((metric.output for metric in metrics if metric.name == "accuracy"), export.model.outputs[0].name)
