"""Measuring the drift of answers that were recorded elsewhere."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from builders.execution.jobs import WorkerContext
from enginery.core.errors import DataError, IntegrityError
from enginery.core.types import BuildRequest
from enginery.registry.store.base import open_store
from pipeline.compile.steps.blobs import fetch, golden_set, proof_of, runnable
from pipeline.compile.steps.drift_limits import engine_drift_limits
from pipeline.values import Proof
from validation.comparison.terms import TaskMetric
from validation.gpu.cases import Answers

if TYPE_CHECKING:
    from validation.golden.golden_set import GoldenSet
    from validation.gpu.cases import ReplaySession


@dataclass(frozen=True)
class CheckRecording:
    """The engine stage of `compile.steps.proofs.CheckEngine`, of recorded answers instead of a session.

    request: what the engine was built from.  answers: as `validation.gpu.cases.ReplaySession` gives them.
    """

    request: BuildRequest
    golden: str
    limits: Mapping[str, float]
    metric: TaskMetric | None
    answers: Answers

    def run(self, context: WorkerContext) -> Proof:
        """The checks. Raises IntegrityError where an answer is damaged or missing: that says nothing about the
        engine."""
        from builders.reference import ReferenceSession
        from validation.comparison.sessions import drift_checks
        from validation.gpu.cases import ReplaySession
        from validation.metrics.tally import Spreads

        place, spreads = open_store(context.store), Spreads()
        wanted, workdir = self.request, context.workdir
        frozen = golden_set(place, self.golden, workdir)
        actual = ReplaySession(wanted.inputs, wanted.outputs, self.answers)
        _check_whole(actual, frozen)
        graph = runnable(fetch(place, wanted.model, workdir / "graph.onnx"), wanted.precision)
        with ReferenceSession(graph) as expected:
            held = engine_drift_limits(graph, expected, wanted, frozen, self.limits, workdir)
            checks = drift_checks("engine", expected, actual, frozen, held, spreads)
            return proof_of(checks, actual, frozen, self.metric, "engine", spreads.at("engine"))


def _check_whole(actual: "ReplaySession", golden: "GoldenSet") -> None:
    from validation.comparison.sessions import run

    for case in golden.cases:
        try:
            run(actual, case.inputs)
        except DataError as error:
            raise IntegrityError(f"case {case.name!r}: {error}") from error
