"""Fuzzing one engine, in a process of its own: an engine that crashes on a shape takes only that process with it."""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from builders.execution.jobs import WorkerContext
from enginery.core.types import Precision
from enginery.registry.store.base import open_store
from pipeline.compile.steps.blobs import fetch, golden_set, open_session, runnable
from pipeline.compile.steps.drift_limits import engine_drift_limits
from pipeline.values import EngineBlob, ModelShapes
from validation.fuzz.run import FuzzReport

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from enginery.core.types import Tensors
    from validation.fuzz.cases import FuzzCase, Values


@dataclass(frozen=True)
class FuzzTerms:
    """What is tried. count: random cases, besides the boundaries.  histogram: {dim: {size: count}} of traffic.

    only: one case.  command: the words that fuzz this engine, for messages.
    """

    seed: int
    count: int
    command: tuple[str, ...]
    histogram: Mapping[str, Mapping[str, float]] | None = None
    only: str | None = None


@dataclass(frozen=True)
class FuzzEngine:
    """Try an engine against its graph on drawn cases."""

    engine: EngineBlob
    golden: str
    shapes: ModelShapes
    limits: Mapping[str, float]
    terms: FuzzTerms

    def run(self, context: WorkerContext) -> FuzzReport:
        """The report. Raises InputError for a histogram or a case that does not fit."""
        from builders.reference import ReferenceSession
        from validation.comparison.outputs import golden_drifts
        from validation.fuzz.cases import Groups
        from validation.fuzz.run import FuzzSides, fuzz
        from validation.limits.budget import default_budget

        place, workdir, terms = open_store(context.store), context.workdir, self.terms
        wanted = self.engine.request
        frozen, cases = golden_set(place, self.golden, workdir), self._cases()
        source = fetch(place, wanted.model, workdir / "graph.onnx")
        graph = runnable(source, wanted.precision)
        documented = default_budget("engine", wanted.precision).override(self.limits)
        with (
            ReferenceSession(graph) as expected,
            open_session(place, self.engine, workdir) as actual,
        ):
            exact, usual = _exact(source, wanted.precision), golden_drifts(frozen)
            held = engine_drift_limits(graph, expected, wanted, frozen, self.limits, workdir)
            pair = FuzzSides(expected, actual, wanted.precision, held, documented, exact, usual)
            found = fuzz(cases, self.shapes.inputs, self.shapes.dims, Groups(frozen), pair, terms.seed)
        return found.report(lambda case: shlex.join([*terms.command, "--only", str(case)]))

    def _cases(self) -> "Sequence[FuzzCase]":
        from validation.fuzz.cases import draw, parse_histogram, parse_only

        terms, dims = self.terms, self.shapes.dims
        if terms.only:
            return [parse_only(terms.only, dims)]
        histogram = parse_histogram(terms.histogram) if terms.histogram else None
        return draw(dims, terms.seed, terms.count, histogram, _values(self.engine.request.precision))


def _values(precision: Precision) -> "Sequence[Values]":
    """int8-dynamic takes its scale from the whole batch, so that a NaN reaches all of it, in the graph too."""
    from validation.fuzz.cases import VALUES

    return [kind for kind in VALUES if not (kind == "nan" and precision == "int8-dynamic")]


def _exact(graph: Path, precision: Precision) -> "Callable[[Tensors], Tensors] | None":
    """The graph in float64, opened when it is first asked for: only a case that fails asks."""
    if precision != "fp32":
        return None
    from validation.limits.noise_floor import DoubleSession

    return lambda inputs: DoubleSession(graph).run(inputs)
