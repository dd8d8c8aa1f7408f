"""The plan: spec x targets x precisions x backends -> units, each with its build key, its action and the reason.

If an int8 graph with plain ranges misses its limits, a search chooses which nodes int8 takes, and how. The search has
the limits that the graph was judged by, on calibration samples; its graph is judged by the golden set like any other. A
search that fails leaves the graph failed, and every other unit alone.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from builders.backends import discovery as backends
from builders.backends.optional_methods import get_scheme
from builders.backends.request_checks import profiles
from enginesmith.core.errors import EnginesmithError, InputError
from enginesmith.core.reports.proof import OVERLAP, describe
from enginesmith.core.state import with_int8_states
from enginesmith.core.text import pluralize
from enginesmith.core.types import QUANTIZED, Backend, BuildRequest, Dim, Precision, ShapeProfile, Target, TensorSpec
from enginesmith.registry.store.base import open_store
from pipeline.compile.causes import Causes
from pipeline.compile.run_context import RunContext, Work, stops_run
from pipeline.compile.steps.blobs import fetch_graph
from pipeline.compile.steps.engines import recall_engine, recall_reduced
from pipeline.compile.steps.gains import weigh_gain
from pipeline.compile.steps.graphs import quantize
from pipeline.compile.steps.search import search_for_limits
from pipeline.progress.events import Finished
from pipeline.spec.model import ModelSpec, matches_unit
from pipeline.values import BuildPlan, Exported, Graph, GraphVariant, Observed, Searched, SearchResult, Selection, Unit

if TYPE_CHECKING:
    from builders.backends.known_faults import Verdict

# TensorRT keeps kernels and memory for every profile; past this many, buckets cost more than they give. A CPU engine
# takes any shape, and its request then names only the first of them.
MOST_PROFILES = 64


# Where a unit can be built.
HERE, NOWHERE = "here", "nowhere in this fleet"


@dataclass(frozen=True)
class PlanCandidate:
    """A unit before its graph is known. native_io: whether a 16-bit graph's inputs and outputs are 16-bit too.

    worker: where its GPU is among the run's builders (`Selection.workers`); '' for nowhere.
    """

    target: Target
    precision: Precision
    backend: Backend
    native_io: bool = False
    worker: str = ""

    @property
    def built_at(self) -> str:
        """Where it can be built: 'here', 'on a Ray worker with sm_90', 'nowhere in this fleet'."""
        return (self.worker or NOWHERE) if self.backend.capabilities.tunes_on_target else HERE

    @property
    def opens_in(self) -> str:
        """Runtimes that open its engine: 'Triton, ONNX Runtime'; 'TensorRT for RTX only'."""
        opened_by = self.backend.capabilities.opened_by or ("enginesmith",)
        return ", ".join(opened_by) if len(opened_by) > 1 else f"{opened_by[0]} only"

    @property
    def absence(self) -> str:
        """A note that the vendor's support matrix lacks it; '' if it lists it, or none was read."""
        matrix = self.backend.capabilities.matrix
        return matrix.explain_absence(self.target.compute_capability, self.precision) if matrix else ""

    @property
    def unit(self) -> str:
        """'sm_89 int8 tensorrt-rtx'."""
        return f"{self.target.name} {self.precision} {self.backend.name}"

    @property
    def variant(self) -> GraphVariant:
        """The graph variant that this unit is built from."""
        scheme = get_scheme(self.backend, self.target) if self.precision in QUANTIZED else None
        return GraphVariant(self.precision, scheme, self.native_io and self.precision == "fp16")


def candidates(spec: ModelSpec, selection: Selection) -> tuple[PlanCandidate, ...]:
    """Every target, backend and precision that the run asks for and the backend builds for, in the spec's order."""
    compilers = [backends.configure(name, options) for name, options in spec.backends.items()]
    is_tuning = any(compiler.capabilities.tunes_on_target and compiler.versions() for compiler in compilers)
    workers = dict(selection.workers)

    def is_wanted(target: Target, tool: Backend, precision: Precision) -> bool:
        if not (tool.serves(target) and selection.covers(target, precision, tool.name)):
            return False
        is_named = tool.name in selection.backends
        return is_named or spec.has_unit(target, precision, tool.name, is_tuning and target.name in workers)

    combinations = itertools.product(spec.target_list(), compilers, spec.precision_list())
    native_io = spec.quantization.io == "native"
    return tuple(
        PlanCandidate(target, precision, compiler, native_io, workers.get(target.name, ""))
        for target, compiler, precision in combinations
        if is_wanted(target, compiler, precision)
    )


def describe_narrowing(spec: ModelSpec, selection: Selection) -> str | None:
    """Description of the options that leave out units of the spec; None if there are none."""
    if len(candidates(spec, selection)) == len(
        candidates(spec, replace(selection, targets=(), precisions=(), backends=()))
    ):
        return None
    names = [target.name for target in selection.targets], selection.precisions, selection.backends
    return "; ".join(filter(None, map(", ".join, names)))


def buildable_variants(spec: ModelSpec, selection: Selection, export: Exported) -> tuple[GraphVariant, ...]:
    """The unique graph variants of the candidates, without candidates that are refused for any graph."""
    variants = (
        candidate.variant for candidate in candidates(spec, selection) if _refuse_files(export, candidate) is None
    )
    return tuple(dict.fromkeys(variants))


def _refuse_files(export: Exported, candidate: PlanCandidate) -> str | None:
    """Why a unit of a model whose operators or weights lie in files of their own cannot be built, or None."""
    model, backend = export.model, candidate.backend
    if not model.library_entries:
        return backends.refuse_shards(backend, sum(size for _, size in model.shards))
    entries = backend.capabilities.library_entries
    if not set(model.library_entries) & set(entries):
        remedy = (
            f"add one that exports {' or '.join(entries)} to source.libraries"
            if entries
            else f"{backend.name} opens none; use another backend"
        )
        return f"the model has operators of its own, and no library of them is for {backend.name}; {remedy}"
    if candidate.precision in QUANTIZED and not model.carries_qdq:
        return (
            "ranges are measured without the libraries of a model's own operators; give a model with Q/DQ, or use fp32"
        )
    return None


def find_unserved(spec: ModelSpec, selection: Selection) -> tuple[str, ...]:
    """The targets asked for that no backend of the spec builds for. Raises InputError where that is all of them."""
    served_targets = {candidate.target for candidate in candidates(spec, selection)}
    spec_targets = [target for target in spec.target_list() if not selection.targets or target in selection.targets]
    missing_targets = tuple(target.name for target in spec_targets if target not in served_targets)
    if not served_targets:
        names = [name for name in spec.backends if not selection.backends or name in selection.backends]
        raise InputError(
            f"none of the backends ({', '.join(names)}) builds for {', '.join(missing_targets)}; "
            "`enginesmith backends list` says what does"
        )
    return missing_targets


def plan_builds(export: Exported, graphs: Sequence[Graph], work: Work) -> BuildPlan:
    """Decide, with the reason, for every unit whose graph is known whether it is built, already exists, is refused, or
    has failed because its graph failed."""
    spec = work.spec
    graphs_by_variant, causes = {graph.variant: graph for graph in graphs}, Causes(work)
    model, units = export.model, list[Unit]()
    for candidate in candidates(spec, work.selection):
        graph = graphs_by_variant.get(candidate.variant)
        if graph is None and _refuse_files(export, candidate):
            # None was written for a refusal.
            graph = Graph(candidate.variant, model.digest, model.inputs, model.outputs)
        if graph is not None:
            units.append(_unit(export, candidate, graph, causes, work))
    return BuildPlan(spec.model, tuple(units))


def check_required(plan: BuildPlan) -> None:
    """Stop when a unit that the spec requires is refused, or has no graph. Raises EnginesmithError."""
    missing_units = [unit for unit in plan.units if unit.action == "refused" or unit.graph.failure]
    lines = [f"{unit.name}: {unit.reason}" for unit in missing_units if unit.required]
    if lines:
        remedy = "change the spec, or take them out of build.required"
        raise EnginesmithError(
            "\n".join([f"units that the spec requires are refused, so nothing is published; {remedy}:", *lines])
        )


def _unit(export: Exported, candidate: PlanCandidate, graph: Graph, causes: Causes, work: Work) -> Unit:
    context = work.context
    request, remark = _request(work.spec, candidate, graph), ""
    is_required = any(matches_unit(pattern, request.unit) for pattern in work.spec.build.required)
    search_text = f"; {graph.searched}" if graph.searched else ""
    reason = _refusal(export, candidate, request, graph.idle)
    # An engine that is on record was built from a graph without known faults, or with them rewritten.
    stored_engine = None if reason or graph.failure else recall_engine(request, context)
    judgement = None if reason or graph.failure or stored_engine else _judge_known(request, context)
    reason = reason or (judgement.refusal if judgement else None)
    if work.spec.serve and candidate.built_at == NOWHERE:
        reason = (
            f"no builder of this run has {candidate.target.sm}, on which {candidate.backend.name} tunes; build it "
            "there, or with --executor ray and such a worker"
        )
    if reason:
        return Unit(request, graph, "refused", reason + (search_text if graph.idle else ""), is_required)
    if graph.own_int8 and candidate.precision != "int8-dynamic":
        remark = f"; {graph.own_int8}"
    remark += search_text + "".join(f"; {note}" for note in (judgement.notes if judgement else ()))
    if graph.failure:
        return Unit(request, graph, "failed", graph.failure.reason, is_required)
    if failed_checks := [*export.proof.failed, *graph.proof.failed]:
        more_text = f" (and {len(failed_checks) - 1} more)" if len(failed_checks) > 1 else ""
        failure_text = f"not built: its graph failed: {describe(failed_checks[0])}{more_text}"
        return Unit(request, graph, "failed", f"{failure_text}{search_text}", is_required)
    gain = weigh_gain(request, graph, export, work)
    is_asked = work.spec.quantization.gain != "any"
    gain_text = gain.text if gain and (is_asked or not gain.is_enough) else ""
    local_text = gain_text if gain and gain.is_local else ""
    if gain and is_asked and not (gain.is_enough or is_required):
        remedy = f"quantization.gain: any, or {request.unit!r} in build.required, builds it"
        return Unit(request, graph, "refused", f"{gain_text}; {remedy}", is_required, local=local_text)
    remark += f"; {gain_text}" if gain_text else ""
    if stored_engine is None and (reduced_request := recall_reduced(request, context)):
        option = backends.capabilities_of(request.backend).options.workspace_mib
        full_workspace_mib, reduced_workspace_mib = (
            dict(build_request.options)[option] for build_request in (request, reduced_request)
        )
        because = f"because a build with {full_workspace_mib} ran out of memory"
        remark = f"{remark}; with {option} {reduced_workspace_mib}, {because}"
        request, stored_engine = reduced_request, recall_engine(reduced_request, context)
    if stored_engine:
        reason = f"an engine with this build key is in the registry{remark}"
        return Unit(request, graph, "cached", reason, is_required, gain_text, local_text)
    reason = causes.of_build(request, export.model.digest) + remark
    return Unit(request, graph, "build", reason, is_required, gain_text, local_text)


def _judge_known(request: BuildRequest, context: RunContext) -> "Verdict":
    """Known faults of a compiler with the graph; none if the graph is not in the store."""
    from builders.backends.known_faults import COMPILERS, Verdict, judge_faults

    if request.backend not in COMPILERS or not context.store.has(request.model):
        return Verdict()
    return judge_faults(_list_known(context.store.uri, request.model, request.backend), request)


@lru_cache(maxsize=256)
def _list_known(store: str, model: str, compiler: str) -> tuple[tuple[str, str], ...]:
    from builders.backends.known_faults import list_faults

    with TemporaryDirectory() as folder:
        return tuple(list_faults(fetch_graph(open_store(store), model, Path(folder) / "graph.onnx"), compiler))


def _refusal(export: Exported, candidate: PlanCandidate, request: BuildRequest, idle: str | None = None) -> str | None:
    if reason := _refuse_files(export, candidate):
        return reason
    if export.model.carries_qdq and candidate.precision != "int8":
        precision = candidate.precision
        return f"the model carries Q/DQ of its own (QAT); {precision} would not be {precision}; use int8"
    if len(request.profiles) > MOST_PROFILES and not candidate.target.is_cpu:
        return f"the buckets combine to more than {MOST_PROFILES} profiles; use fewer buckets, or profiles: wide"
    if (reason := candidate.backend.refuses(with_int8_states(request))) or idle is None:
        return reason
    own_int8 = export.model.own_int8
    remedy = f"{own_int8}: use int8-dynamic" if own_int8 and candidate.precision == "int8" else "use fp32"
    return f"{idle}; {remedy}"


def _request(spec: ModelSpec, candidate: PlanCandidate, graph: Graph) -> BuildRequest:
    return BuildRequest(
        model=graph.model,
        precision=candidate.precision,
        target=candidate.target,
        backend=candidate.backend.name,
        inputs=graph.inputs,
        outputs=graph.outputs,
        profiles=_profiles(graph.inputs, _buckets_for(candidate.backend, spec.named_dims())),
        options=backends.options_of(candidate.backend),
        toolchain=backends.toolchain_of(candidate.backend, candidate.target),
        quantized_states=graph.quantized_states,
    )


def _buckets_for(backend: Backend, dims: tuple[Dim, ...]) -> tuple[Dim, ...]:
    """The dims for a backend; without bucket edges if the backend's options ask for one wide profile."""
    has_wide_profile = backend.capabilities.options.wide_profile in backends.options_of(backend)
    return tuple(replace(dim, edges=()) for dim in dims) if has_wide_profile else dims


@lru_cache(maxsize=64)
def _profiles(inputs: tuple[TensorSpec, ...], dims: tuple[Dim, ...]) -> tuple[ShapeProfile, ...]:
    # One more than allowed is enough for a refusal: a few dims with many buckets combine to millions.
    return tuple(itertools.islice(profiles(inputs, dims), MOST_PROFILES + 1))


# Failed checks that no other choice of int8 nodes can fix.
_BEYOND = (OVERLAP, "repeats", "runs", "outputs", "measured")


@dataclass(frozen=True)
class MissedGraphs:
    """The graphs of one kind of int8 that missed their limits."""

    kind: Searched
    graphs: tuple[Graph, ...]

    @property
    def why(self) -> str:
        """As 'plain ranges missed quantization sqnr_db of logits at golden: 12.1, limit 15 (and 2 more)'."""
        first_check, *other_checks = self.graphs[0].proof.failed
        more_text = f" (and {len(other_checks)} more)" if other_checks else ""
        return f"plain ranges missed {describe(replace(first_check, note=''))}{more_text}"


def search_follows(spec: ModelSpec) -> bool:
    """Whether a search for int8 nodes follows when plain ranges miss the limits."""
    quantization = spec.quantization
    return (
        "int8" in spec.precisions
        and quantization.search == "when-needed"
        and not quantization.searches
        and bool(spec.calibration)
    )


def find_missed(plan: BuildPlan, spec: ModelSpec, export: Exported) -> tuple[MissedGraphs, ...]:
    """The failed int8 graphs of a plan that a search may fix, by kind. None if `search_follows` is false, if the
    exported model failed, or if its weights are in shards, which a search would load into memory."""
    if not search_follows(spec) or export.proof.failed or export.model.shards:
        return ()
    failed_graphs = {unit.graph.variant: unit.graph for unit in plan.units if unit.action == "failed"}
    graphs_by_kind: dict[Searched, list[Graph]] = {}
    for variant, graph in failed_graphs.items():
        if (
            variant.searched
            and variant.precision == "int8"
            and graph.recipe
            and not any(check.name in _BEYOND for check in graph.proof.failed)
        ):
            graphs_by_kind.setdefault(variant.searched, []).append(graph)
    return tuple(MissedGraphs(kind, tuple(graphs)) for kind, graphs in graphs_by_kind.items())


def search_missed(
    missed_graphs: Sequence[MissedGraphs], export: Exported, ranges: Observed | None, work: Work
) -> tuple[Graph, ...]:
    """Replacements for graphs that missed their limits, from one search, with new proofs; if the search fails, the same
    graphs. Each has a note with the result of the search.

    Raises errors that `stops_run` names: an unreachable service, a damaged blob, a cancelled step.
    """
    for group in missed_graphs:
        text = f"{group.why}; a search chooses the nodes that int8 takes"
        work.context.progress.emit(Finished(f"plain {group.kind.name}", words=text))
    try:
        choices = search_for_limits([group.kind for group in missed_graphs], export, ranges, work)
        pairs = [(group, graph) for group in missed_graphs for graph in group.graphs]
        new_graphs = [(group, quantize(graph.variant, export, ranges, choices, work)) for group, graph in pairs]
        deciding_text = describe_deciding(work.spec)
        return tuple(
            _describe_search(graph, group.why, choices[group.kind], deciding_text) for group, graph in new_graphs
        )
    except EnginesmithError as error:
        if stops_run(error):
            raise
        kinds_text = " and ".join(group.kind.name for group in missed_graphs)
        work.context.progress.emit(Finished(f"search {kinds_text}", "failed", str(error)))
        failure_text = f"the search that followed failed: {error}"
        return tuple(replace(graph, searched=failure_text) for group in missed_graphs for graph in group.graphs)


def describe_deciding(spec: ModelSpec) -> str:
    """A note that a search ignores task metrics that decide; '' if none decides."""
    metrics = spec.golden.metrics if spec.golden else ()
    deciding_names = [metric.name for metric in metrics if "int8" in metric.decides]
    if not deciding_names:
        return ""
    return f"; SQNR judged its trials, but {' and '.join(deciding_names)} will judge the graph"


def _describe_search(graph: Graph, why: str, choice: SearchResult, deciding_text: str = "") -> Graph:
    """The int8 graph with a note on the result of its search. deciding_text: appended to the note."""
    share_text = f"{100 * choice.share:.1f} % of the multiplications with weights"
    float_text = (
        f"{pluralize(len(choice.left), 'node')} left in float" if choice.left else "no node left in float by it"
    )
    end_text = f"; it {choice.ended}: timeouts.quantization_s gives it longer" if choice.ended else ""
    search_text = f"searched, because {why}: {share_text} in int8, {float_text}{end_text}{deciding_text}"
    return replace(graph, searched=search_text, notes=(search_text, *graph.notes))
