"""The step that finds which node drifted in a graph that failed its checks against the float model, or in an engine
that failed those against its graph; and the verdicts of a run that a drifted node can explain."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from builders.backends import discovery
from builders.backends.optional_methods import PartOpening
from builders.execution.jobs import Job, Request, WorkerContext
from builders.onnx_graphs.bodies import has_shards
from enginesmith.core.codec import document_error, encode_document, encode_fields, parse_as
from enginesmith.core.errors import EnginesmithError, InputError, IntegrityError, StepError, UnavailableError
from enginesmith.core.reports.proof import OVERLAP, PADDING, Check, describe
from enginesmith.core.types import Precision, Session
from enginesmith.registry.store.base import Store, open_store
from pipeline.compile.closure.code import backend_root
from pipeline.compile.run_context import Work
from pipeline.compile.steps.blobs import MEASURED_BYTES, fetch_graph, golden_set, proof_of, runnable, text_of
from pipeline.compile.steps.graphs import GraphRecipe
from pipeline.compile.steps.keys import code_key, metrics_of, step_limits
from pipeline.compile.steps.proofs import CompiledLimits, WrittenLimits, cases_of
from pipeline.outcome import JudgedUnit
from pipeline.progress.events import Finished
from pipeline.quantization.ranges import Ranges
from pipeline.values import Attributed, Built, EngineBlob
from validation.metrics.tasks.terms import TaskMetric

if TYPE_CHECKING:
    from onnx import ModelProto

    from validation.attribution.onnx_graph import OnnxGraph
    from validation.attribution.result import Attribution, Proposal
    from validation.golden.golden_set import GoldenSet


@dataclass(frozen=True)
class Suspect:
    """The subject of an attribution: the graph of `built`, or its engine. units: names of the units that use it.

    cases: of failed checks beside the golden set, which has passed.
    """

    stage: Literal["quantization", "engine"]
    built: Built
    units: tuple[str, ...]
    cases: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """'graph int8 (...)', or the unit."""
        unit = self.built.unit
        return f"graph {unit.graph.variant.name}" if self.stage == "quantization" else unit.name


def find_suspects(judged_units: Sequence[JudgedUnit]) -> list[Suspect]:
    """Graphs and engines that broke a limit: each graph once, and each engine that can be attributed."""
    suspects: dict[tuple[str, str], Suspect] = {}
    for result in judged_units:
        unit, failed_checks = result.built.unit, result.report.failed if result.report else ()
        # Left out are a broken contract and calls that do not repeat, which say how the engine behaves, padding,
        # which is about rules of the spec, and an overlap, which says how it was measured. A task metric counts for
        # the first place that it fails at, which the later ones inherit: on the exported model it is about labels,
        # data or training, and no graph or engine is to blame.
        explained_checks = [
            c
            for c in failed_checks
            if not c.name.startswith(("contract ", "calls ")) and c.name not in (OVERLAP, PADDING)
        ]
        artifacts = {check.case.rpartition(", ")[2] for check in explained_checks if check.stage == "task"}
        first_artifact = next(
            (artifact for artifact in ("exported model", "graph", "engine") if artifact in artifacts), ""
        )
        stages = {"graph": {"quantization"}, "engine": {"engine"}}.get(first_artifact, set())
        drifted_stages, unit_suspects = stages | {check.stage for check in explained_checks}, dict[str, Suspect]()
        if "quantization" in drifted_stages and unit.graph.recipe is not None:
            unit_suspects[unit.request.model] = Suspect("quantization", result.built, ())
        if "engine" in drifted_stages and issubclass(discovery.load(unit.request.backend), PartOpening):
            from validation.fuzz.cases import NOT_FINITE

            beside_cases = (check.case for check in failed_checks if check.name in ("sizes", "magnitudes"))
            cases = tuple(case for case in beside_cases if not case.endswith(NOT_FINITE))
            unit_suspects[unit.name] = Suspect("engine", result.built, (), cases)
        for name, suspect in unit_suspects.items():
            previous_suspect = suspects.get((suspect.stage, name), suspect)
            suspects[suspect.stage, name] = replace(previous_suspect, units=(*previous_suspect.units, unit.name))
    return list(suspects.values())


# Shares of the time: when the ranking ends, so that something can be proposed, and when everything does.
RANKING, WHOLE = 0.5, 0.8


@dataclass(frozen=True)
class AttributionFound:
    """The result of an attribution. attribution: digest of the attribution (`validation.attribution.result`) as a blob.
    headline: its finding in one line.  snippet: the proposal as YAML for the spec, '' where there is none."""

    attribution: str
    headline: str
    snippet: str = ""


@dataclass(frozen=True)
class AttributeGraph:
    """Find which node of a quantized or cast graph drifted from the float model, and what to leave in float.

    reference, graph, golden: digests.  recipe: digest of how the graph was written (`GraphRecipe`), None where that is
    not known: then nothing is proposed. A search moves scales between tensors, so the graph's nodes are then compared
    with the search's own float model; the checks are still against `reference`.  seconds: for all of it (`Clock`).
    """

    reference: str
    graph: str
    recipe: str | None
    golden: str
    precision: Precision
    limits: Mapping[str, float]
    metrics: tuple[TaskMetric, ...] = ()
    seconds: float = math.inf

    def run(self, context: WorkerContext) -> AttributionFound:
        """The attribution, in the store. Raises IntegrityError for a recipe that cannot be read."""
        from builders.reference import ReferenceSession
        from pipeline.sources.onnx_model import save_onnx
        from validation.attribution.sweep import attribute as attribute_drift
        from validation.comparison.sessions import expected_checks
        from validation.comparison.tasks import lift_limits

        clock = Clock(self.seconds)
        store, workdir, precision, metrics = open_store(context.store), context.workdir, self.precision, self.metrics
        golden = golden_set(store, self.golden, workdir)
        base_path = fetch_graph(store, self.reference, workdir / "reference.onnx")

        with ReferenceSession(base_path) as session:
            staged_limits = WrittenLimits(base_path, precision, self.limits, metrics, workdir)(session, golden)
            loosest_limits = staged_limits.loosest()
            expected_cases = _answer(golden, session, workdir / "answered.safetensors")

        def check(actual: Session, cases: "GoldenSet") -> Sequence[Check]:
            checks = expected_checks("quantization", actual, cases, loosest_limits)
            judged_metrics = metrics if cases is expected_cases else ()
            return lift_limits(proof_of(checks, actual, cases, judged_metrics, "graph").checks, metrics)

        candidate = runnable(fetch_graph(store, self.graph, workdir / "graph.onnx"), precision)
        recipe = _read_recipe(store, self.recipe) if self.recipe else None
        source = base_path if recipe is None else fetch_graph(store, recipe.model, workdir / "source.onnx")
        with ReferenceSession(candidate) as session:
            baseline = check(session, expected_cases)
        pair = _graph(source, workdir / "expected"), _graph(candidate, workdir / "actual")
        has_answers = recipe is None or recipe.model == self.reference
        attribution = attribute_drift(
            "quantization", precision, *pair, expected_cases, loosest_limits.budgets.tightest, _list_failed(baseline),
            tell=print, stop=lambda: clock.left(RANKING) <= 0, answered=has_answers,
        )  # fmt: skip
        if not recipe or not attribution.failed:
            return _keep(store, attribution, None)
        if has_shards(source):
            print("no proposal: each trial would write the weights of the model, which lie in shards, once more")
            return _keep(store, attribution, None)
        judge = _judge_trials(expected_cases, attribution, baseline, check)
        print("looking for the smallest set of groups to leave in float")

        def judge_graph(graph: "ModelProto") -> Sequence[Check]:
            path = workdir / "trial.onnx"
            save_onnx(graph, path)
            return judge(runnable(path, precision))

        return _keep(store, attribution, _propose(recipe, source, attribution, baseline, judge_graph, clock))


def _judge_trials(
    golden: "GoldenSet",
    attribution: "Attribution",
    before: Sequence[Check],
    check: Callable[[Session, "GoldenSet"], Sequence[Check]],
) -> Callable[[Path], Sequence[Check]]:
    """A function that checks a trial's ONNX file. before: the checks of the current graph.  check: runs all checks.

    Most trials fail clearly, or on an edge that failed before; only the others run on all cases.
    """
    from builders.reference import ReferenceSession
    from validation.comparison.sessions import golden_drifts
    from validation.comparison.tasks import find_broken, list_limits

    # The worst edge that failed. Each edge must pass by itself, so a graph that fails on one has failed.
    from validation.golden.golden_set import GoldenSet

    failed_cases = {check.case for check in before if not check.passed}
    names = [name for name in attribution.cases if name in failed_cases]
    edge_cases = GoldenSet(tuple(case for case in golden.of_kind("edge") if case.name in names[:1]))
    limits = list_limits(check for check in before if not check.passed)
    # The quarter of the golden cases on which the two graphs differ most.
    case_ranks = {name: index for index, name in enumerate(attribution.cases)}
    worst_first = sorted(golden.of_kind("golden"), key=lambda case: case_ranks.get(case.name, len(case_ranks)))
    worst_cases = worst_first[: math.ceil(len(worst_first) / 4)] if limits else []
    usual_drifts = golden_drifts(golden)

    def judge(path: Path) -> Sequence[Check]:
        with ReferenceSession(path) as session:
            if failed_check := find_broken(session, worst_cases, usual_drifts, limits):
                return [failed_check]
            edge_checks = check(session, edge_cases) if edge_cases.cases else []
            return edge_checks if _list_failed(edge_checks) else check(session, golden)

    return judge


@dataclass(frozen=True)
class AttributeEngine:
    """Find which node of an engine drifted from the graph it was built from. Only an ONNX Runtime engine can be tapped.

    cases: of failed checks of sizes and magnitudes, which are looked at in the place of the golden set: it has passed.
    seconds: for all of it (`Clock`).
    """

    engine: EngineBlob
    golden: str
    limits: Mapping[str, float]
    metrics: tuple[TaskMetric, ...] = ()
    cases: tuple[str, ...] = ()
    seconds: float = math.inf

    def run(self, context: WorkerContext) -> AttributionFound:
        """The attribution, in the store. Raises InputError for an engine of another backend."""
        from builders.reference import ReferenceSession
        from validation.attribution.onnx_graph import OnnxGraph
        from validation.attribution.sweep import attribute as attribute_drift
        from validation.comparison.sessions import drift_checks

        clock = Clock(self.seconds)
        store, workdir, metrics = open_store(context.store), context.workdir, self.metrics
        request = self.engine.request
        backend = discovery.configure(request.backend, dict(request.options))
        if not isinstance(backend, PartOpening):
            raise InputError(f"engines of {request.backend} cannot be tapped yet; attribute their graph")
        engine = fetch_graph(store, self.engine.digest, workdir / f"engine{self.engine.suffix}")
        golden = golden_set(store, self.golden, workdir)
        graph = runnable(fetch_graph(store, request.model, workdir / "graph.onnx"), request.precision)
        with ReferenceSession(graph) as reference, backend.open_part(engine) as session:
            loosest_limits = CompiledLimits(graph, request, self.limits, workdir)(reference, golden).loosest()
            if self.cases:  # the limits are the golden set's
                golden, metrics = cases_of(self.cases, golden, request), ()
            checks = drift_checks("engine", reference, session, golden, loosest_limits)
            failed_checks = _list_failed(proof_of(checks, session, golden, metrics, "engine").checks)
        tapped_graph = OnnxGraph(engine, workdir / "actual", backend.open_part, fuses=True)
        pair = _graph(graph, workdir / "expected"), tapped_graph
        attribution = attribute_drift(
            "engine", request.precision, *pair, golden, loosest_limits.budgets.tightest, failed_checks,
            tell=print, stop=lambda: clock.left(WHOLE) <= 0,
        )  # fmt: skip
        return _keep(store, attribution, None)


class Clock:
    """The time of one attribution, from now on. seconds: until its process is killed, without a result."""

    def __init__(self, seconds: float) -> None:
        self._begun, self._seconds = time.monotonic(), seconds

    def left(self, share: float) -> float:
        """Seconds until this share of the time is over; zero or negative afterwards."""
        return self._begun + share * self._seconds - time.monotonic()


def _answer(golden: "GoldenSet", session: Session, path: Path) -> "GoldenSet":
    """The golden set with the reference's own answers, computed once for all trials."""
    from validation.comparison.sessions import run
    from validation.golden.golden_set import GoldenSet

    cases = [replace(case, expected=run(session, case.inputs)) for case in golden.cases]
    GoldenSet(tuple(cases), golden.labels).save(path)
    return GoldenSet.load(path)


def _graph(path: Path, workdir: Path) -> "OnnxGraph":
    from builders.reference import ReferenceSession
    from validation.attribution.onnx_graph import OnnxGraph

    return OnnxGraph(path, workdir, lambda file: ReferenceSession(file), fuses=False)


def _list_failed(checks: Sequence[Check]) -> list[str]:
    return [describe(check) for check in checks if not check.passed]


def _read_recipe(store: Store, digest: str) -> GraphRecipe:
    try:
        return parse_as(store.read_blob(digest, MEASURED_BYTES), MEASURED_BYTES, GraphRecipe)
    except IntegrityError as error:
        remedy = "build again to write a new one"
        raise document_error(f"recipe {digest} cannot be read", error, remedy) from error


def _propose(
    written: GraphRecipe,
    model: Path,
    attribution: "Attribution",
    before: Sequence[Check],
    judge: "Callable[[ModelProto], Sequence[Check]]",
    clock: Clock,
) -> "Proposal":
    """The nodes to leave in float so that the graph passes. model: the float ONNX file.

    before: the checks of the graph as it is.  judge: makes the checks of a graph.
    """
    from builders.onnx_graphs.weights import load_graph
    from pipeline.quantization.search.repair import QuantizationRecipe, propose

    variant, ranges = written.variant, Ranges.from_json(written.ranges) if written.ranges else None
    recipe_fields = variant.precision, variant.scheme, ranges, written.overrides, written.left, not variant.native_io
    recipe = QuantizationRecipe(load_graph(model), *recipe_fields, written.states, written.formats)

    return replace(propose(recipe, attribution, before, judge, clock.left(WHOLE)), searched=written.searched)


def _keep(store: Store, attribution: "Attribution", proposal: "Proposal | None") -> AttributionFound:
    from validation.attribution.result import MOST_ROWS, summarize

    snippet = (proposal.snippet if proposal else None) or ""
    value = replace(attribution, rows=attribution.rows[:MOST_ROWS], proposal=proposal)
    return AttributionFound(store.put_bytes(text_of(encode_document(value))), summarize(attribution), snippet)


def attribute(suspect: Suspect, reference: str, golden: str, work: Work) -> Attributed:
    """Which node drifted in a suspect, or why that is not known, which stops no other step.

    reference: digest of the float model.  golden: of the golden set.
    Raises UnavailableError, and StepError when cancelled.
    """
    try:
        graph_attribution = _run_attribution(suspect, reference, golden, work)
    except EnginesmithError as error:
        if isinstance(error, UnavailableError) or (isinstance(error, StepError) and error.kind == "cancelled"):
            raise
        work.context.progress.emit(Finished(f"attribute {suspect.name}", "failed", str(error).splitlines()[0]))
        return Attributed(suspect.stage, suspect.name, suspect.units, None, str(error))
    return Attributed(
        suspect.stage,
        suspect.name,
        suspect.units,
        graph_attribution.attribution,
        graph_attribution.headline,
        graph_attribution.snippet,
    )


def _run_attribution(suspect: Suspect, reference: str, golden: str, work: Work) -> AttributionFound:
    spec = work.spec
    built_unit, graph = suspect.built, suspect.built.unit.graph
    precision = built_unit.unit.request.precision
    metrics = metrics_of(spec, precision)
    limits, seconds = spec.validation.limits_for(precision, suspect.stage), spec.timeouts.attribution_s
    request: Request[AttributionFound]
    if suspect.stage == "quantization":
        recipe = graph.recipe.digest if graph.recipe else None
        request = AttributeGraph(
            reference, built_unit.unit.request.model, recipe, golden, precision, limits, metrics, seconds
        )
        code_roots = []
    else:
        request = AttributeEngine(built_unit.blob, golden, limits, metrics, suspect.cases, seconds)
        code_roots = [backend_root(built_unit.unit.request.backend)]
    key = {**encode_fields(request), **code_key(type(request), *code_roots)}
    job = Job(f"attribute {suspect.name}", request, work.context.store.uri, step_limits(spec, "attribution"))
    return work.context.once("attribute", job.name, key, job, lambda result: [result.attribution])
