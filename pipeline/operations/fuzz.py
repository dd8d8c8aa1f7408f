"""Fuzzes one published engine on this machine, under the limits of the spec that it was built from.

The engine runs in a process of its own, so that one that crashes on a shape ends that process alone.
"""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from builders.execution.jobs import Job, WorkerContext
from enginesmith.registry.manifest import request_of
from enginesmith.registry.store.base import open_store
from pipeline.canary.engines import ChosenEngine
from pipeline.compile.run_context import RunContext
from pipeline.compile.steps.blobs import fetch_graph, golden_set, open_session, runnable
from pipeline.compile.steps.drift_limits import CompiledLimits
from pipeline.compile.steps.keys import engine_limits, limits_of, model_shapes
from pipeline.operations.revalidate import spec_of
from pipeline.values import EngineBlob, ModelShapes
from validation.fuzz.run import FuzzReport

if TYPE_CHECKING:
    from collections.abc import Sequence

    from enginesmith.core.types import Tensors
    from validation.fuzz.cases import FuzzCase


@dataclass(frozen=True)
class FuzzTerms:
    """What to try. count: random cases, besides those at the boundaries.  histogram: {dim: {size: count}} of traffic.

    only: the one case to try.  command: the words that fuzz this engine, for messages.
    """

    seed: int
    count: int
    command: tuple[str, ...]
    histogram: Mapping[str, Mapping[str, float]] | None = None
    only: str | None = None


@dataclass(frozen=True)
class FuzzEngine:
    """Compare an engine with its graph on drawn cases. golden: digest of the golden set.  limits: by metric."""

    engine: EngineBlob
    golden: str
    shapes: ModelShapes
    limits: Mapping[str, float]
    terms: FuzzTerms

    def run(self, context: WorkerContext) -> FuzzReport:
        """Every case with its outcome. Raises InputError for a histogram or a case that does not fit the model."""
        from builders.reference import ReferenceSession
        from validation.comparison.outputs import golden_drifts
        from validation.fuzz.cases import Groups
        from validation.fuzz.run import FuzzSides, fuzz
        from validation.limits.budget import default_budget
        from validation.limits.noise_floor import DoubleSession

        place, workdir, wanted = open_store(context.store), context.workdir, self.engine.request
        frozen, cases = golden_set(place, self.golden, workdir), self._cases()
        source = fetch_graph(place, wanted.model, workdir / "graph.onnx")
        graph = runnable(source, wanted.precision)
        documented = default_budget("engine", wanted.precision).override(self.limits)

        def run_in_float64(inputs: "Tensors") -> "Tensors":
            return DoubleSession(source).run(inputs)

        with ReferenceSession(graph) as expected, open_session(place, self.engine, workdir) as actual:
            # The graph in float64 is opened for a case that fails, and not before.
            exact = run_in_float64 if wanted.precision == "fp32" else None
            held = CompiledLimits(graph, wanted, self.limits, workdir)(expected, frozen)
            sides = FuzzSides(expected, actual, wanted.precision, held, documented, exact, golden_drifts(frozen))
            found = fuzz(cases, self.shapes.inputs, self.shapes.dims, Groups(frozen), sides, self.terms.seed)
        return found.report(lambda case: shlex.join([*self.terms.command, "--only", str(case)]))

    def _cases(self) -> "Sequence[FuzzCase]":
        from validation.fuzz.cases import VALUES, draw, parse_histogram, parse_only

        terms, dims = self.terms, self.shapes.dims
        if terms.only:
            return [parse_only(terms.only, dims)]
        histogram = parse_histogram(terms.histogram) if terms.histogram else None
        # int8-dynamic takes its scale from the whole batch: a NaN reaches all of it, in the graph too.
        dynamic = self.engine.request.precision == "int8-dynamic"
        values = [kind for kind in VALUES if not (dynamic and kind == "nan")]
        return draw(dims, terms.seed, terms.count, histogram, values)


def fuzz_published(
    chosen: ChosenEngine,
    context: RunContext,
    *,
    seed: int,
    cases: int,
    histogram: Mapping[str, Mapping[int, float]] | None,
    only: str | None,
) -> FuzzReport:
    """Fuzz one engine: every case with its outcome, and the smallest failing ones with their command.

    cases: number of random cases, besides those at the boundaries.  histogram: {dim: {size: count}} of traffic; None
    draws all sizes alike.  only: the one case to try.
    Raises InputError for a histogram or a case that does not fit the model, StepError for an engine that crashes.
    """
    entry, manifest = chosen.entry, chosen.manifest
    spec, request = spec_of(manifest), request_of(entry)
    registry = context.store.uri.removeprefix("file://")
    command = ["enginesmith", "debug", "fuzz", f"{manifest.model}@{manifest.version}", "--registry", registry]
    command += ["--target", entry.target, "--precision", entry.precision, "--seed", str(seed)]
    sizes = {dim: {str(size): count for size, count in counts.items()} for dim, counts in (histogram or {}).items()}
    terms = FuzzTerms(seed, cases, tuple(command), sizes or None, only)
    engine = EngineBlob(request, str(entry.digest), str(entry.suffix))
    limits = limits_of(spec, request.precision, "engine")
    fuzz = FuzzEngine(engine, manifest.golden, model_shapes(spec), limits, terms)
    name = f"fuzz {entry.unit}"
    job = Job(name, fuzz, context.store.uri, engine_limits(spec, "proof"))
    return context.run_job(context.local, name, job)
