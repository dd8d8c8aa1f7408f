"""Finding out which node drifted: of a graph against the float model, and of an engine against its graph."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from builders.errors import IntegrityError
from builders.types import Precision, QuantizationScheme, Session
from pipeline.jobs.blobs import fetch, golden_set, proof_of, runnable, text_of
from pipeline.jobs.calls import cases_of
from pipeline.jobs.engines import open_engine
from pipeline.jobs.graphs import RECIPE_FORMAT
from pipeline.jobs.limits import engine_limits, graph_limits
from pipeline.registry.store import Store, open_store
from pipeline.values import Json

if TYPE_CHECKING:
    from onnx import ModelProto

    from pipeline.quantization.choice.proposal import Recipe
    from validation.attribution.onnx_graph import OnnxGraph
    from validation.attribution.result import Attribution
    from validation.golden import GoldenSet
    from validation.report import Check


def attribute_graph(
    store: str,
    reference: str,
    graph: str,
    recipe: str | None,
    golden: str,
    precision: Precision,
    limits: Mapping[str, float],
    metric: Json | None,
    workdir: Path,
) -> Json:
    """Which node of a quantized or cast graph drifted from the float model; with a recipe, what to leave in float.

    recipe: of `jobs.graphs.quantize`. A search moves scales between tensors, so its own float model is then the one
    that the graph is taken apart against; the checks are against `reference` all the same.
    """
    from builders.onnxruntime import OrtSession
    from validation.attribution.attribute import attribute
    from validation.compare import expected_checks

    place = open_store(store)
    frozen = golden_set(place, golden, workdir)
    original = fetch(place, reference, workdir / "reference.onnx")

    with OrtSession(original, optimized=False) as session:
        budget = graph_limits(original, session, precision, frozen, limits, metric, workdir).budgets
        expected = _answered(frozen, session, workdir / "answered.safetensors")

    def judged(path: Path, cases: "GoldenSet") -> "list[Check]":
        with OrtSession(path, optimized=False) as actual:
            checks = expected_checks("quantization", actual, cases, budget)
            return _checks(proof_of(checks, actual, cases, metric if cases is expected else None, "graph"))

    candidate = runnable(fetch(place, graph, workdir / "graph.onnx"), precision)
    told = _read_recipe(place, recipe) if recipe else None
    source = original if told is None else fetch(place, told["onnx"], workdir / "source.onnx")
    before = judged(candidate, expected)
    pair = _graph(source, workdir / "expected"), _graph(candidate, workdir / "actual")
    found = attribute("quantization", precision, *pair, frozen, budget.tightest, _failed(before), tell=print)
    if not told or not found.failed:
        return _kept(place, found, None)
    edges = _failing_edges(expected, found, before)

    def judge(path: Path) -> "list[Check]":
        """Most trials fail on an edge that failed before; only those that do not are run on everything."""
        first = judged(path, edges) if edges.cases else []
        return first if _failed(first) else judged(path, expected)

    print("looking for the smallest set of groups to leave in float")
    return _kept(place, found, _propose(told, source, found, before, judge, workdir))


def attribute_engine(
    store: str,
    request: Json,
    suffix: str,
    engine: str,
    golden: str,
    limits: Mapping[str, float],
    metric: Json | None,
    sizes: Sequence[str],
    workdir: Path,
) -> Json:
    """Which node of an engine drifted from the graph it was built from. Only an ONNX Runtime engine can be tapped.

    sizes: cases of the failed check of sizes, which are then looked at in the golden set's place: it has passed.
    """
    from builders.onnxruntime import OrtSession
    from validation.attribution.attribute import attribute
    from validation.attribution.onnx_graph import OnnxGraph
    from validation.compare import drift_checks

    place = open_store(store)
    opened = open_engine(place, request, engine, suffix, workdir)
    precision = opened.request.precision
    frozen = golden_set(place, golden, workdir)
    graph = runnable(fetch(place, opened.request.model, workdir / "graph.onnx"), precision)
    with OrtSession(graph, optimized=False) as expected, opened.open(opened.path) as actual:
        held = engine_limits(graph, expected, opened.request, frozen, limits, workdir).loosest()
        if sizes:  # the limits are the golden set's
            frozen, metric = cases_of(sizes, frozen, opened.request), None
        checks = drift_checks("engine", expected, actual, frozen, held)
        before = _checks(proof_of(checks, actual, frozen, metric, "engine"))
    tapped = OnnxGraph(opened.path, workdir / "actual", opened.open, fuses=True)
    pair = _graph(graph, workdir / "expected"), tapped
    return _kept(
        place, attribute("engine", precision, *pair, frozen, held.budgets.tightest, _failed(before), tell=print), None
    )


def _answered(golden: "GoldenSet", session: Session, path: Path) -> "GoldenSet":
    """The golden set with what the reference itself answers, computed once for all trials."""
    from dataclasses import replace

    from validation.compare import run
    from validation.golden import GoldenSet

    cases = [replace(case, expected=run(session, case.inputs)) for case in golden.cases]
    GoldenSet(tuple(cases), golden.labels).save(path)
    return GoldenSet.load(path)


def _failing_edges(golden: "GoldenSet", found: "Attribution", before: "Sequence[Check]") -> "GoldenSet":
    """The worst edge that failed. Each edge must pass by itself, so a graph that fails on one has failed."""
    from validation.golden import GoldenSet

    failing = {check.case for check in before if not check.passed}
    names = [name for name in found.cases if name in failing]
    return GoldenSet(tuple(case for case in golden.of_kind("edge") if case.name in names[:1]))


def _graph(path: Path, workdir: Path) -> "OnnxGraph":
    from builders.onnxruntime import OrtSession
    from validation.attribution.onnx_graph import OnnxGraph

    return OnnxGraph(path, workdir, lambda file: OrtSession(file, optimized=False), fuses=False)


def _checks(proof: Json) -> "list[Check]":
    from validation.report import Check

    return [Check.from_json(item) for item in proof["checks"]]


def _failed(checks: "Sequence[Check]") -> list[str]:
    from validation.report import describe

    return [describe(check) for check in checks if not check.passed]


def _read_recipe(place: Store, digest: str) -> Json:
    recipe: Json = json.loads(place.read_blob(digest))
    if recipe.get("format") != RECIPE_FORMAT:
        raise IntegrityError(f"recipe {digest} is not of format {RECIPE_FORMAT}: upgrade enginery")
    return recipe


def _recipe(told: Json, model: Path) -> "Recipe":
    import onnx

    from pipeline.quantization.calibration.ranges import Ranges
    from pipeline.quantization.choice.proposal import Recipe
    from pipeline.quantization.schemes.overrides import Override

    flavour = told["flavour"]
    return Recipe(
        onnx.load(model),
        flavour["precision"],
        QuantizationScheme(**flavour["scheme"]) if flavour["scheme"] else None,
        Ranges.from_json(told["ranges"]) if told["ranges"] else None,
        tuple(Override.from_json(item) for item in told["overrides"]),
        told["left"],
        not flavour["native_io"],
    )


def _propose(
    told: Json,
    model: Path,
    found: "Attribution",
    before: "Sequence[Check]",
    judged: "Callable[[Path], list[Check]]",
    workdir: Path,
) -> Json:
    from pipeline.quantization.choice.proposal import propose
    from pipeline.sources.onnx_model import save_onnx

    recipe = _recipe(told, model)

    def judge(graph: "ModelProto") -> "list[Check]":
        path = workdir / "trial.onnx"
        save_onnx(graph, path)
        return judged(runnable(path, recipe.precision))

    return {**propose(recipe, found, before, judge), "searched": told["searched"]}


def _kept(place: Store, found: "Attribution", proposal: Json | None) -> Json:
    from dataclasses import replace

    from validation.attribution.words import headline

    value = replace(found, proposal=proposal).to_json()
    return {"attribution": place.put_bytes(text_of(value)), "headline": headline(found)}
