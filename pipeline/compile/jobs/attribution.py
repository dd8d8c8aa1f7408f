"""Finding out which node drifted: of a graph against the float model, and of an engine against its graph."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from builders.execution.jobs import WorkerContext
from enginery.core.codec import decode, encode_document
from enginery.core.errors import IntegrityError
from enginery.core.reports.proof import Check
from enginery.core.types import Precision, Session
from enginery.registry.store.base import Store, open_store
from pipeline.compile.jobs.blobs import fetch, golden_set, proof_of, runnable, text_of
from pipeline.compile.jobs.calls import cases_of
from pipeline.compile.jobs.engines import open_engine
from pipeline.compile.jobs.graphs import GraphRecipe
from pipeline.compile.jobs.limits import engine_limits, graph_limits
from pipeline.values import EngineBlob
from validation.comparison.task import TaskMetric

if TYPE_CHECKING:
    from onnx import ModelProto

    from pipeline.quantization.search.proposal import QuantizationRecipe
    from validation.attribution.onnx_graph import OnnxGraph
    from validation.attribution.result import Attribution, Proposal
    from validation.golden.golden_set import GoldenSet


@dataclass(frozen=True)
class AttributionFound:
    """attribution: digest of the attribution (`validation.attribution.result`), as a blob.

    headline: its finding in one line.
    """

    attribution: str
    headline: str


@dataclass(frozen=True)
class AttributeGraph:
    """Find which node of a quantized or cast graph drifted from the float model, and what to leave in float.

    reference, graph, golden: digests.  recipe: digest of how the graph was written (`GraphRecipe`), None where that is
    not known: then nothing is proposed. A search moves scales between tensors, so its own float model is then the one
    that the graph is taken apart against; the checks are against `reference` all the same.
    """

    reference: str
    graph: str
    recipe: str | None
    golden: str
    precision: Precision
    limits: Mapping[str, float]
    metric: TaskMetric | None = None

    def run(self, context: WorkerContext) -> AttributionFound:
        """The attribution, in the store. Raises IntegrityError for a recipe that cannot be read."""
        from builders.reference import ReferenceSession
        from validation.attribution.attribute import attribute
        from validation.comparison.sessions import expected_checks

        place, workdir, precision, metric = open_store(context.store), context.workdir, self.precision, self.metric
        frozen = golden_set(place, self.golden, workdir)
        original = fetch(place, self.reference, workdir / "reference.onnx")

        with ReferenceSession(original) as session:
            budget = graph_limits(original, session, precision, frozen, self.limits, metric, workdir).budgets
            expected = _answer(frozen, session, workdir / "answered.safetensors")

        def judged(path: Path, cases: "GoldenSet") -> Sequence[Check]:
            with ReferenceSession(path) as actual:
                checks = expected_checks("quantization", actual, cases, budget)
                return proof_of(checks, actual, cases, metric if cases is expected else None, "graph").checks

        candidate = runnable(fetch(place, self.graph, workdir / "graph.onnx"), precision)
        recipe = _read_recipe(place, self.recipe) if self.recipe else None
        source = original if recipe is None else fetch(place, recipe.model, workdir / "source.onnx")
        before = judged(candidate, expected)
        pair = _graph(source, workdir / "expected"), _graph(candidate, workdir / "actual")
        found = attribute("quantization", precision, *pair, frozen, budget.tightest, _list_failed(before), tell=print)
        if not recipe or not found.failed:
            return _keep(place, found, None)
        edges = _failing_edges(expected, found, before)

        def judge(path: Path) -> Sequence[Check]:
            """Most trials fail on an edge that failed before; only those that do not are run on everything."""
            first = judged(path, edges) if edges.cases else []
            return first if _list_failed(first) else judged(path, expected)

        print("looking for the smallest set of groups to leave in float")
        return _keep(place, found, _propose(recipe, source, found, before, judge, workdir))


@dataclass(frozen=True)
class AttributeEngine:
    """Find which node of an engine drifted from the graph it was built from. Only an ONNX Runtime engine can be tapped.

    sizes: cases of the failed check of sizes, which are then looked at in the golden set's place: it has passed.
    """

    engine: EngineBlob
    golden: str
    limits: Mapping[str, float]
    metric: TaskMetric | None = None
    sizes: tuple[str, ...] = ()

    def run(self, context: WorkerContext) -> AttributionFound:
        """The attribution, in the store. Raises InputError for an engine of another backend."""
        from builders.reference import ReferenceSession
        from validation.attribution.attribute import attribute
        from validation.attribution.onnx_graph import OnnxGraph
        from validation.comparison.sessions import drift_checks

        place, workdir, metric = open_store(context.store), context.workdir, self.metric
        opened = open_engine(place, self.engine, workdir)
        request = opened.request
        frozen = golden_set(place, self.golden, workdir)
        graph = runnable(fetch(place, request.model, workdir / "graph.onnx"), request.precision)
        with ReferenceSession(graph) as expected, opened.open(opened.path) as actual:
            held = engine_limits(graph, expected, request, frozen, self.limits, workdir).loosest()
            if self.sizes:  # the limits are the golden set's
                frozen, metric = cases_of(self.sizes, frozen, request), None
            checks = drift_checks("engine", expected, actual, frozen, held)
            failed = _list_failed(proof_of(checks, actual, frozen, metric, "engine").checks)
        tapped = OnnxGraph(opened.path, workdir / "actual", opened.open, fuses=True)
        pair = _graph(graph, workdir / "expected"), tapped
        found = attribute("engine", request.precision, *pair, frozen, held.budgets.tightest, failed, tell=print)
        return _keep(place, found, None)


def _answer(golden: "GoldenSet", session: Session, path: Path) -> "GoldenSet":
    """The golden set with what the reference itself answers, computed once for all trials."""
    from dataclasses import replace

    from validation.comparison.sessions import run
    from validation.golden.golden_set import GoldenSet

    cases = [replace(case, expected=run(session, case.inputs)) for case in golden.cases]
    GoldenSet(tuple(cases), golden.labels).save(path)
    return GoldenSet.load(path)


def _failing_edges(golden: "GoldenSet", found: "Attribution", before: Sequence[Check]) -> "GoldenSet":
    """The worst edge that failed. Each edge must pass by itself, so a graph that fails on one has failed."""
    from validation.golden.golden_set import GoldenSet

    failing = {check.case for check in before if not check.passed}
    names = [name for name in found.cases if name in failing]
    return GoldenSet(tuple(case for case in golden.of_kind("edge") if case.name in names[:1]))


def _graph(path: Path, workdir: Path) -> "OnnxGraph":
    from builders.reference import ReferenceSession
    from validation.attribution.onnx_graph import OnnxGraph

    return OnnxGraph(path, workdir, lambda file: ReferenceSession(file), fuses=False)


def _list_failed(checks: Sequence[Check]) -> list[str]:
    from enginery.core.reports.proof import describe

    return [describe(check) for check in checks if not check.passed]


def _read_recipe(place: Store, digest: str) -> GraphRecipe:
    try:
        return decode(json.loads(place.read_blob(digest)), GraphRecipe)
    except (ValueError, IntegrityError) as error:
        raise IntegrityError(f"recipe {digest} cannot be read ({error}); build again, which writes it anew") from error


def _recipe(told: GraphRecipe, model: Path) -> "QuantizationRecipe":
    import onnx

    from pipeline.quantization.ranges import Ranges
    from pipeline.quantization.search.proposal import QuantizationRecipe

    ranges = Ranges.from_json(told.ranges) if told.ranges else None
    flavour = told.flavour
    return QuantizationRecipe(
        onnx.load(model),
        flavour.precision,
        flavour.scheme,
        ranges,
        told.overrides,
        told.left,
        not flavour.native_io,
    )


def _propose(
    told: GraphRecipe,
    model: Path,
    found: "Attribution",
    before: Sequence[Check],
    judged: Callable[[Path], Sequence[Check]],
    workdir: Path,
) -> "Proposal":
    from dataclasses import replace

    from pipeline.quantization.search.proposal import propose
    from pipeline.sources.onnx_model import save_onnx

    recipe = _recipe(told, model)

    def judge(graph: "ModelProto") -> Sequence[Check]:
        path = workdir / "trial.onnx"
        save_onnx(graph, path)
        return judged(runnable(path, recipe.precision))

    return replace(propose(recipe, found, before, judge), searched=told.searched)


def _keep(place: Store, found: "Attribution", proposal: "Proposal | None") -> AttributionFound:
    from dataclasses import replace

    from validation.attribution.formatting import summarize
    from validation.attribution.result import MOST_ROWS

    value = replace(found, rows=found.rows[:MOST_ROWS], proposal=proposal)
    return AttributionFound(place.put_bytes(text_of(encode_document(value))), summarize(found))
