"""Fuzzing one engine, in a process of its own: an engine that crashes on a shape takes only that process with it."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from builders.types import BuildRequest, Precision
from pipeline.jobs.blobs import dims_from, fetch, golden_set, runnable, tensors_from
from pipeline.jobs.engines import engine_session
from pipeline.jobs.limits import engine_limits
from pipeline.registry.store import open_store
from pipeline.values import Json

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from builders.types import Tensors
    from validation.fuzz.cases import Values


def fuzz_engine(
    store: str,
    request: Json,
    suffix: str,
    engine: str,
    golden: str,
    model: Json,
    limits: Mapping[str, float],
    asked: Json,
    workdir: Path,
) -> Json:
    """Try an engine against its graph on drawn cases: the report, as `Fuzzed.to_json` writes it.

    model: inputs and dims of the spec.  asked: seed, count, command (words), and histogram and only, or None.
    """
    import shlex

    from builders.onnxruntime import OrtSession
    from validation.budget import default_budget
    from validation.comparison import golden_drifts
    from validation.fuzz.cases import draw, histogram_from_json, parse_only
    from validation.fuzz.groups import Groups
    from validation.fuzz.outcome import Pair
    from validation.fuzz.run import fuzz

    place = open_store(store)
    wanted = BuildRequest.from_json(request)
    frozen = golden_set(place, golden, workdir)
    specs, dims = tensors_from(model["inputs"]), dims_from(model["dims"])
    histogram = histogram_from_json(asked["histogram"]) if asked["histogram"] else None
    drawn = draw(dims, asked["seed"], asked["count"], histogram, _values(wanted.precision))
    cases = [parse_only(asked["only"], dims)] if asked["only"] else drawn
    source = fetch(place, wanted.model, workdir / "graph.onnx")
    graph = runnable(source, wanted.precision)
    documented = default_budget("engine", wanted.precision).override(limits)
    with (
        OrtSession(graph, optimized=False) as expected,
        engine_session(place, wanted, engine, suffix, workdir) as actual,
    ):
        exact, usual = _exact(source, wanted.precision), golden_drifts(frozen)
        held = engine_limits(graph, expected, wanted, frozen, limits, workdir)
        pair = Pair(expected, actual, wanted.precision, held, documented, exact, usual)
        found = fuzz(cases, specs, dims, Groups(frozen), pair, asked["seed"])
    return found.to_json(lambda case: shlex.join([*asked["command"], "--only", str(case)]))


def _values(precision: Precision) -> "Sequence[Values]":
    """int8-dynamic takes its scale from the whole batch, so that a NaN reaches all of it, in the graph too."""
    from validation.fuzz.cases import VALUES

    return [kind for kind in VALUES if not (kind == "nan" and precision == "int8-dynamic")]


def _exact(graph: Path, precision: Precision) -> "Callable[[Tensors], Tensors] | None":
    """The graph in float64, opened when it is first asked for: only a case that fails asks."""
    if precision != "fp32":
        return None
    from validation.double import DoubleSession

    return lambda inputs: DoubleSession(graph).run(inputs)
