"""The step that searches which nodes to quantize to int8, and how, on the calibration samples."""

import os
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from builders.backends import discovery
from builders.backends.shape_profiles import profiles
from builders.execution.jobs import Job, ProcessLimits, WorkerContext
from enginery.core.codec import encode
from enginery.core.errors import DataError, IntegrityError
from enginery.core.hardware.cpu_kinds import this_kind, why_no_proof
from enginery.core.types import BuildRequest, QuantizationScheme
from enginery.registry.store.base import open_store
from pipeline.compile.closure.code import backend_root
from pipeline.compile.run_context import RunContext
from pipeline.compile.steps.blobs import fetch_graph, text_of
from pipeline.compile.steps.calibration import (
    CalibrationMethod,
    CalibrationSamples,
    calibration_method,
    calibration_samples,
    chosen_ranges,
    open_samples,
    samples_key,
)
from pipeline.compile.steps.keys import code_key, limits_of, step_limits
from pipeline.quantization.schemes.overrides import Override
from pipeline.quantization.search.quality import GraphLimits, SearchFloor
from pipeline.values import Exported, GraphVariant, Observed, Searched, SearchResult

if TYPE_CHECKING:
    from enginery.arrays import Array
    from pipeline.spec.model import ModelSpec
    from validation.data.samples import Samples


@dataclass(frozen=True)
class SearchTerms:
    """How int8 is searched, as a spec says it. overrides: precisions of nodes that are not searched."""

    smoothing: Literal["none", "auto"]
    floor: SearchFloor | None
    overrides: tuple[Override, ...]


@dataclass(frozen=True)
class LatencyProbe:
    """The engine that measures what int8 saves, and the machine that its times hold for; without a request, the reason
    why none of that kind runs here."""

    request: BuildRequest | None = None
    cpu: str = ""
    cores: int = 0
    cannot: str = ""


@dataclass(frozen=True)
class SearchQuantization:
    """Search what to quantize and how, for one kind of int8. model, observations: digests.

    probe: None where nothing is timed.  answer: the output that is judged by labels.
    """

    model: str
    kind: Searched
    observations: str
    calibration: CalibrationMethod
    search: SearchTerms
    probe: LatencyProbe | None
    answer: str | None
    samples: CalibrationSamples

    def run(self, context: WorkerContext) -> SearchResult:
        """What was chosen. Raises DataError for labels that are no classes, InputError for rules that match no node."""
        import onnx

        from pipeline.quantization.insertion_points import prepare_model
        from pipeline.quantization.schemes.overrides import resolve
        from pipeline.quantization.search.latency import EngineTiming
        from pipeline.quantization.search.search import choose as search_nodes
        from pipeline.quantization.settings.runs import RunLabels, group_runs
        from pipeline.quantization.statistics.observations import Observations
        from pipeline.sources.onnx_model import save_onnx
        from validation.data.samples import Samples

        place, workdir, search = open_store(context.store), context.workdir, self.search
        model = onnx.load(fetch_graph(place, self.model, workdir / "model.onnx"))
        activation = self.kind.activation
        scheme = QuantizationScheme(activation, activation == "uint8", "fp32", self.kind.weight_levels)
        measured = chosen_ranges(place, GraphVariant("int8", scheme), self.observations, self.calibration)
        if measured is None:
            raise IntegrityError("int8 was to be searched without observations; calibrate first")
        overrides = resolve(prepare_model(model), search.overrides) if search.overrides else {}
        shapes = self.samples.shapes.inputs, self.samples.shapes.dims
        with open_samples(self.samples) as source, ExitStack() as opened:
            labels = timer = None
            if self.answer and isinstance(source, Samples):
                labels = RunLabels(self.answer, _read_labels(source, self.samples))
            if self.probe and self.probe.request:
                request, first = self.probe.request, next(group_runs(source.runs(), *shapes))[1]
                backend = discovery.configure(request.backend, dict(request.options))
                timer = opened.enter_context(EngineTiming(backend, request, first, workdir))
            runs = group_runs(source.runs(), *shapes)
            found = search_nodes(
                model, measured, scheme, runs, search.floor, search.smoothing, overrides, timer, labels
            )
        save_onnx(found.model, workdir / "chosen.onnx")
        cannot = self.probe.cannot if self.probe else ""
        return SearchResult(
            place.put_file(workdir / "chosen.onnx"),
            place.put_bytes(text_of(found.ranges.to_json())),
            place.put_bytes(text_of(encode(found.document(search.floor)))),
            place.put_bytes(Observations(self.model, self.samples.digest, (), found.smoothed).to_bytes()),
            dict(found.left),
            found.point.share,
            "; ".join(filter(None, [found.summary, f"latency was not measured: {cannot}" if cannot else ""])),
        )


def _read_labels(source: "Samples", samples: CalibrationSamples) -> "Array":
    """Class indices [n]. Raises DataError for labels of another dtype."""
    found = source.column(samples.labels or "")
    if found.dtype.kind not in "iu":
        where = f"{samples.labels!r} of {samples.data}"
        raise DataError(f"calibration.labels: {where} is {found.dtype}; class indices are integers")
    return found


def find_latency_probe(kind: Searched, spec: "ModelSpec", exported: Exported) -> LatencyProbe | None:
    """The engine of the spec that measures what one kind of int8 saves; None when the spec does not ask for measuring.

    On another kind of CPU, or with another number of cores, the times are measured anew.
    """
    if spec.quantization.latency == "ignore":
        return None
    model, reasons = exported.model, []
    tools = [discovery.configure(name, options) for name, options in spec.backends.items()]
    pairs = [(tool, target) for tool in tools for target in spec.target_list() if tool.serves(target)]
    for tool, target in pairs:
        scheme = tool.scheme()
        if Searched(scheme.activation, scheme.weight_levels) != kind:
            continue
        shapes = tuple(profiles(model.inputs, spec.named_dims())) if not target.is_cpu else ()
        options, toolchain = discovery.options_of(tool), discovery.toolchain_of(tool, target)
        request = BuildRequest(
            model.digest, "int8", target, tool.name, model.inputs, model.outputs, shapes, options, toolchain
        )
        reason = tool.refuses(request) or tool.runs(target) or why_no_proof(request)
        if reason is None:
            return LatencyProbe(request, this_kind().name, os.cpu_count() or 1)
        reasons.append(reason)
    return LatencyProbe(cannot=reasons[0] if reasons else f"no target of this spec takes {kind.name}")


def choose(
    kind: Searched, spec: "ModelSpec", exported: Exported, ranges: Observed | None, context: RunContext
) -> SearchResult:
    """Search what to quantize and how, for one kind of int8, as the spec asks. ranges: what calibration observed.

    Raises DataError without calibration samples, and for a model that carries Q/DQ of its own.
    """
    wanted, probe = spec.quantization, find_latency_probe(kind, spec, exported)
    floor = SearchFloor(**wanted.floor.model_dump()) if wanted.floor else None
    terms = SearchTerms(wanted.smoothing, floor, node_overrides(spec))
    return _search(kind, terms, probe, step_limits(spec, "quantization"), spec, exported, ranges, context)


def search_for_limits(
    kind: Searched, spec: "ModelSpec", exported: Exported, ranges: Observed | None, context: RunContext
) -> SearchResult:
    """Search the most of one kind of int8 that keeps the limits of its graph, with smoothing. Raises as `choose`.

    It may use half of this machine's memory, because engines are built beside it.
    """
    given = limits_of(spec, "int8", "quantization")
    labelled = spec.golden.metrics if spec.golden and spec.golden.labels and "argmax_agreement" not in given else ()
    decisions = next((item.output for item in labelled if item.name == "accuracy"), None)
    terms = SearchTerms("auto", SearchFloor(graph=GraphLimits(given, decisions)), node_overrides(spec))
    limits = step_limits(spec, "quantization")
    limits = replace(
        limits,
        memory_mib=limits.memory_mib // 2,
        raise_timeout=f"{limits.raise_timeout}, or say quantization.search: never",
    )
    return _search(kind, terms, None, limits, spec, exported, ranges, context)


def _search(
    kind: Searched,
    terms: SearchTerms,
    probe: LatencyProbe | None,
    limits: ProcessLimits,
    spec: "ModelSpec",
    exported: Exported,
    ranges: Observed | None,
    context: RunContext,
) -> SearchResult:
    if exported.model.carries_qdq:
        raise DataError("there is nothing to choose: the model carries Q/DQ of its own, and they stay")
    method = calibration_method(spec)
    if ranges is None or method is None:
        raise DataError("what to quantize is chosen on real samples; add calibration.data")
    timed = [backend_root(probe.request.backend)] if probe and probe.request else []
    request = SearchQuantization(
        exported.model.digest,
        kind,
        ranges.observations,
        method,
        terms,
        probe,
        _find_judged_output(spec, exported),
        calibration_samples(spec),
    )
    key = {
        **encode(request),
        "observations": ranges.seen,
        "samples": samples_key(request.samples),
        **code_key(SearchQuantization, *timed),
    }
    job = Job("choose", request, context.store.uri, limits)
    return context.once("choose", f"choose {kind.name}", key, job, lambda v: [v.model, v.ranges, v.choice, v.smoothed])


def node_overrides(spec: "ModelSpec") -> tuple[Override, ...]:
    """The spec's `quantization.overrides`."""
    return tuple(Override(item.match, item.precision) for item in spec.quantization.overrides)


def find_searched_kinds(
    variants: Iterable[GraphVariant], spec: "ModelSpec", exported: Exported
) -> tuple[Searched, ...]:
    """The kinds of int8 that the spec wants searched for these graph variants, each once; none of a model whose weights
    lie in shards, which a search would hold in memory (`not_searched`)."""
    if not spec.quantization.searches or exported.model.carries_qdq or exported.model.shards:
        return ()
    return tuple(dict.fromkeys(variant.searched for variant in variants if variant.searched))


def not_searched(variant: GraphVariant, spec: "ModelSpec", exported: Exported) -> tuple[str, ...]:
    """A note on a variant of which nothing is searched because its weights lie in shards; () for others."""
    asked = ", ".join(f"quantization.{key}" for key in spec.quantization.searches)
    if not (asked and variant.searched and exported.model.shards):
        return ()
    return (f"without {asked}: trials hold all weights in memory, and those of this model lie in shards",)


def _find_judged_output(spec: "ModelSpec", exported: Exported) -> str | None:
    """The output whose argmax is judged by labels; None where there are none."""
    if spec.calibration is None or spec.calibration.labels is None:
        return None
    metrics = spec.golden.metrics if spec.golden else ()
    return next((item.output for item in metrics if item.name == "accuracy"), exported.model.outputs[0].name)
